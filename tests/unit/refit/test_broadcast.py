"""Weights by broadcast to engines of their own; on a CPU over gloo, with the processes that a run would have."""

import gc
import os
import sys
import time
import weakref

import pytest
import ray
import torch
from support.mixed_weights import MIXED
from support.weight_loader import WeightLoader

from nemo_offload_rl.refit import broadcast
from nemo_offload_rl.refit.broadcast import BroadcastTransport, RefitTimeoutError, announcement
from nemo_offload_rl.refit.loads import EngineLostError
from nemo_offload_rl.refit.plan import ExportPlan

# The actors cannot import this module; what is defined in it travels whole.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Absentee(WeightLoader):
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


def connect(receivers, weights, *, bucket_bytes=1000, verify=False, **options):
    transport = BroadcastTransport(receivers, verify=verify, **options)
    return transport.connect(ExportPlan.of(weights), rank=0, bucket_bytes=bucket_bytes)


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
        ("ends", 60, EngineLostError, "has lost engine 0 with the weight ends: its process or its node"),
        ("fails", 60, ValueError, "at engine 0 with the weight fails: ValueError: no memory"),
        ("waits", 5, RefitTimeoutError, r"has waited \d s for .*engine 0 with the weight waits"),
    ],
    ids=["ends", "fails", "waits"],
)
def test_an_engine_that_is_there_and_never_joins_is_named(start, instead, timeout_s, error, message):
    weights = [(instead, torch.ones(1))]
    sender = connect([start(0, Absentee)], weights, timeout_s=timeout_s)
    begin = time.monotonic()
    with pytest.raises(error, match=message):
        sender.send(iter(weights))
    assert time.monotonic() - begin < 15
