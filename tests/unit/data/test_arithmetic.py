from types import SimpleNamespace

import pytest

from nemo_offload_rl.data.arithmetic import make_arithmetic, make_arithmetic_pairs
from nemo_offload_rl.data.problem import DataError
from nemo_offload_rl.data.tokenizer import arithmetic_tokenizer, check_stop_strings, check_token_ids, load_tokenizer


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


def test_the_arithmetic_tokenizer_has_one_token_a_character_and_survives_saving(tmp_path):
    arithmetic_tokenizer().save_pretrained(tmp_path)
    for tokenizer in (load_tokenizer("arithmetic"), load_tokenizer(str(tmp_path))):
        assert tokenizer("07+85=", add_special_tokens=False)["input_ids"] == [0, 7, 10, 8, 5, 11]
        assert tokenizer.decode([0, 9, 2]) == "092"
        assert tokenizer.batch_decode([[0, 9, 2, 12], []], skip_special_tokens=True) == ["092", ""]
        assert (len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id) == (14, 12, 13)
        assert tokenizer.chat_template is None
    assert load_tokenizer(str(tmp_path), chat_template="{{ messages }}").chat_template == "{{ messages }}"
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path / "unpadded")
    assert load_tokenizer(str(tmp_path / "unpadded")).pad_token_id == 12  # its end


def test_a_folder_without_a_tokenizer_is_one_clear_error(tmp_path):
    with pytest.raises(DataError, match=r"policy\.tokenizer\.name: no tokenizer could be loaded"):
        load_tokenizer(str(tmp_path))


def test_stop_strings_are_of_the_tokenizers_words():
    tokenizer, key = load_tokenizer("arithmetic"), "policy.generation.stop_strings"
    check_stop_strings(tokenizer, ["1+", "<eos>"], key)
    with pytest.raises(DataError, match=r"stop_strings has '2\\n', in which '\\n' is no token"):
        check_stop_strings(tokenizer, ["1", "2\n"], key)
    in_python = SimpleNamespace()
    check_stop_strings(in_python, [], key)
    with pytest.raises(DataError, match=r"stop_strings needs a fast tokenizer, but .* is a SimpleNamespace"):
        check_stop_strings(in_python, ["1"], key)


def test_token_ids_outside_the_vocabulary_are_refused():
    tokenizer = load_tokenizer("arithmetic")
    check_token_ids(tokenizer, [0, 13], "policy.generation.stop_token_ids")
    with pytest.raises(DataError, match=r"stop_token_ids has 14, which is no token"):
        check_token_ids(tokenizer, [12, 14], "policy.generation.stop_token_ids")
