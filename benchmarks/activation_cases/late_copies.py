"""Delays copies, so that a missing wait shows in the numbers."""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from nemo_offload_rl.activation_offload.copies import Span, SpanCopyStream
from nemo_offload_rl.memory.streams import CopyStream

_CYCLES_PER_MS = 1_500_000  # an H200's clock is 1.98 GHz at most, lower under load


@dataclass
class Delays:
    """Counts what was delayed.

    Attributes:
        num_copies: copies before which a kernel spins.
    """

    num_copies: int = 0


@contextlib.contextmanager
def late_copies(milliseconds: float) -> Iterator[Delays]:
    """Makes the stream of every copy of the offload engine spin first, in both directions; does nothing at 0."""
    delays = Delays()
    copy_all, copy_spans = CopyStream.copy_all, SpanCopyStream.copy_all

    def spin(stream: torch.cuda.Stream) -> None:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(int(milliseconds * _CYCLES_PER_MS))
        delays.num_copies += 1

    def late_copy_all(self: CopyStream, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for pair in pairs:
            if self.stream is not None:
                spin(self.stream)
            copy_all(self, [pair])

    def late_spans(self: SpanCopyStream, spans: Iterable[Span]) -> None:
        for span in spans:
            spin(self.stream)
            copy_spans(self, [span])

    if milliseconds:
        CopyStream.copy_all = late_copy_all  # type: ignore[method-assign]
        SpanCopyStream.copy_all = late_spans  # type: ignore[method-assign]
    try:
        yield delays
    finally:
        CopyStream.copy_all = copy_all  # type: ignore[method-assign]
        SpanCopyStream.copy_all = copy_spans  # type: ignore[method-assign]
