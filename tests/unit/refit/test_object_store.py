import itertools
import sys
import time

import pytest
import ray
import torch

from nemo_offload_rl.refit.checksum import tensor_checksum
from nemo_offload_rl.refit.interface import bucketize
from nemo_offload_rl.refit.object_store import ObjectStoreTransport, PackedBucket

# The actors cannot import this module; what is defined in it travels whole.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

MIXED = [
    ("a", torch.randn(3, 5)),
    ("b", torch.randn(7, 3).bfloat16()),
    ("scalar", torch.tensor(2.5)),
    ("empty", torch.empty(0, 4)),
    ("odd", torch.arange(5, dtype=torch.uint8)),
    ("transposed", torch.randn(4, 6).T),
]


class Receiver:
    def __init__(self):
        self.weights = {}
        self.num_loads = 0

    def load_weights(self, bucket):
        self.num_loads += 1
        for name, tensor in bucket.unpack():
            if name == "unwanted":
                raise ValueError("there is no such weight here")
            self.weights[name] = tensor.clone()

    def get(self):
        return self.weights, self.num_loads


@pytest.fixture
def receivers(ray_cluster):
    actors = [ray.remote(Receiver).options(num_cpus=0).remote() for _ in range(2)]
    yield actors
    for actor in actors:
        ray.kill(actor)


def test_a_bucket_unpacks_to_what_was_packed():
    for (name, tensor), (sent_name, sent) in zip(PackedBucket.pack(MIXED).unpack(), MIXED, strict=True):
        assert name == sent_name
        assert tensor.dtype == sent.dtype
        assert torch.equal(tensor, sent)
        assert tensor_checksum(tensor) == tensor_checksum(sent)


def test_a_packed_bucket_is_a_copy():
    weight = torch.zeros(4)
    packed = PackedBucket.pack([("w", weight)])
    weight.fill_(1)
    assert packed.unpack()[0][1].tolist() == [0, 0, 0, 0]


def test_every_receiver_gets_every_tensor(receivers):
    report = ObjectStoreTransport(receivers, verify=True).send(bucketize(iter(MIXED), 64))
    assert report.num_tensors == len(MIXED)
    assert report.num_bytes == sum(tensor.nbytes for _, tensor in MIXED)
    for weights, num_loads in ray.get([receiver.get.remote() for receiver in receivers]):
        assert num_loads == report.num_buckets > 1
        assert {name: tensor_checksum(tensor) for name, tensor in weights.items()} == report.checksums


def test_one_memory_may_serve_bucket_after_bucket(receivers):
    def buckets():
        reused = torch.empty(300_000)  # above what Ray sends inline
        for index in range(6):
            yield [(f"w{index}", reused.fill_(index))]

    ObjectStoreTransport(receivers, verify=False).send(buckets())
    weights, _ = ray.get(receivers[0].get.remote())
    assert [weights[f"w{index}"].unique().tolist() for index in range(6)] == [[float(index)] for index in range(6)]


class SlowReceiver(Receiver):
    def load_weights(self, bucket):
        time.sleep(0.1)
        super().load_weights(bucket)


def test_at_most_two_buckets_are_in_flight(ray_cluster):
    receiver = ray.remote(SlowReceiver).options(num_cpus=0, max_concurrency=1).remote()
    counter = ray.remote(Receiver).options(num_cpus=0).remote()
    ray.get([receiver.get.remote(), counter.get.remote()])
    drawn = []

    def buckets():
        for index in range(6):
            drawn.append(time.monotonic())
            yield [(f"w{index}", torch.ones(2))]

    ObjectStoreTransport([receiver], verify=False).send(buckets())
    gaps = [after - before for before, after in itertools.pairwise(drawn[2:])]
    assert min(gaps) > 0.05  # from the third on, each waits for one to be loaded
    for actor in (receiver, counter):
        ray.kill(actor)


def test_what_a_receiver_refuses_stops_the_refit(receivers):
    with pytest.raises(ValueError, match="no such weight here"):
        ObjectStoreTransport(receivers, verify=False).send([[("a", torch.ones(1))], [("unwanted", torch.ones(1))]])


def test_a_transport_needs_a_receiver():
    with pytest.raises(ValueError, match="no receiver"):
        ObjectStoreTransport([], verify=False)
