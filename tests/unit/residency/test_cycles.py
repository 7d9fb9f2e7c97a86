"""Tests that nothing grows over 200 cycles of phases with batches of varying lengths."""

import random

import pytest
import torch
from support.holdings import counts, levels
from support.jobs import WIDTH, make_job
from support.ranges import small_chunks

from nemo_offload_rl.memory.gpu_range import make_range
from nemo_offload_rl.memory.pinned import PinnedArena
from nemo_offload_rl.residency.attach import attach
from nemo_offload_rl.residency.context import Options
from nemo_offload_rl.residency.table import Phase, Placement, Target

pytestmark = pytest.mark.usefixtures("no_leak")

WARM_UP, NUM_CYCLES = 20, 200


def cycle(job, offloader, number):
    """Runs one GRPO step's phases with early moves; ends in GENERATE."""
    residency, choose = offloader.residency, random.Random(number)
    residency.prefetch(Phase.LOGPROB)
    if number % 2:
        residency.prefetch(Phase.TRAIN)
    residency.enter(Phase.LOGPROB)
    if number % 5 == 0:
        with offloader.reference.swapped_in():
            job.model(torch.ones(choose.randint(2, 64), WIDTH, device=offloader.context.device))
    residency.enter(Phase.TRAIN)
    data = torch.randn(choose.randint(2, 64), WIDTH, device=offloader.context.device)
    job.model(data).float().pow(2).mean().backward()
    job.optimizer.step()
    job.optimizer.zero_grad(set_to_none=True)
    residency.start_leaving(Phase.REFIT)
    residency.enter(Phase.REFIT)
    residency.enter(Phase.GENERATE)
    assert residency.where(Target.OPTIMIZER_STATE) is residency.where(Target.PARAMS) is Placement.HOST
    if number % 3 == 0:  # as in a step that ends without metrics
        offloader.meter.take_metrics()


def run_cycles(job, offloader, num_cycles=NUM_CYCLES):
    """Returns `counts` and `levels` after the first cycle that follows the warm-up, and after the last one."""
    readings = []
    for number in range(WARM_UP + num_cycles):
        cycle(job, offloader, number)
        if number in (WARM_UP, WARM_UP + num_cycles - 1):
            offloader.meter.take_metrics()
            readings.append((counts(), levels()))
    return readings


def assert_flat(readings):
    (first_counts, first_levels), (last_counts, last_levels) = readings
    # A count may fall: the collector closes sockets that a test before this one has left.
    assert {name: last for name, last in last_counts.items() if last > first_counts.get(name, 0)} == {}
    # The C library maps and unmaps a few regions as it likes; one left behind every twelfth cycle would be 16.
    grown = {name: last_levels[name] - first_levels[name] for name in first_levels}
    assert {name: more for name, more in grown.items() if more > 16} == {}


def test_200_cycles_leave_no_thread_handle_or_memory_behind(offloaders):
    job = make_job(num_layers=1)
    readings = run_cycles(job, offloaders(job, with_reference=True, ranges=small_chunks))
    assert readings[0][0]["copy streams"] > 0
    assert_flat(readings)


@pytest.mark.gpu
@pytest.mark.whole_gpu
def test_200_cycles_on_a_gpu_leave_its_memory_streams_and_handles_flat():
    job, arena = make_job(num_layers=14), PinnedArena()
    job.model.cuda()
    job.optimizer = torch.optim.AdamW(job.model.parameters(), lr=1e-3)
    offloader = attach([job.model], job.optimizer, arena, options=Options(with_reference=True), ranges=make_range)
    readings = run_cycles(job, offloader)
    assert_flat(readings)
    assert offloader.mapped_bytes == 0  # the rest is the context and torch's own
    offloader.close()
