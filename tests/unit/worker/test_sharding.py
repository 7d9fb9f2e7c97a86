import itertools
import math
import pickle
import random

import pytest
import torch
from support.ranks import run_ranks

from nemo_offload_rl.data.batch import BatchedData
from nemo_offload_rl.worker.sharding import require_parallel_sizes_fit, shard_for_inference, shard_for_training
from nemo_offload_rl.worker.wire import WireBatch


def _batch(num_rows):
    names = [f"row {row}" for row in range(num_rows)]
    return BatchedData(row=torch.arange(num_rows), sample_mask=torch.ones(num_rows), name=names)


def _rows(shards):
    return [shard["row"].tolist() for shard in shards]


@pytest.mark.parametrize("dp_size", [1, 2, 3, 4, 6])
def test_each_chunk_of_a_global_batch_is_dealt_out_contiguously_on_any_number_of_ranks(dp_size):
    shards = shard_for_training(_batch(36), gbs=12, mbs=1, dp_size=dp_size)
    share = 12 // dp_size
    for rank, shard in enumerate(shards):
        wanted = [12 * step + rank * share + row for step in range(3) for row in range(share)]
        assert shard["row"].tolist() == wanted
        assert shard["name"] == [f"row {row}" for row in wanted]


INDIVISIBLE = [
    (10, 8, 2, 2, "10 samples, which is not a multiple of policy.train_global_batch_size 8"),
    (0, 8, 2, 2, "0 samples"),
    (9, 9, 1, 2, "9 is not a multiple of policy.train_micro_batch_size 1 x the data-parallel size 2"),
    (8, 8, 3, 2, "8 is not a multiple of policy.train_micro_batch_size 3 x"),
    (8, 0, 1, 1, "at least 1 sample"),
]


@pytest.mark.parametrize(("num_rows", "gbs", "mbs", "dp_size", "message"), INDIVISIBLE)
def test_sizes_of_training_that_do_not_divide_are_refused(num_rows, gbs, mbs, dp_size, message):
    with pytest.raises(ValueError, match=message):
        shard_for_training(_batch(num_rows), gbs=gbs, mbs=mbs, dp_size=dp_size)


def test_any_number_of_rows_comes_back_in_order():
    for num_rows, dp_size, mbs in itertools.product((1, 2, 3, 7, 8, 9, 31), (1, 2, 4), (1, 3, 64)):
        batch = _batch(num_rows)
        shards = shard_for_inference(batch, mbs=mbs, dp_size=dp_size)
        assert {shard.size for shard in shards.shards} == {shards.shards[0].size}
        assert shards.mbs <= mbs
        assert shards.shards[0].size % shards.mbs == 0
        num_microbatches = shards.shards[0].size // shards.mbs
        assert num_microbatches == math.ceil(math.ceil(num_rows / dp_size) / mbs)  # padding never adds a micro-batch
        assert sum(float(shard["sample_mask"].sum()) for shard in shards.shards) == num_rows
        gathered = shards.gather(shards.shards)
        assert gathered["row"].tolist() == list(range(num_rows))
        assert gathered["name"] == batch["name"]
        assert gathered["sample_mask"].tolist() == [1] * num_rows
        assert batch["sample_mask"].tolist() == [1] * num_rows  # filling up changes nothing in the batch itself
    with pytest.raises(ValueError, match="without samples"):
        shard_for_inference(_batch(0), mbs=1, dp_size=1)


def test_groups_stay_whole_on_their_rank_and_in_their_micro_batch_and_sizes_count_them():
    batch = _batch(12).in_groups(2)
    assert _rows(shard_for_training(batch, gbs=6, mbs=1, dp_size=2)) == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
    with pytest.raises(ValueError, match=r"6 samples, which is not a multiple of policy\.train_global_batch_size 12"):
        shard_for_training(batch, gbs=12, mbs=1, dp_size=2)
    for seed in range(50):
        rng = random.Random(seed)
        group_size, dp_size, per_rank = rng.randint(1, 4), rng.randint(1, 4), rng.randint(1, 3)
        mbs = rng.randint(1, 4)
        gbs = mbs * dp_size * per_rank
        training = _batch(gbs * group_size * rng.randint(1, 3)).in_groups(group_size)
        shards = shard_for_training(training, gbs=gbs, mbs=mbs, dp_size=dp_size)
        assert sorted(row for shard in shards for row in shard["row"].tolist()) == list(range(training.size))

        inference = _batch(group_size * rng.randint(1, 20)).in_groups(group_size)
        filled = shard_for_inference(inference, mbs=rng.randint(1, 3), dp_size=dp_size)
        assert filled.gather(filled.shards)["row"].tolist() == list(range(inference.size))
        assert sum(float(shard["sample_mask"].sum()) for shard in filled.shards) == inference.size

        for shard, samples in [(shard, mbs) for shard in shards] + [(shard, filled.mbs) for shard in filled.shards]:
            for micro_batch in shard.chunks(samples * group_size):
                assert micro_batch.size == samples * group_size
                numbers = micro_batch["row"].view(-1, group_size)
                assert torch.equal(numbers % group_size, torch.arange(group_size).expand_as(numbers))
                assert torch.equal(numbers // group_size, numbers[:, :1] // group_size + torch.zeros_like(numbers))


def test_parallel_sizes_must_divide_the_world():
    kinds = ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor")
    sizes = {f"{kind}_parallel_size": 1 for kind in kinds}
    of_four = sizes | {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    require_parallel_sizes_fit(of_four, 8)
    with pytest.raises(ValueError, match=r"world size 6 .* not a multiple of 4 \(tensor_model_parallel_size 2 x"):
        require_parallel_sizes_fit(of_four, 6)
    with pytest.raises(ValueError, match="expert_model_parallel_size 4"):
        require_parallel_sizes_fit(sizes | {"expert_model_parallel_size": 4}, 2)


BATCH = BatchedData(
    input_ids=torch.arange(6).view(2, 3), mask=torch.tensor([1.0, 0.0]), half=torch.randn(2, 3, 4).bfloat16(),
    flags=torch.tensor([[True], [False]]), strided=torch.randn(3, 2).T, names=["a", "b"],
)  # fmt: skip


def pickle_beside_megatron(rank, world_size, ports):
    import megatron.core.safe_globals  # noqa: F401

    return pickle.dumps(WireBatch.pack(BatchedData(logprobs=torch.zeros(2, 3, dtype=torch.bfloat16))))


def test_a_batch_arrives_as_it_left_and_may_be_written_to():
    wire = pickle.loads(pickle.dumps(WireBatch.pack(BATCH.in_groups(2))))
    for array, _ in wire.tensors.values():
        array.flags.writeable = False  # Ray returns read-only arrays
    arrived = wire.unpack()
    assert isinstance(arrived, BatchedData)
    assert (arrived.group_size, WireBatch.pack(BATCH).unpack().group_size) == (2, 1)
    assert (set(arrived), arrived["names"]) == (set(BATCH), BATCH["names"])
    for name in set(BATCH) - {"names"}:
        assert arrived[name].dtype == BATCH[name].dtype
        assert torch.equal(arrived[name], BATCH[name])
    arrived["mask"].fill_(7)
    assert wire.unpack()["mask"].tolist() == [1, 0]


def test_a_batch_from_a_megatron_process_does_not_need_megatron():
    (sent,) = run_ranks(pickle_beside_megatron, 1, num_ports=0)
    assert b"megatron" not in sent
    assert pickle.loads(sent).unpack()["logprobs"].shape == (2, 3)
