import pytest

from nemo_offload_rl.data.loader import DataPosition, ProblemLoader
from nemo_offload_rl.data.problem import DataError, Problem

PROBLEMS = [Problem(str(number), "") for number in range(10)]


def draw(loader: ProblemLoader, num_batches: int, size: int = 3) -> list[list[str]]:
    return [[problem.prompt for problem in loader.next_batch(size)] for _ in range(num_batches)]


def test_without_shuffling_the_order_is_that_of_the_data():
    assert draw(ProblemLoader(PROBLEMS, shuffle=False, seed=0), 4) == [
        ["0", "1", "2"], ["3", "4", "5"], ["6", "7", "8"], ["0", "1", "2"],
    ]  # fmt: skip


def test_an_epoch_repeats_nothing_and_ends_with_its_last_whole_batch_and_the_next_has_another_order():
    loader, positions, batches = ProblemLoader(PROBLEMS, shuffle=True, seed=1), [], []
    for _ in range(6):
        batches += draw(loader, 1)
        positions.append((loader.position.epoch, loader.position.samples))
    assert positions == [(0, 3), (0, 6), (1, 0), (1, 3), (1, 6), (2, 0)]
    epochs = [[prompt for batch in batches[start : start + 3] for prompt in batch] for start in (0, 3)]
    assert [len(set(epoch)) for epoch in epochs] == [9, 9]
    assert epochs[0] != epochs[1]
    assert draw(ProblemLoader(PROBLEMS, shuffle=True, seed=2), 6) != batches


@pytest.mark.parametrize("taken", range(8))
def test_a_position_is_all_it_takes_to_go_on(taken):
    whole = draw(ProblemLoader(PROBLEMS, shuffle=True, seed=1), 8)
    first = ProblemLoader(PROBLEMS, shuffle=True, seed=1)
    draw(first, taken)
    resumed = ProblemLoader(PROBLEMS, shuffle=True, seed=1)
    resumed.position = DataPosition(first.position.epoch, first.position.samples)
    assert draw(resumed, 8 - taken) == whole[taken:]


def test_a_batch_larger_than_the_data_is_refused():
    with pytest.raises(DataError, match=r"The size of a step is 11, but the training set .* only 10 problems"):
        ProblemLoader(PROBLEMS, shuffle=True, seed=1).next_batch(11)
    with pytest.raises(DataError, match=r"train_global_batch_size is 11, but the training set .* only 10 pairs"):
        ProblemLoader(PROBLEMS, shuffle=True, seed=1, noun="pairs").require(11, "policy.train_global_batch_size")
