"""Offloads activations of passes that CUDA graphs capture: copies are part of the graphs, and run again in replays.

megatron-core captures a graph for each layer's forward pass, then one for each layer's backward pass, and replays all
of them on one stream, where they follow each other. Rules that come with captures, and the place that keeps each:

- a stream that copies has to be joined before a capture ends, and an event of one capture means nothing in another
  (`CapturedCopies`); what an earlier graph copied is there, since that graph has ended;
- GPU memory that a graph frees is used again by graphs captured later: only after this one has waited for the copies
  out of it (`Captures.end`);
- graphs hold addresses, so host memory is theirs until they are deleted (`CapturedRegions`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from nemo_offload_rl.activation_offload.copies import CopyEngine, CopyHandle, Span
from nemo_offload_rl.activation_offload.groups import Chunk, InflightOffloads
from nemo_offload_rl.activation_offload.host_pool import HostRegions, OffloadPath, PinnedHostPool, Region
from nemo_offload_rl.activation_offload.report import ModuleReport


class CapturedRegions(HostRegions):
    """Keeps the host-pool regions whose addresses CUDA graphs contain until the graphs are deleted."""

    def __init__(self, host_pool: PinnedHostPool) -> None:
        self._host_pool = host_pool
        self._regions: list[Region] = []

    @property
    def memory(self) -> torch.Tensor:
        """See `HostRegions`."""
        return self._host_pool.memory

    @property
    def nbytes(self) -> int:
        """Returns the bytes taken from the host pool."""
        return sum(region.reserved_bytes for region in self._regions)

    def take_all(self, sizes: Sequence[int]) -> list[Region] | None:
        """See `HostRegions`."""
        regions = self._host_pool.take_all(sizes)
        self._regions += regions or []
        return regions

    def give_back(self, region: Region, after: CopyHandle | None) -> None:
        """Does nothing: the next replay copies there again."""

    def release(self) -> None:
        """Give all regions back; the graphs have been deleted."""
        for region in self._regions:
            self._host_pool.give_back(region, None)
        self._regions = []


@dataclass(frozen=True)
class _CapturedCopyHandle(CopyHandle):
    handle: CopyHandle
    capture: int

    def reached(self) -> bool:
        """Always true when code outside of a capture can ask."""
        return True

    def covers(self, other: CopyHandle) -> bool:
        """Returns whether the other handle is this one."""
        return other is self


class CapturedCopies(CopyEngine):
    """Makes copies that become part of the graph under capture.

    Args:
        copies: makes them, on streams that follow the capturing one.
    """

    def __init__(self, copies: CopyEngine) -> None:
        self._copies = copies
        self._capture = 0
        self._unjoined: list[CopyHandle] = []

    def is_capturing(self) -> bool:
        """See `CopyEngine`."""
        return self._copies.is_capturing()

    def out(self, spans: Sequence[Span], after: Iterable[CopyHandle]) -> CopyHandle:
        """See `CopyEngine`."""
        return self._asked(self._copies.out(spans, self._of_this_capture(after)))

    def back(self, spans: Sequence[Span], after: Iterable[CopyHandle]) -> CopyHandle:
        """See `CopyEngine`."""
        return self._asked(self._copies.back(spans, self._of_this_capture(after)))

    def synchronize(self) -> None:
        """See `CopyEngine`."""
        self._copies.synchronize()

    def wait(self, handle: CopyHandle) -> None:
        """See `CopyEngine`; graphs before this one have ended when it begins, their copies included."""
        for mine in self._of_this_capture([handle]):
            self._copies.wait(mine)

    def wait_to_free(self, handle: CopyHandle) -> None:
        """See `CopyEngine`."""
        self.wait(handle)

    def end_capture(self) -> None:
        """Make the capturing stream wait for all copies of this capture, and for none of another."""
        for handle in self._unjoined:
            self._copies.wait(handle)
        self.forget_capture()

    def forget_capture(self) -> None:
        """Drops the events of a capture that is over or has failed; they are not waited for any more."""
        self._unjoined = []
        self._capture += 1

    def _asked(self, handle: CopyHandle) -> CopyHandle:
        self._unjoined.append(handle)
        return _CapturedCopyHandle(handle, self._capture)

    def _of_this_capture(self, handles: Iterable[CopyHandle]) -> list[CopyHandle]:
        # Of eager copies none is under way: the GPU was idle when captures began (`prepare_capture`). Host memory may
        # still come back from them, as from a failed step that the garbage collector finds later.
        captured = (handle for handle in handles if isinstance(handle, _CapturedCopyHandle))
        return [handle.handle for handle in captured if handle.capture == self._capture]


class Captures:
    """Offloads the activations inside of a model's captured graphs.

    Args:
        host_pool: gives the host memory.
        copies: the copy engine of eager passes.
    """

    def __init__(self, host_pool: PinnedHostPool, copies: CopyEngine) -> None:
        self.regions = CapturedRegions(host_pool)
        self._copies = CapturedCopies(copies)
        self.path = OffloadPath(self.regions, self._copies)
        self.inflight = InflightOffloads(self._copies)
        self.chunk: Chunk | None = None
        """Under capture."""
        self.graph_inputs: set[int] = set()
        """Storages of the graphs' own inputs: they live as long as the graphs do."""
        self._num_forward = 0
        self._num_replays = 0

    def end(self, *, forward: bool) -> None:
        """End a graph: wait for its copies, so that graphs behind it may use the memory that they read."""
        self.inflight.release(max_held=0)
        self._copies.end_capture()
        self._num_forward += forward

    def abandon(self) -> None:
        """Drops all captures: tensors that autograd keeps of a failed one must not keep it alive."""
        self._copies.forget_capture()
        self.inflight.abandon()
        if self.chunk is not None:
            self.chunk.abandon()
        self.regions.release()

    def count_replay(self) -> None:
        """Count a replay of a layer's forward graph."""
        self._num_replays += 1

    def take_report(self) -> dict[str, ModuleReport]:
        """Returns what the replays since the last report have moved."""
        replays, self._num_replays = self._num_replays, 0
        if not replays:
            return {}
        # Layers are replayed alike, each of them once a micro-batch.
        return {name: report.scaled(replays, self._num_forward) for name, report in self.path.tally.modules.items()}
