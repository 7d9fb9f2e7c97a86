"""Provides offloaders that stream a job's optimizer state."""

from collections.abc import Callable, Iterator

import pytest
import torch
from support.jobs import Job
from support.late_streams import LateStream
from support.ranges import small_chunks

from nemo_offload_rl.memory.pinned import PinnedArena
from nemo_offload_rl.residency.attach import Offloader, attach
from nemo_offload_rl.residency.context import Options
from nemo_offload_rl.residency.streamed import window
from nemo_offload_rl.residency.table import STREAMED_TABLE

WINDOW_BYTES = 4 * 12 * 50_000  # a job's weight, 262,144 elements, takes six chunks


@pytest.fixture
def late_copies(monkeypatch) -> None:
    """Makes every copy of a streamed step as late as the waits for it allow."""
    monkeypatch.setattr(window, "CopyStream", LateStream)


@pytest.fixture
def streaming(no_leak) -> Iterator[Callable[..., Offloader]]:
    """Attaches offloaders that stream; closes them when the test ends and checks that they freed everything."""
    made: list[Offloader] = []
    torch.set_num_threads(1)
    arena = PinnedArena()

    def make(job: Job, ranges: Callable = small_chunks, **options) -> Offloader:
        options = {"stream_window_bytes": WINDOW_BYTES} | options
        made.append(
            attach([job.model], job.optimizer, arena, table=STREAMED_TABLE, options=Options(**options), ranges=ranges)
        )
        return made[-1]

    yield make
    for offloader in made:
        offloader.close()
        assert offloader.mapped_bytes == 0
    assert arena.allocated_bytes == 0
    arena.close()
