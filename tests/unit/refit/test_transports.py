"""What weights go through on one host without shared memory: Ray's object store, and broadcasts over gloo."""

import time

import pytest
import ray
import torch
from support.mixed_weights import MIXED, require_mixed
from support.weight_loader import take

from nemo_offload_rl.refit import make_transport
from nemo_offload_rl.refit.broadcast import BroadcastTransport
from nemo_offload_rl.refit.checksum import tensor_checksum
from nemo_offload_rl.refit.object_store import ObjectStoreTransport
from nemo_offload_rl.refit.plan import ExportPlan

each_transport = pytest.mark.parametrize("name", ["object_store", "broadcast"])


def connect(name, receivers, weights, *, bucket_bytes=1000, verify=False):
    transport = make_transport(name, receivers, verify=verify)
    return transport.connect(ExportPlan.of(weights), rank=0, bucket_bytes=bucket_bytes)


@each_transport
def test_every_receiver_gets_every_tensor_bit_for_bit_refit_after_refit(receivers, name):
    sender = connect(name, receivers, MIXED, bucket_bytes=64, verify=True)
    of_ray = [ray.get(receiver.actor.addresses.remote()) for receiver in receivers]
    for _ in range(2):
        assert sender.send(iter(MIXED)) == {name: tensor_checksum(tensor) for name, tensor in MIXED}
        for loaded in map(take, receivers):
            assert loaded["num_loads"] == 3  # of 60, 51 and 96 bytes
            require_mixed(loaded["weights"])
    for receiver, before in zip(receivers, of_ray, strict=True):
        assert name == "object_store" or ray.get(receiver.actor.addresses.remote()) - before <= {"127.0.0.1"}


@each_transport
def test_one_memory_may_serve_tensor_after_tensor(receivers, name):
    reused = torch.empty(300_000)  # above what Ray sends inline
    sender = connect(name, receivers, [(f"w{index}", reused) for index in range(6)], bucket_bytes=reused.nbytes)
    for first in (0, 10):  # a second refit through the same buffer
        sender.send((f"w{index}", reused.fill_(first + index)) for index in range(6))
        for weights in (take(receiver)["weights"] for receiver in receivers):
            assert [weights[f"w{index}"].unique().tolist() for index in range(6)] == [[first + n] for n in range(6)]


@each_transport
def test_what_a_receiver_refuses_stops_the_refit(receivers, name):
    weights = [("a", torch.ones(1)), ("unwanted", torch.ones(1))]
    with pytest.raises(ValueError, match=r"at engine \d with the weights a to unwanted: .*no such weight here"):
        connect(name, receivers, weights).send(iter(weights))


def test_at_most_two_buckets_are_in_flight(start):
    receiver = start(0, seconds=0.1)
    take(receiver)
    drawn = []

    def weights():
        for index in range(7):
            drawn.append(time.monotonic())
            yield f"w{index}", torch.ones(2)

    connect("object_store", [receiver], [(f"w{n}", torch.ones(2)) for n in range(7)], bucket_bytes=8).send(weights())
    # While two are loaded a third is packed; from then on, each waits for one to be loaded. Processes share a clock.
    finished = take(receiver)["finished"]
    assert all(loaded < begun for loaded, begun in zip(finished[:4], drawn[3:], strict=True))


@pytest.mark.parametrize("transport", [ObjectStoreTransport, BroadcastTransport])
def test_other_ranks_draw_the_export_and_send_nothing(transport):
    weights = iter(MIXED)
    assert transport([], verify=True).connect(ExportPlan.of(MIXED), rank=1, bucket_bytes=1000).send(weights) == {}
    assert list(weights) == []
    with pytest.raises(ValueError, match="no receiver"):
        make_transport("object_store", [], verify=False)
