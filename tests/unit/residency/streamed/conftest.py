"""Provides offloaders that stream a job's optimizer state."""

from collections.abc import Callable
from typing import Any

import pytest
from support.jobs import Job
from support.late_streams import LateStream
from support.ranges import small_chunks

from nemo_offload_rl.residency.attach import Offloader
from nemo_offload_rl.residency.streamed import window
from nemo_offload_rl.residency.table import STREAMED_TABLE

WINDOW_BYTES = 4 * 12 * 50_000  # a job's weight, 262,144 elements, takes six chunks


@pytest.fixture
def late_copies(monkeypatch) -> None:
    """Makes every copy of a streamed step as late as the waits for it allow."""
    monkeypatch.setattr(window, "CopyStream", LateStream)


@pytest.fixture
def streaming(offloaders) -> Callable[..., Offloader]:
    def make(job: Job, ranges: Callable = small_chunks, **options: Any) -> Offloader:
        return offloaders(job, ranges, table=STREAMED_TABLE, **({"stream_window_bytes": WINDOW_BYTES} | options))

    return make
