import time

import pytest
import ray
import torch
from support.mixed_weights import MIXED, require_mixed
from support.weight_loader import WeightLoader, take

from nemo_offload_rl.refit import make_transport
from nemo_offload_rl.refit.broadcast import BroadcastTransport
from nemo_offload_rl.refit.checksum import tensor_checksum
from nemo_offload_rl.refit.interface import Receiver
from nemo_offload_rl.refit.object_store import ObjectStoreTransport
from nemo_offload_rl.refit.plan import ExportPlan


@pytest.fixture(scope="module")
def receivers(ray_cluster):
    receivers = [Receiver(ray.remote(WeightLoader).options(num_cpus=0).remote(), (rank,)) for rank in range(2)]
    yield receivers
    for receiver in receivers:
        ray.kill(receiver.actor)


def connect(receivers, weights, *, bucket_bytes=1000, verify=False):
    transport = make_transport("object_store", receivers, verify=verify)
    return transport.connect(ExportPlan.of(weights), rank=0, bucket_bytes=bucket_bytes)


def test_every_receiver_gets_every_tensor_bit_for_bit(receivers):
    checksums = connect(receivers, MIXED, bucket_bytes=64, verify=True).send(iter(MIXED))
    assert checksums == {name: tensor_checksum(tensor) for name, tensor in MIXED}
    for loaded in map(take, receivers):
        assert loaded["num_loads"] == 3  # of 60, 51 and 96 bytes
        require_mixed(loaded["weights"])


def test_one_memory_may_serve_tensor_after_tensor(receivers):
    reused = torch.empty(300_000)  # above what Ray sends inline
    sender = connect(receivers, [(f"w{index}", reused) for index in range(6)], bucket_bytes=reused.nbytes)
    for first in (0, 10):  # a second refit through the same buffer
        sender.send((f"w{index}", reused.fill_(first + index)) for index in range(6))
        weights = take(receivers[0])["weights"]
        assert [weights[f"w{index}"].unique().tolist() for index in range(6)] == [[first + index] for index in range(6)]


def test_at_most_two_buckets_are_in_flight(ray_cluster):
    receiver = Receiver(ray.remote(WeightLoader).options(num_cpus=0, max_concurrency=1).remote(0.1), (0,))
    take(receiver)
    drawn = []

    def weights():
        for index in range(7):
            drawn.append(time.monotonic())
            yield f"w{index}", torch.ones(2)

    connect([receiver], [(f"w{index}", torch.ones(2)) for index in range(7)], bucket_bytes=8).send(weights())
    # While two are loaded a third is packed; from then on, each waits for one to be loaded. Processes share a clock.
    finished = take(receiver)["finished"]
    assert all(loaded < begun for loaded, begun in zip(finished[:4], drawn[3:], strict=True))
    ray.kill(receiver.actor)


def test_what_a_receiver_refuses_stops_the_refit(receivers):
    weights = [("a", torch.ones(1)), ("unwanted", torch.ones(1))]
    with pytest.raises(ValueError, match="with the weight unwanted: ValueError: there is no such weight here"):
        connect(receivers, weights, bucket_bytes=4).send(weights)


@pytest.mark.parametrize("transport", [ObjectStoreTransport, BroadcastTransport])
def test_other_ranks_draw_the_export_and_send_nothing(transport):
    weights = iter(MIXED)
    assert transport([], verify=True).connect(ExportPlan.of(MIXED), rank=1, bucket_bytes=1000).send(weights) == {}
    assert list(weights) == []
    with pytest.raises(ValueError, match="no receiver"):
        make_transport("object_store", [], verify=False)
