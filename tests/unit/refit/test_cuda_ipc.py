"""Weights through memory that both sides map; on a CPU, where it is the host's."""

import sys
import time

import pytest
import ray
import torch
from ray.exceptions import OutOfMemoryError, RayTaskError
from support.mixed_weights import MIXED, require_mixed
from support.shared_memory import num_open_buffers
from support.weight_loader import WeightLoader, take

from nemo_offload_rl.memory import shared_buffer
from nemo_offload_rl.refit import cuda_ipc, loads
from nemo_offload_rl.refit.checksum import tensor_checksum
from nemo_offload_rl.refit.cuda_ipc import CudaIpcTransport
from nemo_offload_rl.refit.loads import EngineLostError
from nemo_offload_rl.refit.plan import ExportPlan

# The actors cannot import this module; what is defined in it travels whole.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


class OnAnotherNode(WeightLoader):
    """Cannot open memory of this node."""

    def load_weights(self, bucket):
        shared_buffer._node = lambda: "another node"  # of this process
        return super().load_weights(bucket)


class EndedByRay(WeightLoader):
    """Fails as Ray says it of a process that it has ended for its node's memory."""

    def load_weights(self, bucket):
        raise OutOfMemoryError("the node's memory ran short")


def connect(receivers, weights, *, rank=0, bucket_bytes=1000, verify=False):
    transport = CudaIpcTransport(receivers, verify, graphs=False)
    return transport.connect(ExportPlan.of(weights), rank=rank, bucket_bytes=bucket_bytes)


def test_each_rank_sends_every_tensor_bit_for_bit_to_its_own_receiver(receivers):
    export = iter(MIXED)
    assert connect(receivers, MIXED, rank=2, verify=True).send(export) == {}  # has no engine, but draws the export
    assert list(export) == []
    for rank in range(2):
        checksums = connect(receivers, MIXED, rank=rank, bucket_bytes=128, verify=True).send(iter(MIXED))
        assert checksums == {name: tensor_checksum(tensor) for name, tensor in MIXED}
        loaded, other = take(receivers[rank]), take(receivers[1 - rank])
        assert (loaded["num_loads"], other["num_loads"]) == (3, 0)  # of 60, 51 and 96 bytes
        require_mixed(loaded["weights"])


def test_buckets_take_turns_in_the_buffers_and_none_is_written_while_it_is_read(start):
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
        drawn.clear()
        sender.send(weights(first))
        taken = take(receiver)
        received, finished = taken["weights"], taken["finished"]
        assert [received[f"w{index}"].unique().tolist() for index in range(7)] == [[first + n] for n in range(7)]
        # Two are in flight; from then on, each waits until the one before those two is loaded. Processes share a clock.
        assert all(loaded < begun for loaded, begun in zip(finished[:5], drawn[2:], strict=True))


def test_what_a_receiver_refuses_stops_the_refit(receivers):
    weights = [("a", torch.ones(1)), ("unwanted", torch.ones(1)), ("b", torch.ones(1))]
    match = "The refit has failed at engine 1 with the weights a to unwanted: ValueError: there is no such weight here"
    with pytest.raises(ValueError, match=match) as caught:
        connect(receivers, weights, rank=1, bucket_bytes=16).send(weights)
    assert isinstance(caught.value.__cause__, RayTaskError)  # with the engine's own traceback
    assert num_open_buffers() == 0
    take(receivers[1])


@pytest.mark.parametrize("deadly", [0, 4])
def test_a_receiver_that_dies_stops_the_refit_and_is_named(start, deadly):
    receiver = start(0)
    weights = [(f"w{index}", torch.ones(1)) for index in range(5)]
    weights[deadly] = ("deadly", torch.ones(1))
    sender = connect([receiver], weights, bucket_bytes=8)
    with pytest.raises(EngineLostError, match="has lost engine 0 with the weight deadly: its process or its node"):
        sender.send(weights)
    assert num_open_buffers() == 0
    with pytest.raises(EngineLostError, match=f"has lost engine 0 with the weight {weights[0][0]}"):
        sender.send(weights)


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        (EndedByRay, OutOfMemoryError, r"(?s)has lost engine 0 with the weights a to transposed: .*memory ran short"),
        (OnAnotherNode, RuntimeError, r"failed at engine 0 with the weights a to transposed: .* cannot be opened on"),
    ],
)
def test_a_receiver_that_ray_ends_for_memory_or_that_cannot_open_a_buffer_is_named(start, kind, error, message):
    receiver = start(0, kind)
    with pytest.raises(error, match=message):
        connect([receiver], MIXED).send(iter(MIXED))
    assert num_open_buffers() == 0


class FailingGpu(WeightLoader):
    """Fails as work on a bucket does, which is not closed then."""

    def load_weights(self, bucket):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.fixture
def kept(monkeypatch):
    monkeypatch.setattr(cuda_ipc, "_KEPT", [])
    yield cuda_ipc._KEPT
    for buffers in cuda_ipc._KEPT:
        buffers.close()
    assert num_open_buffers() == 0


def test_buffers_that_a_failed_engine_may_still_read_stay_allocated(start, kept, caplog):
    receiver = start(0, FailingGpu)
    sender = connect([receiver], MIXED, bucket_bytes=128)
    for number in (1, 2):
        with pytest.raises(RuntimeError, match="illegal memory access"):
            sender.send(iter(MIXED))
        assert num_open_buffers() == 2 * 2 * number  # two, each a file and its mapping
        assert len(kept) == caplog.text.count("stay allocated until this process ends") == number


def test_so_do_those_that_an_engine_still_reads_after_an_error_of_another(start, kept, monkeypatch):
    monkeypatch.setattr(loads, "_SETTLE_TIMEOUT_S", 0.1)
    slow, refusing = start(0, seconds=1.0), start(0)
    take(slow)
    take(refusing)
    weights = [("a", torch.ones(5)), ("unwanted", torch.ones(1))]
    with pytest.raises(ValueError, match="no such weight here"):
        connect([refusing, slow], weights).send(weights)
    assert len(kept) == 1


@pytest.mark.parametrize("bucket_bytes", [1000, 128])  # a bucket, three of them
def test_the_time_from_the_first_export_to_the_last_load_is_measured(start, bucket_bytes):
    receiver = start(0, seconds=0.05)

    def weights():
        time.sleep(0.02)
        yield from MIXED

    take(receiver)
    sender = connect([receiver], MIXED, bucket_bytes=bucket_bytes)
    began = time.perf_counter()
    sender.send(weights())
    whole_s, metrics = time.perf_counter() - began, sender.metrics
    assert 0.02 + 0.05 * take(receiver)["num_loads"] < metrics["first_kernel_to_loaded_s"] < whole_s


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
