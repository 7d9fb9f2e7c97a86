"""Provides engines attached to jobs, and checks that they free all host memory."""

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from support.jobs import Job
from support.ranges import small_chunks

from nemo_offload_rl.memory.pinned import PinnedArena
from nemo_offload_rl.residency.attach import Engine, attach
from nemo_offload_rl.residency.context import Options


@pytest.fixture
def no_leak() -> Iterator[None]:
    assert PinnedArena.live_bytes() == 0
    yield
    gc.collect()
    assert PinnedArena.live_bytes() == 0


@pytest.fixture
def engines(no_leak) -> Iterator[Callable[..., Engine]]:
    """Attaches engines to jobs; closes them when the test ends and checks that they freed everything."""
    made: list[Engine] = []
    torch.set_num_threads(1)
    arena = PinnedArena()

    def make(job: Job, ranges: Callable = small_chunks, **options: bool) -> Engine:
        made.append(attach([job.model], job.optimizer, arena, options=Options(**options), ranges=ranges))
        return made[-1]

    yield make
    for engine in made:
        engine.close()
        assert engine.mapped_bytes == 0
    assert arena.allocated_bytes == 0
    arena.close()
