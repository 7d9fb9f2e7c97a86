import pytest
import torch

from nemo_offload_rl.data.batch import BatchedData, GlobalCounts, response_batch, response_logprobs
from nemo_offload_rl.data.loader import DataPosition, ProblemLoader
from nemo_offload_rl.data.problem import DataError, Problem


def batch(rows: int, width: int, first: int = 0) -> BatchedData:
    ids = torch.arange(first, first + rows * width).view(rows, width)
    texts = [f"t{first + row}" for row in range(rows)]
    return BatchedData(input_ids=ids, input_lengths=torch.full((rows,), width), texts=texts)


def test_size_is_the_number_of_rows():
    data = batch(3, 2)
    assert (data.size, BatchedData().size) == (3, 0)
    data["sample_mask"] = torch.ones(2)
    with pytest.raises(ValueError, match=r"one length.*'sample_mask': 2"):
        data.size  # noqa: B018


def test_slice_and_select_keep_columns_together():
    data = batch(4, 2)
    assert data.slice(1, 3)["texts"] == ["t1", "t2"]
    assert data.slice(1, 3)["input_ids"].tolist() == [[2, 3], [4, 5]]
    picked = data.select([3, 0, 3])
    assert picked["texts"] == ["t3", "t0", "t3"]
    assert picked["input_ids"][:, 0].tolist() == [6, 0, 6]
    assert data.select(torch.tensor([], dtype=torch.long)).size == 0


def test_concat_pads_on_the_right_and_keeps_dtypes():
    joined = BatchedData.concat([batch(1, 2), batch(2, 3, first=10)], pad_values={"input_ids": -1})
    assert joined["input_ids"].tolist() == [[0, 1, -1], [10, 11, 12], [13, 14, 15]]
    assert joined["input_lengths"].tolist() == [2, 3, 3]
    assert joined["texts"] == ["t0", "t10", "t11"]
    masks = BatchedData.concat([BatchedData(token_mask=torch.ones(1, width)) for width in (2, 3)])["token_mask"]
    assert (joined["input_ids"].dtype, masks.dtype, masks[0].tolist()) == (torch.int64, torch.float32, [1, 1, 0])
    with pytest.raises(ValueError, match="same columns"):
        BatchedData.concat([batch(1, 2), BatchedData(input_ids=torch.zeros(1, 2))])


def test_chunks_cover_every_row_once():
    pieces = list(batch(5, 1).chunks(2))
    assert [piece.size for piece in pieces] == [2, 2, 1]
    assert torch.equal(torch.cat([piece["input_ids"] for piece in pieces]), batch(5, 1)["input_ids"])
    with pytest.raises(ValueError, match="at least 1 row"):
        list(batch(2, 1).chunks(0))


def test_a_reader_names_the_column_that_is_missing_or_wrong():
    batch = BatchedData(input_ids=torch.zeros(2, 3), input_lengths=torch.tensor([3, 2]))
    batch.require_columns(("input_ids", "input_lengths"), "train")
    with pytest.raises(ValueError, match="column token_mask"):
        batch.require_columns(("input_ids", "token_mask"), "train")
    batch["input_lengths"] += 1
    with pytest.raises(ValueError, match=r"input_lengths has 4, .* 3 tokens"):
        batch.require_columns(("input_ids",), "train")


def test_counts_leave_out_the_first_position_and_dropped_samples():
    mask = torch.tensor([[1.0, 1, 0], [0, 1, 1], [0, 1, 1]])
    data = BatchedData(token_mask=mask, sample_mask=torch.tensor([1.0, 1, 0]))
    counts = GlobalCounts.of(data)
    assert counts.valid_seqs.item() == 2
    assert counts.valid_toks.item() == 1 + 2


def test_rows_that_belong_together_cannot_be_separated():
    data = batch(6, 2).in_groups(2)
    for kept in (data.slice(2, 6), data.select([4, 5, 0, 1]), data.to("cpu"), BatchedData.concat([data, data])):
        assert kept.group_size == 2
    assert [piece.size for piece in data.chunks(4)] == [4, 2]
    for separate in (
        lambda: data.slice(1, 3), lambda: data.slice(0, 5), lambda: list(data.chunks(3)), lambda: data.select([0, 2]),
        lambda: data.select([1, 2]), lambda: data.select([0]),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="no whole groups of 2 rows"):
            separate()
    with pytest.raises(ValueError, match="5 rows is no whole number of groups of 2"):
        batch(5, 1).in_groups(2)
    with pytest.raises(ValueError, match=r"groups of the same size, found \[1, 2\]"):
        BatchedData.concat([data, batch(2, 2)])


def test_prompts_and_responses_are_padded_on_the_right_and_logprobs_stand_at_their_tokens():
    answers = response_batch([[1, 2], [3]], [[4], [5, 6, 7]], 9)
    assert answers["input_ids"].tolist() == [[1, 2, 4, 9], [3, 5, 6, 7]]
    assert answers["input_ids"].dtype == torch.int64
    assert answers["input_lengths"].tolist() == [3, 4]
    assert answers["token_mask"].tolist() == [[0, 0, 1, 0], [0, 1, 1, 1]]
    assert response_logprobs(answers, [[-0.5], [-1.0, -2.0, -3.0]]).tolist() == [[0, 0, -0.5, 0], [0, -1, -2, -3]]
    without = response_batch([[1, 2], [3]], [[], [5]], 9)  # a response, which leaves its sample out of the loss
    assert without["sample_mask"].tolist() == [0, 1]
    assert without["token_mask"][0].tolist() == [0, 0]


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
