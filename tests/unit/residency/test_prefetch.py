"""Tests prefetches of an offloader: the memory that they leave free, and what follows one that found no memory."""

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
@pytest.mark.parametrize("at_once", [False, True])
def test_memory_that_an_earlier_prefetch_will_still_map_is_not_free(
    offloaders, monkeypatch, missing_bytes, comes, at_once
):
    Gated.gate.set()
    job = make_job()
    offloader = offloaders(job, ranges=lambda nbytes, device, chunk_bytes: Gated(nbytes, CHUNK_BYTES))
    run_steps(job, 1, offloader)
    offloader.residency.require(Target.OPTIMIZER_STATE)
    wanted = job.everything()
    gpu_bytes = sum(offloader.nbytes().values()) + RESERVE_BYTES - missing_bytes
    memory = Meter.memory
    monkeypatch.setattr(
        Meter, "memory", lambda self: dataclasses.replace(memory(self), gpu_free=gpu_bytes - offloader.mapped_bytes)
    )
    offloader.residency.enter(Phase.GENERATE)
    Gated.gate.clear()
    if not at_once:
        offloader.residency.prefetch(Phase.LOGPROB)  # the parameters, of which nothing is mapped yet
    offloader.residency.prefetch(Phase.TRAIN, reserve_bytes=RESERVE_BYTES)
    found = offloader.residency.where(Target.OPTIMIZER_STATE)
    assert offloader.residency.where(Target.PARAMS) is Placement.GPU
    Gated.gate.set()
    offloader.residency.enter(Phase.LOGPROB)
    assert found is (Placement.GPU if comes else Placement.HOST)
    enter_and_require(offloader)
    assert_equal(job.everything(), wanted)


def test_a_checkpoint_after_a_prefetch_that_found_no_memory_reads_the_host(offloaders):
    job, trouble = make_job(), Trouble()
    offloader = offloaders(job, ranges=trouble)
    run_steps(job, 1, offloader)
    offloader.residency.require(Target.OPTIMIZER_STATE)
    moment = job.optimizer.state[job.model[0].weight]["exp_avg"]
    wanted = moment.clone()
    offloader.residency.enter(Phase.GENERATE)
    offloader.residency.enter(Phase.LOGPROB)
    trouble.chunks_left = 0
    offloader.residency.prefetch(Phase.TRAIN)
    read = offloader.checkpoint_reader()
    assert offloader.residency.where(Target.OPTIMIZER_STATE) is Placement.HOST
    assert torch.equal(read(moment), wanted)
    trouble.chunks_left = None
    enter_and_require(offloader)
    assert torch.equal(moment, wanted)


def test_a_checkpoint_after_a_prefetch_reads_the_gpu(offloaders):
    job = make_job()
    offloader = offloaders(job)
    run_steps(job, 1, offloader)
    offloader.residency.enter(Phase.GENERATE)
    offloader.residency.prefetch(Phase.TRAIN)
    read = offloader.checkpoint_reader()
    assert offloader.residency.where(Target.OPTIMIZER_STATE) is Placement.GPU
    moment = job.optimizer.state[job.model[0].weight]["exp_avg"]
    assert read(moment) is moment
