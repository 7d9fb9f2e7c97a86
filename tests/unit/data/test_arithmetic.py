import pytest

from nemo_offload_rl.data.arithmetic import make_arithmetic, make_arithmetic_pairs
from nemo_offload_rl.data.problem import DataError


@pytest.mark.parametrize("num_digits", [1, 2, 3, 6])
@pytest.mark.parametrize("role", ["train", "validation"])
def test_problems_are_right_and_of_one_length(role, num_digits):
    problems = make_arithmetic(role, num_digits, 8, seed=3)
    assert len(set(problems)) == 8
    for problem in problems:
        left, right = problem.prompt.removesuffix("=").split("+")
        assert len(left) == len(right) == num_digits
        assert problem.answer == str(int(left) + int(right)).zfill(num_digits + 1)


def test_training_and_validation_share_no_problem_whatever_their_seeds_and_are_the_whole_task():
    validation = set(make_arithmetic("validation", 2, 600, seed=1))
    for seed in range(3):
        assert not validation & set(make_arithmetic("train", 2, 9000, seed=seed))
    everything = {*make_arithmetic("train", 2, 9339, seed=0), *make_arithmetic("validation", 2, 661, seed=0)}
    assert len(everything) == 10_000


def test_both_terms_take_every_value_about_equally_often():
    problems = make_arithmetic("validation", 2, 661, seed=0)
    for place in (0, 3):
        assert abs(sum(problem.prompt[place] < "5" for problem in problems) - 330) < 60


def test_too_many_problems_are_refused_with_the_number_there_is():
    with pytest.raises(DataError, match=r"data\.validation\.num_problems is 700, but only 661 additions of 2-digit"):
        make_arithmetic("validation", 2, 700, seed=0)
    with pytest.raises(DataError, match="1 to 9, found 0"):
        make_arithmetic("train", 0, 1, seed=0)
    message = r"data\.train\.num_problems must be at most 1,000,000, .* found 3,000,000,000: ask for fewer"
    for make in (make_arithmetic, make_arithmetic_pairs):
        with pytest.raises(DataError, match=message):
            make("train", 9, 3_000_000_000, seed=0)


@pytest.mark.parametrize("num_digits", [1, 2, 9])
def test_a_pair_has_the_right_sum_and_one_that_is_off_by_one_in_one_place(num_digits):
    pairs = make_arithmetic_pairs("train", num_digits, 50, seed=3)
    for pair, problem in zip(pairs, make_arithmetic("train", num_digits, 50, seed=3), strict=True):
        (message,) = pair.context
        assert (message.role, message.content, pair.chosen) == ("user", problem.prompt, problem.answer)
        assert len(pair.rejected) == len(pair.chosen)
        assert 0 <= int(pair.rejected) <= 2 * (10**num_digits - 1)
        assert abs(int(pair.chosen) - int(pair.rejected)) in [10**place for place in range(num_digits + 1)]
    assert make_arithmetic_pairs("train", num_digits, 50, seed=3) == pairs
    assert make_arithmetic_pairs("train", num_digits, 50, seed=4) != pairs
