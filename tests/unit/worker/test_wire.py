import pickle

import torch
from support.ranks import run_ranks

from nemo_offload_rl.data.batch import BatchedData
from nemo_offload_rl.worker.wire import WireBatch

BATCH = BatchedData(
    input_ids=torch.arange(6).view(2, 3),
    mask=torch.tensor([1.0, 0.0]),
    half=torch.randn(2, 3, 4).bfloat16(),
    flags=torch.tensor([[True], [False]]),
    strided=torch.randn(3, 2).T,
    names=["a", "b"],
)


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
