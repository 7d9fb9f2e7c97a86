"""Tests how a worker uses the recipe's sizes of packed rows."""

import pytest
import torch

from nemo_offload_rl.mcore import distributed
from nemo_offload_rl.mcore.model.model_config import parallel_sizes
from nemo_offload_rl.plan.activations import row_sizes
from nemo_offload_rl.worker.batching import MicroBatcher
from tests.support.tiny import batch_of_lengths, packed_rows, random_batch, tiny_policy


@pytest.mark.parametrize("key", ["train_mb_tokens", "logprob_mb_tokens"])
def test_a_worker_takes_no_number_that_is_left_open(key):
    policy = tiny_policy()
    policy["sequence_packing"] = packed_rows(64)
    assert row_sizes(policy).packed_tokens[key] == 64
    policy["sequence_packing"][key] = "auto"
    with pytest.raises(ValueError, match=rf"policy.sequence_packing.{key} is auto, which a run replaces by a number"):
        row_sizes(policy)
    policy["sequence_packing"]["enabled"] = False
    assert not row_sizes(policy).packed_tokens


@pytest.mark.parametrize(("packing", "tokens"), [({"enabled": False}, 4 * 32), (packed_rows(512), 512)])
def test_the_longest_log_prob_micro_batch_counts_its_padding(packing, tokens):
    lengths = {"max_total_sequence_length": 30, "make_sequence_length_divisible_by": 8, "sequence_packing": packing}
    assert row_sizes(tiny_policy() | lengths | {"logprob_batch_size": 4}).most_logprob_tokens == tokens
    without = {name: value for name, value in tiny_policy().items() if name != "logprob_batch_size"}
    assert row_sizes(without | lengths).most_logprob_tokens == 0


def batcher(monkeypatch, stages=None, *, group_size=None, **packing):
    """Returns the micro-batcher of a rank without data-parallel peers; packed rows have at most 28 tokens."""
    monkeypatch.setattr(distributed.mpu, "get_data_parallel_world_size", lambda: 1)
    policy = tiny_policy(**stages or {})
    parallel = parallel_sizes(policy["megatron_cfg"])
    sizes = {"train_mb_tokens": 28, "logprob_mb_tokens": 24, "sequence_length_round": 2}
    policy["sequence_packing"] = {"enabled": True} | sizes | packing
    return MicroBatcher(row_sizes(policy), parallel, group_size or parallel.pipeline, torch.device("cpu"))


def rows_of(*lengths):
    data = random_batch(len(lengths), longest=max(lengths))
    data["input_lengths"] = torch.tensor(lengths)
    return data


@pytest.mark.parametrize(("key", "most"), [("train_mb_tokens", 28), ("logprob_mb_tokens", 24)])
def test_a_sample_longer_than_a_packed_row_is_refused(key, most, monkeypatch):
    made = batcher(monkeypatch)
    made.cut(rows_of(6, most), 1, key)
    with pytest.raises(ValueError, match=rf"{most + 1} tokens, more than .*policy.sequence_packing.{key} {most}\)"):
        made.cut(rows_of(6, most + 1), 1, key)
    made = batcher(monkeypatch, **{key: 31})
    made.cut(rows_of(31), 1, key)  # padded to 32: an eager row may be longer
    with pytest.raises(ValueError, match=rf"32 tokens, more than a packed row .*{key} 31\)"):
        made.cut(rows_of(31), 1, key, fixed_shapes=True)  # a captured one has room for padding


@pytest.mark.parametrize("key", ["train_mb_tokens", "logprob_mb_tokens"])
def test_packed_rows_run_in_the_recipes_order(key, monkeypatch):
    """NeMo-RL sorts a rank's bins by their padded tokens, equal ones in the packer's order."""
    lengths = [15, 16, 22, 3, 17, 11, 10]
    bins = batcher(monkeypatch, microbatch_order="packer").cut(rows_of(*lengths), 1, key)[1]
    assert batcher(monkeypatch, microbatch_order=None).cut(rows_of(*lengths), 1, key)[1] == bins
    data = rows_of(*lengths)
    data["row"] = torch.arange(len(lengths))
    batches, ordered = batcher(monkeypatch, microbatch_order="largest_first").cut(data, 1, key)
    padded = [-(-length // 2) * 2 for length in lengths]
    by_size = sorted(bins, key=lambda items: sum(padded[item] for item in items), reverse=True)
    assert ordered == by_size != bins
    assert [batch.data["row"].tolist() for batch in batches] == ordered


STAGES = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}


@pytest.mark.parametrize(
    ("rows", "group_size", "number"), [(1, None, 2), (4, None, 2), (6, None, 4), (2, 3, 3), (10, 3, 5)]
)
def test_virtual_stages_get_padded_micro_batches_in_groups(rows, group_size, number, monkeypatch):
    made = batcher(monkeypatch, STAGES, group_size=group_size, enabled=False)
    batches, _ = made.cut(random_batch(rows), 2, "logprob_mb_tokens", forward_only=True)
    assert len(batches) == number
    assert sum(batch.data["sample_mask"].sum() for batch in batches) == rows
    require_no_filler_in_training(made, random_batch(rows), (rows + 1) // 2, number)


def require_no_filler_in_training(made, data, most, number):
    if number <= most:
        assert len(made.cut(data, 2, "train_mb_tokens")[0]) == number
        return
    with pytest.raises(ValueError, match=rf"at most {most} micro-batches on each rank, .* needs {number}; "):
        made.cut(data, 2, "train_mb_tokens")


@pytest.mark.parametrize(("rows", "group_size", "number"), [(8, None, 4), (1, None, 2), (2, 3, 3)])
def test_packed_rows_are_split_for_virtual_stages_before_filler_is_added(rows, group_size, number, monkeypatch):
    made = batcher(monkeypatch, STAGES, group_size=group_size, train_mb_tokens=32)
    data = random_batch(rows)
    data["input_lengths"][:] = 10  # three in a row
    data["row"] = torch.arange(rows)
    batches, bins = made.cut(data, 2, "train_mb_tokens", forward_only=True)
    assert len(batches) == number
    assert sorted(row for items in bins for row in items) == list(range(rows))
    assert [batch.data["row"].tolist() for batch in batches[: len(bins)]] == bins
    assert len(bins) == min(number, rows)
    assert sum(batch.data["sample_mask"].sum() for batch in batches) == rows
    require_no_filler_in_training(made, data, rows, number)


@pytest.mark.parametrize(
    ("stages", "fixed_shapes", "widths"),
    [({}, False, [30, 6, 10, 4]), ({}, True, [32] * 4), ({"pipeline_model_parallel_size": 2}, False, [30] * 4)],
)
def test_padded_micro_batches_are_as_long_as_their_longest_or_of_one_shape(stages, fixed_shapes, widths, monkeypatch):
    made = batcher(monkeypatch, stages, enabled=False)
    data = batch_of_lengths([3, 29, 6, 5, 2, 9, 4])  # cut by twos, and rounded up to an even number
    for forward_only in (False, True):
        batches, _ = made.cut(data, 2, "train_mb_tokens", forward_only=forward_only, fixed_shapes=fixed_shapes)
        assert [batch.tokens.shape for batch in batches] == [(2, width) for width in widths]
        for batch, width in zip(batches, widths, strict=True):
            assert batch.positions.tolist() == [list(range(width))] * 2
            assert batch.max_seqlen == batch.data["token_mask"].shape[1] == width
        assert torch.equal(batches[2].tokens[:, :9], data["input_ids"][4:6, :9])
