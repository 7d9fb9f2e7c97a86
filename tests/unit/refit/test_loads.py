"""Tests buckets in flight, whose memory must outlive every receiver's load."""

import sys
import time

import pytest
import ray
import torch

from nemo_offload_rl.refit.export import WeightExport
from nemo_offload_rl.refit.interface import RefitSender
from nemo_offload_rl.refit.loads import Loads

# Ray's workers cannot import this module, so it is pickled by value.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


@ray.remote(num_cpus=0)
def load(seconds, refuses):
    time.sleep(seconds)
    if refuses:
        raise ValueError("there is no such weight here")
    return seconds


class Loading:
    name = "an engine"

    def __init__(self, seconds, *, refuses=False):
        self.seconds, self.refuses, self.started = seconds, refuses, []

    def load_weights(self, bucket):
        self.started.append(load.remote(self.seconds, self.refuses))
        return self.started[-1]

    def num_loading(self):
        return len(ray.wait(self.started, num_returns=len(self.started), timeout=0)[1])


def test_a_receivers_error_does_not_hide_the_loads_of_the_others(ray_cluster):
    ray.get(load.remote(0, False))  # starts a worker
    slow, refusing = Loading(1.0), Loading(0.0, refuses=True)
    loads = Loads([refusing, slow], 2)
    loads.start("bucket")
    with pytest.raises(ValueError, match="no such weight here"), loads.settled():
        loads.wait()
    assert slow.num_loading() == 0  # the sender frees the bucket's memory next


def test_the_slowest_receiver_of_each_bucket_counts(ray_cluster):
    loads = Loads([Loading(0.0), Loading(0.25)], 1)
    with loads.settled():
        for _ in range(2):
            loads.wait_for_room()
            loads.start("bucket")
        loads.wait()
    assert loads.seconds == 0.5


class Sender(RefitSender):
    """Closes, or fails to, as a sender to an engine that has died does."""

    def __init__(self, *, closes=True):
        self.closes, self.is_closed = closes, False

    def send(self, weights):
        assert not self.is_closed
        return {name: 0 for name, _ in weights}

    def close(self):
        self.is_closed = True
        if not self.closes:
            raise RuntimeError("the engine is gone")


class Transport:
    """Connects the next of its senders; None stands for a failure."""

    def __init__(self, *senders):
        self.senders = list(senders)

    def connect(self, plan, *, rank, bucket_bytes):
        if (sender := self.senders.pop(0)) is None:
            raise RuntimeError("no engine answers")
        return sender


@pytest.mark.parametrize("closes", [True, False])
def test_a_connection_that_failed_sends_nothing_until_another_one_is_made(closes):
    export = WeightExport(lambda: [("a", torch.ones(1))], rank=0, bucket_bytes=8)
    transport = Transport(Sender(closes=closes), *([None] if closes else []), Sender())
    export.connect(transport)
    with pytest.raises(RuntimeError, match="no engine answers" if closes else "the engine is gone"):
        export.connect(transport)
    with pytest.raises(RuntimeError, match="No transport is connected"):
        export.send()
    export.connect(transport)
    assert export.send() == {"a": 0}
