"""Tests how rows become micro-batches, and that packed rows have the numbers of padded ones: SFT, GRPO and DPO."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import tiny
from support.losses import PLAIN
from support.tiny import TINY_QWEN3, batch_of_lengths, packed_rows, random_batch, tiny_policy, with_plain_sgd

from nemo_offload_rl.algorithms.losses import DPOLoss, NLLLoss
from nemo_offload_rl.data.batch import LOGPROB_COLUMNS, BatchedData
from nemo_offload_rl.mcore import batches as micro


def test_bins_are_split_until_every_rank_has_as_many():
    assert micro.pack_bins([12, 3, 4], 10) == [[0], [1, 2]]
    assert micro.pack_bins([8, 8, 3, 4], 10, group_size=2) == [[0, 1], [2, 3]]
    bins = micro.pack_bins([1, 1, 1, 1], 10, min_bins=3)
    assert len(bins) == 3
    assert sorted(i for items in bins for i in items) == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="2 samples cannot fill 3 packed micro-batches"):
        micro.pack_bins([1, 1], 10, min_bins=3)
    with pytest.raises(ValueError, match="2 groups of 2 samples cannot fill 3 packed"):
        micro.pack_bins([1, 1, 1, 1], 10, min_bins=3, group_size=2)


@pytest.mark.parametrize("seed", range(50))
def test_neither_packing_nor_padding_splits_a_group(seed):
    rng = random.Random(seed)
    group_size, num_groups = rng.randint(1, 4), rng.randint(1, 12)
    data = random_batch(group_size * num_groups, longest=12, seed=seed).in_groups(group_size)
    data["row"] = torch.arange(data.size)
    lengths = data["input_lengths"].tolist()
    min_bins = rng.randint(1, num_groups)
    bins = micro.pack_bins(lengths, rng.randint(1, 60), min_bins=min_bins, group_size=group_size)
    assert len(bins) >= min_bins
    packed = micro.packed_microbatches(data, bins, divisible_by=2, row_divisible_by=8)
    padded = micro.padded_microbatches(data, group_size * rng.randint(1, 4))
    for batches in (packed, padded):
        seen = [batch.data["row"].view(-1, group_size) for batch in batches]
        for rows in seen:
            assert torch.equal(rows, rows[:, :1] + torch.arange(group_size))  # consecutive, from a group's first row
            assert not (rows[:, 0] % group_size).any()
        assert torch.cat(seen).unique().tolist() == list(range(data.size))
    assert sum(batch.data.size for batch in packed) == data.size
    assert sum(float(batch.data["sample_mask"].sum()) for batch in padded) == float(data["sample_mask"].sum())


def test_packed_rows_come_back_as_padded_rows():
    data = random_batch(6, longest=12)
    lengths = data["input_lengths"].tolist()
    for batch in micro.packed_microbatches(data, micro.pack_bins(lengths, 24), divisible_by=2, row_divisible_by=8):
        assert batch.tokens.shape == batch.positions.shape
        assert batch.tokens.shape[1] % 8 == 0
        assert batch.cu_seqlens[-1] == batch.tokens.shape[1]
        starts = batch.cu_seqlens[:-1].long()
        assert batch.positions[0, starts].abs().sum() == 0
        width = batch.data["input_ids"].shape[1]
        rows = micro.unpack(batch.tokens[0].float(), batch.cu_seqlens, batch.data["input_lengths"], width)
        torch.testing.assert_close(rows, batch.data["input_ids"].float())


def test_the_last_padded_micro_batch_is_filled_with_rows_that_count_for_nothing():
    batches = micro.padded_microbatches(random_batch(5), 2)
    assert [batch.tokens.shape for batch in batches] == [(2, 12)] * 3
    assert batches[-1].data["sample_mask"].tolist() == [1.0, 0.0]


def test_filler_micro_batches_are_the_shortest_and_count_for_nothing():
    data = random_batch(4).in_groups(2)
    batches = micro.packed_microbatches(data, [[0, 1], [2, 3]], divisible_by=2, row_divisible_by=2)
    shortest = min(batches, key=lambda batch: batch.tokens.shape[1])
    filled = micro.with_filler(batches, 4)
    assert filled[:2] == batches
    for filler in filled[2:]:
        assert torch.equal(filler.tokens, shortest.tokens)
        assert (filler.data.group_size, filler.data["sample_mask"].tolist()) == (2, [0.0, 0.0])
    assert [batch.data["sample_mask"].tolist() for batch in batches] == [[1.0, 1.0]] * 2
    del data["sample_mask"]  # log-prob passes may lack it
    assert len(micro.with_filler(micro.padded_microbatches(data, 4), 2)) == 2


def test_lengths_are_rounded_up_and_limited():
    assert micro.padded_length(9, 4, 16) == 12
    with pytest.raises(ValueError, match=r"17 tokens, more than policy\.max_total_sequence_length 16"):
        micro.padded_length(17, 4, 16)
    assert micro.with_length(random_batch(2, longest=12), 16)["token_mask"].shape == (2, 16)


def first_fit_decreasing(sizes, capacity):
    room = []
    for size in sorted(sizes, reverse=True):
        slot = next((n for n, free in enumerate(room) if size <= free), None)
        if slot is None:
            room.append(capacity)
            slot = len(room) - 1
        room[slot] -= size
    return len(room)


def sizes_of(bins, sizes):
    return [[sizes[index] for index in items] for items in bins]


@pytest.mark.parametrize(
    ("sizes", "bins"),
    [
        # Large: 60, 52. Medium: 45, 36; the largest that fits. Small: 20, 18. Tiny: 5. First-fit decreasing.
        ([5, 20, 36, 52, 18, 45, 60], [[60, 36], [52, 45], [20, 18, 5]]),
        # 76 has no medium partner and gets no pair: what fits, largest first. 55 gets a pair, smallest first.
        ([76, 55, 20, 22, 24, 3, 2], [[76, 22, 2], [55, 20, 24], [3]]),
    ],
)
def test_each_phase_does_its_part(sizes, bins):
    assert sizes_of(micro.modified_first_fit_decreasing(sizes, 100), sizes) == bins


def test_every_item_is_in_one_bin_and_none_overflows():
    for seed in range(200):
        rng = random.Random(seed)
        capacity = rng.randint(1, 100)
        sizes = [rng.randint(1, 2 * capacity if seed % 3 == 0 else capacity) for _ in range(rng.randint(0, 80))]
        bins = micro.modified_first_fit_decreasing(sizes, capacity)
        assert sorted(index for items in bins for index in items) == list(range(len(sizes)))
        for items in sizes_of(bins, sizes):
            assert sum(items) <= capacity or len(items) == 1
        least = sum(min(size, capacity) for size in sizes) / capacity
        assert len(bins) <= 71 / 60 * max(least, first_fit_decreasing(sizes, capacity)) + 1
        assert bins == micro.modified_first_fit_decreasing(sizes, capacity)


WINDOWED = TINY_QWEN3 | {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}
CHUNKS = {"use_fused_linear_logprobs": True, "fused_linear_logprobs_chunk_size": 100}
RECOMPUTED = {"activation_checkpointing": True}
OF_ATTENTION = RECOMPUTED | {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "windows, attention recomputed, logits in chunks": (WINDOWED, CHUNKS | OF_ATTENTION),
    "experts, recomputed": (tiny.TINY_QWEN3_MOE, RECOMPUTED),
}
# A prompt has 2 tokens, so the second row's answer is empty. A row of 300 tokens has no room for the first pair.
LENGTHS = [300, 2, 17, 120, 3, 64]


NUMBERS = ("loss", "grad_norm", "num_microbatches")


def results(make_worker, packing: dict[str, Any] | None, model: str, lengths: list[int]) -> dict[str, Any]:
    """Runs a step of SFT, then the passes and a step of GRPO, then a step of DPO on the rows as pairs."""
    hf_config, megatron = MODELS[model]
    policy = with_plain_sgd(tiny_policy(hf_config, **megatron), rate=0.1) | {"max_total_sequence_length": 300}
    if packing is not None:
        policy["sequence_packing"] = packing
    worker = make_worker(policy, init_reference_model=True)
    rows, mbs = len(lengths), min(2, len(lengths))
    steps = [worker.train(batch_of_lengths(lengths), NLLLoss(), gbs=rows, mbs=mbs)]
    data = batch_of_lengths(lengths, seed=1)
    sent = BatchedData({name: data[name] for name in LOGPROB_COLUMNS})  # by a worker group
    prev = worker.get_logprobs(sent, mbs=mbs)["logprobs"]
    reference = worker.get_reference_policy_logprobs(sent, mbs=mbs)["reference_logprobs"]
    advantages = torch.linspace(-1, 1, rows)[:, None] * data["token_mask"]
    data |= {"prev_logprobs": prev, "generation_logprobs": prev, "advantages": advantages}
    data["reference_policy_logprobs"] = reference
    steps.append(worker.train(data, replace(PLAIN, reference_policy_kl_penalty=0.1), gbs=rows, mbs=mbs))
    if rows % 2 == 0:
        steps.append(worker.train(data.in_groups(2), DPOLoss(0.1, 1.0, 0.1, False, False), gbs=rows // 2, mbs=1))
    of_steps = {name: torch.tensor([step[name] for step in steps]) for name in NUMBERS}
    weights = {name: weight.clone() for name, weight in worker.hf_weights()}
    return {"logprobs": prev, "reference": reference, "weights": weights} | of_steps


@pytest.mark.parametrize("model", MODELS)
def test_packed_rows_compute_what_padded_rows_do(make_worker, model):
    want, got = (results(make_worker, packing, model, LENGTHS) for packing in (None, packed_rows(300)))
    assert (want.pop("num_microbatches").tolist(), got.pop("num_microbatches").tolist()) == ([3] * 3, [2] * 3)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def test_a_row_alone_in_its_batch_is_padded_at_its_end(make_worker):
    want, got = (results(make_worker, packing, "experts, recomputed", [5]) for packing in (None, packed_rows(300)))
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
