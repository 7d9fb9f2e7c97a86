"""Tests prefetches of an engine: the memory that they leave free, and what follows one that found no memory."""

import dataclasses
import threading

import pytest
import torch
from support.jobs import assert_equal, enter_and_require, make_job, run_steps
from support.ranges import CHUNK_BYTES, Trouble

from nemo_offload_rl.memory.gpu_range import HostRange
from nemo_offload_rl.residency.metrics import Meter
from nemo_offload_rl.residency.table import Phase, Placement, Target

pytestmark = pytest.mark.usefixtures("no_leak")

RESERVE_BYTES = 1 << 20


class Gated(HostRange):
    """Implements a range that is mapped once the gate is open."""

    gate = threading.Event()

    def map(self, index: int) -> None:
        self.gate.wait()
        super().map(index)


@pytest.mark.parametrize(("missing_bytes", "comes"), [(0, True), (1, False)])
def test_memory_that_an_earlier_prefetch_will_still_map_is_not_free(engines, monkeypatch, missing_bytes, comes):
    Gated.gate.set()
    job = make_job()
    engine = engines(job, ranges=lambda nbytes, device, chunk_bytes: Gated(nbytes, CHUNK_BYTES))
    run_steps(job, 1, engine)
    engine.residency.require(Target.OPTIMIZER_STATE)
    wanted = job.everything()
    gpu_bytes = sum(engine.nbytes().values()) + RESERVE_BYTES - missing_bytes
    memory = Meter.memory
    monkeypatch.setattr(
        Meter, "memory", lambda self: dataclasses.replace(memory(self), gpu_free=gpu_bytes - engine.mapped_bytes)
    )
    engine.residency.enter(Phase.GENERATE)
    Gated.gate.clear()
    engine.residency.prefetch(Phase.LOGPROB)  # the parameters, of which nothing is mapped yet
    engine.residency.prefetch(Phase.TRAIN, reserve_bytes=RESERVE_BYTES)
    found = engine.residency.where(Target.OPTIMIZER_STATE)
    Gated.gate.set()
    engine.residency.enter(Phase.LOGPROB)
    assert found is (Placement.GPU if comes else Placement.HOST)
    enter_and_require(engine)
    assert_equal(job.everything(), wanted)


def test_a_checkpoint_after_a_prefetch_that_found_no_memory_reads_the_host(engines):
    job, trouble = make_job(), Trouble()
    engine = engines(job, ranges=trouble)
    run_steps(job, 1, engine)
    engine.residency.require(Target.OPTIMIZER_STATE)
    moment = job.optimizer.state[job.model[0].weight]["exp_avg"]
    wanted = moment.clone()
    engine.residency.enter(Phase.GENERATE)
    engine.residency.enter(Phase.LOGPROB)
    trouble.chunks_left = 0
    engine.residency.prefetch(Phase.TRAIN)
    read = engine.checkpoint_reader()
    assert engine.residency.where(Target.OPTIMIZER_STATE) is Placement.HOST
    assert torch.equal(read(moment), wanted)
    trouble.chunks_left = None
    enter_and_require(engine)
    assert torch.equal(moment, wanted)


def test_a_checkpoint_after_a_prefetch_reads_the_gpu(engines):
    job = make_job()
    engine = engines(job)
    run_steps(job, 1, engine)
    engine.residency.enter(Phase.GENERATE)
    engine.residency.prefetch(Phase.TRAIN)
    read = engine.checkpoint_reader()
    assert engine.residency.where(Target.OPTIMIZER_STATE) is Placement.GPU
    moment = job.optimizer.state[job.model[0].weight]["exp_avg"]
    assert read(moment) is moment
