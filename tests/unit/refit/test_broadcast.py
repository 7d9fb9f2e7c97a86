"""Weights by broadcast to engines of their own; on a CPU over gloo, with the processes that a run would have."""

import gc
import os
import sys
import time
import weakref

import psutil
import pytest
import ray
import torch
from support.mixed_weights import MIXED, require_mixed
from support.weight_loader import WeightLoader, take

from nemo_offload_rl.refit import broadcast, make_transport
from nemo_offload_rl.refit.broadcast import BroadcastTransport, RefitTimeoutError, announcement
from nemo_offload_rl.refit.checksum import tensor_checksum
from nemo_offload_rl.refit.interface import Receiver
from nemo_offload_rl.refit.loads import EngineLostError
from nemo_offload_rl.refit.plan import ExportPlan

# The actors cannot import this module; what is defined in it travels whole.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Loader(WeightLoader):
    def process(self):
        return ray.util.get_node_ip_address(), os.getpid()

    def addresses(self):
        connections = psutil.Process().net_connections("tcp")
        return {connection.laddr.ip for connection in connections if connection.status == psutil.CONN_LISTEN}

    def load_weights(self, bucket):
        if any(spec.name == "late" for spec in bucket.layout.tensors):
            time.sleep(60)
        super().load_weights(bucket)


class Absentee(Loader):
    """Lets the sender know that it is there, and then ends, fails or waits instead of joining."""

    def load_weights(self, bucket):
        bucket.at.store().set(announcement(bucket.rank), "")
        time.sleep(0.5)  # until the sender waits for it
        instead = bucket.layout.tensors[0].name
        if instead == "ends":
            os._exit(1)
        if instead == "fails":
            raise ValueError("no memory")
        time.sleep(60)


def start(number):
    return Receiver(ray.remote(Loader).options(num_cpus=0).remote(), (number,), f"engine {number}")


@pytest.fixture(scope="module")
def receivers(ray_cluster):
    receivers = [start(number) for number in range(2)]
    yield receivers
    for receiver in receivers:
        ray.kill(receiver.actor)


def connect(receivers, weights, *, bucket_bytes=1000, verify=False, **options):
    transport = BroadcastTransport(receivers, verify=verify, **options)
    return transport.connect(ExportPlan.of(weights), rank=0, bucket_bytes=bucket_bytes)


def test_every_engine_gets_every_tensor_bit_for_bit_refit_after_refit(receivers):
    transport = make_transport("broadcast", receivers, verify=True)
    sender = transport.connect(ExportPlan.of(MIXED), rank=0, bucket_bytes=64)
    of_ray = [ray.get(receiver.actor.addresses.remote()) for receiver in receivers]
    for _ in range(2):
        checksums = sender.send(iter(MIXED))
        assert checksums == {name: tensor_checksum(tensor) for name, tensor in MIXED}
        for loaded in map(take, receivers):
            assert loaded["num_loads"] == 3  # of 60, 51 and 96 bytes
            require_mixed(loaded["weights"])
    for receiver, before in zip(receivers, of_ray, strict=True):
        assert ray.get(receiver.actor.addresses.remote()) - before <= {"127.0.0.1"}


def test_one_memory_may_serve_tensor_after_tensor(receivers):
    reused = torch.empty(30_000)
    sender = connect(receivers, [(f"w{index}", reused) for index in range(6)], bucket_bytes=reused.nbytes)
    sender.send((f"w{index}", reused.fill_(index)) for index in range(6))
    weights = take(receivers[1])["weights"]
    assert [weights[f"w{index}"].unique().tolist() for index in range(6)] == [[index] for index in range(6)]


def test_the_buffer_is_freed_after_each_refit(receivers, monkeypatch):
    buffers = []

    def made(num_bytes):
        buffer = torch.empty(num_bytes, dtype=torch.uint8)
        buffers.append(weakref.ref(buffer.untyped_storage()))
        return buffer

    monkeypatch.setattr(broadcast, "_buffer", made)
    sender = connect(receivers, MIXED)
    for _ in range(2):
        sender.send(iter(MIXED))
        gc.collect()
    assert [buffer() for buffer in buffers] == [None, None]


def test_what_an_engine_refuses_stops_the_refit(receivers):
    weights = [("a", torch.ones(1)), ("unwanted", torch.ones(1))]
    with pytest.raises(ValueError, match=r"at engine \d with the weights a to unwanted: .*no such weight here"):
        connect(receivers, weights).send(iter(weights))


def test_an_engine_that_does_not_answer_is_named_after_the_timeout(receivers):
    weights = [("a", torch.ones(1)), ("late", torch.ones(1))]
    with pytest.raises(RefitTimeoutError, match=r"has waited 1 s for engine 0 with the weight late"):
        connect(receivers[:1], weights, bucket_bytes=4, timeout_s=1).send(iter(weights))
    with pytest.raises(RefitTimeoutError, match=r"no answer from engine 0 within 1 s; check the engine's log"):
        connect(receivers[:1], weights, timeout_s=1)  # it is at that weight still


def test_an_engine_that_dies_is_named_with_the_weights_that_it_was_at(receivers):
    weights = [("a", torch.ones(1)), ("deadly", torch.ones(1)), ("c", torch.ones(1))]
    with pytest.raises(EngineLostError, match=r"has lost engine 1 with the weight deadly: its process or its node"):
        connect(receivers[1:], weights, bucket_bytes=4).send(iter(weights))
    with pytest.raises(EngineLostError, match=r"has lost engine 1"):
        connect(receivers[1:], weights)


@pytest.mark.parametrize(
    ("instead", "timeout_s", "error", "message"),
    [
        ("ends", 60, EngineLostError, "has lost absentee with the weight ends: its process or its node"),
        ("fails", 60, ValueError, "at absentee with the weight fails: ValueError: no memory"),
        ("waits", 5, RefitTimeoutError, r"has waited \d s for .*absentee with the weight waits"),
    ],
    ids=["ends", "fails", "waits"],
)
def test_an_engine_that_is_there_and_never_joins_is_named(ray_cluster, instead, timeout_s, error, message):
    absentee = Receiver(ray.remote(Absentee).options(num_cpus=0).remote(), (0,), "absentee")
    weights = [(instead, torch.ones(1))]
    sender = connect([absentee], weights, timeout_s=timeout_s)
    begin = time.monotonic()
    with pytest.raises(error, match=message):
        sender.send(iter(weights))
    assert time.monotonic() - begin < 15
    ray.kill(absentee.actor)
