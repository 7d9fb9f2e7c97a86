"""Weights through memory that both sides map; on a CPU, where it is the host's."""

import itertools
import time

import pytest
import ray
import torch
from support.mixed_weights import MIXED
from support.shared_memory import num_open_buffers
from support.weight_loader import WeightLoader, take

from nemo_offload_rl.refit.checksum import tensor_checksum
from nemo_offload_rl.refit.cuda_ipc import CudaIpcTransport
from nemo_offload_rl.refit.interface import Receiver
from nemo_offload_rl.refit.plan import ExportPlan


def start(rank, **arguments):
    return Receiver(ray.remote(WeightLoader).options(num_cpus=0).remote(**arguments), (rank,))


@pytest.fixture(scope="module")
def receivers(ray_cluster):
    receivers = [start(rank) for rank in range(2)]
    yield receivers
    for receiver in receivers:
        ray.kill(receiver.actor)


def connect(receivers, weights, *, rank=0, bucket_bytes=1000, verify=False):
    transport = CudaIpcTransport(receivers, verify, graphs=False)
    return transport.connect(ExportPlan.of(weights), rank=rank, bucket_bytes=bucket_bytes)


def test_each_rank_sends_every_tensor_bit_for_bit_to_its_own_receiver(receivers):
    for rank in range(2):
        checksums = connect(receivers, MIXED, rank=rank, bucket_bytes=128, verify=True).send(iter(MIXED))
        assert checksums == {name: tensor_checksum(tensor) for name, tensor in MIXED}
        loaded, other = take(receivers[rank]), take(receivers[1 - rank])
        assert (loaded["num_loads"], other["num_loads"]) == (3, 0)  # of 60, 51 and 96 bytes
        weights = loaded["weights"]
        assert list(weights) == [name for name, _ in MIXED]
        assert [weights[name].dtype for name, _ in MIXED] == [tensor.dtype for _, tensor in MIXED]
        assert {name: tensor_checksum(tensor) for name, tensor in weights.items()} == checksums


def test_a_rank_without_an_engine_draws_the_export_and_sends_nothing(receivers):
    weights = iter(MIXED)
    assert connect(receivers, MIXED, rank=2, verify=True).send(weights) == {}
    assert list(weights) == []
    assert take(receivers[0])["num_loads"] == 0


def test_buckets_take_turns_in_the_buffers_and_none_is_written_while_it_is_read(ray_cluster):
    receiver = start(0, seconds=0.05)
    take(receiver)
    reused = torch.empty(1000)
    drawn = []

    def weights(first):
        for index in range(7):
            drawn.append(time.monotonic())
            yield f"w{index}", reused.fill_(first + index)

    sender = connect([receiver], [(f"w{index}", reused) for index in range(7)], bucket_bytes=2 * reused.nbytes)
    for first in (0, 10):  # a second refit, too
        sender.send(weights(first))
        received = take(receiver)["weights"]
        assert [received[f"w{index}"].unique().tolist() for index in range(7)] == [
            [first + index] for index in range(7)
        ]
    gaps = [after - before for before, after in itertools.pairwise(drawn[2:7])]
    assert min(gaps) > 0.025  # two are in flight; from then on, each waits for one to be loaded
    ray.kill(receiver.actor)


def test_what_a_receiver_refuses_stops_the_refit(receivers):
    weights = [("a", torch.ones(1)), ("unwanted", torch.ones(1)), ("b", torch.ones(1))]
    with pytest.raises(ValueError, match="no such weight here"):
        connect(receivers, weights, bucket_bytes=8).send(weights)
    take(receivers[0])


def test_a_receiver_that_dies_stops_the_refit(ray_cluster):
    receiver = start(0)
    weights = [("deadly", torch.ones(1)), ("b", torch.ones(1)), ("c", torch.ones(1))]
    with pytest.raises(ray.exceptions.ActorDiedError):
        connect([receiver], weights, bucket_bytes=8).send(weights)


def test_a_refit_leaves_no_buffer_behind(receivers):
    sender = connect(receivers, MIXED)
    sender.send(iter(MIXED))
    assert num_open_buffers() == 0
    with pytest.raises(RuntimeError, match="the export failed"):
        sender.send(failing_export())
    assert num_open_buffers() == 0
    take(receivers[0])


def failing_export():
    yield MIXED[0]
    raise RuntimeError("the export failed")
