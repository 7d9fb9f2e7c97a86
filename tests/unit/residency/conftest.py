"""Provides offloaders attached to jobs, and checks that they free all host memory."""

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.jobs import Job, make_job, run_steps, visit
from support.ranges import small_chunks

from nemo_offload_rl.memory.pinned import PinnedArena
from nemo_offload_rl.residency.attach import Offloader, attach
from nemo_offload_rl.residency.context import Options
from nemo_offload_rl.residency.table import DEFAULT_TABLE, Phase, Table


@pytest.fixture
def no_leak() -> Iterator[None]:
    assert PinnedArena.live_bytes() == 0
    yield
    gc.collect()
    assert PinnedArena.live_bytes() == 0


@pytest.fixture
def offloaders(no_leak) -> Iterator[Callable[..., Offloader]]:
    """Attaches offloaders to jobs; closes them when the test ends and checks that they freed everything."""
    made: list[Offloader] = []
    torch.set_num_threads(1)
    arena = PinnedArena()

    def make(job: Job, ranges: Callable = small_chunks, table: Table = DEFAULT_TABLE, **options: Any) -> Offloader:
        made.append(attach([job.model], job.optimizer, arena, table=table, options=Options(**options), ranges=ranges))
        return made[-1]

    yield make
    for offloader in made:
        offloader.close()
        assert offloader.mapped_bytes == 0
    assert arena.allocated_bytes == 0
    arena.close()


@pytest.fixture
def stepped(offloaders) -> Callable[..., tuple[Job, Offloader]]:
    """Makes jobs with their offloaders, behind steps, in phases entered after these."""

    def make(
        *phases: Phase, num_steps: int = 1, ranges: Callable = small_chunks, **options: bool
    ) -> tuple[Job, Offloader]:
        job = make_job()
        offloader = offloaders(job, ranges=ranges, **options)
        run_steps(job, num_steps, offloader)
        visit(offloader, *phases)
        return job, offloader

    return make
