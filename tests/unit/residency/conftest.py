"""Engines on jobs, and no host memory left behind."""

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
    """Attaches engines to jobs; what was attached is closed with the test, and everything has been given back then."""
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
