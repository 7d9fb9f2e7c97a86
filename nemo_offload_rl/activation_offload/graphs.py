"""Offloads activations of passes that CUDA graphs capture: copies are part of the graphs, and run again in replays.

megatron-core captures a graph for each layer's forward pass, then one for each layer's backward pass, and replays all
of them on one stream, one after the other. Captures come with these rules, each enforced in one place:

- a copy stream has to be joined before a capture ends, and an event of one capture is not valid in another
  (`CapturedCopies`); the copies of an earlier graph are done, since that graph has ended;
- graphs captured later reuse GPU memory that a graph frees, so a graph waits for the copies out of that memory before
  it ends (`Captures.end`);
- graphs contain addresses, so their host memory is reserved until they are deleted (`CapturedRegions`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from nemo_offload_rl.activation_offload.copies import CopyEngine, CopyHandle, Span
from nemo_offload_rl.activation_offload.groups import Chunk, InflightOffloads
from nemo_offload_rl.activation_offload.report import ModuleReport
from nemo_offload_rl.activation_offload.storage import HostRegions, OffloadPath, PinnedHostPool, Region


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
        """Does nothing: the next replay copies into the region again."""

    def release(self) -> None:
        """Return all regions to the host pool; the graphs have been deleted."""
        for region in self._regions:
            self._host_pool.give_back(region, None)
        self._regions = []


@dataclass(frozen=True)
class _CapturedCopyHandle(CopyHandle):
    handle: CopyHandle
    capture: int

    def reached(self) -> bool:
        """Returns True: callers ask outside of a capture, when the copies are done."""
        return True

    def covers(self, other: CopyHandle) -> bool:
        """Returns whether the other handle is this one."""
        return other is self


class CapturedCopies(CopyEngine):
    """Makes copies that become part of the graph under capture.

    Args:
        copies: queues the copies, on streams that follow the capturing one.
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
        return self._track(self._copies.out(spans, self._of_this_capture(after)))

    def back(self, spans: Sequence[Span], after: Iterable[CopyHandle]) -> CopyHandle:
        """See `CopyEngine`."""
        return self._track(self._copies.back(spans, self._of_this_capture(after)))

    def synchronize(self) -> None:
        """See `CopyEngine`."""
        self._copies.synchronize()

    def wait(self, handle: CopyHandle) -> None:
        """See `CopyEngine`; earlier graphs and their copies have ended when this one begins, and need no wait."""
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
        """Drops the events of a capture that has ended or failed; later waits skip them."""
        self._unjoined = []
        self._capture += 1

    def _track(self, handle: CopyHandle) -> CopyHandle:
        self._unjoined.append(handle)
        return _CapturedCopyHandle(handle, self._capture)

    def _of_this_capture(self, handles: Iterable[CopyHandle]) -> list[CopyHandle]:
        # No eager copy is under way: the GPU was idle when captures began (`prepare_capture`). Regions may still name
        # eager copies, such as those of a failed step whose storages the garbage collector frees later.
        captured = (handle for handle in handles if isinstance(handle, _CapturedCopyHandle))
        return [handle.handle for handle in captured if handle.capture == self._capture]


class Captures:
    """Offloads the activations inside of a model's captured graphs.

    Args:
        host_pool: provides the host memory.
        copies: the copy engine of eager passes.
    """

    def __init__(self, host_pool: PinnedHostPool, copies: CopyEngine) -> None:
        self.regions = CapturedRegions(host_pool)
        self._copies = CapturedCopies(copies)
        self.path = OffloadPath(self.regions, self._copies)
        self.inflight = InflightOffloads(self._copies)
        self.chunk: Chunk | None = None
        """The chunk that is under capture."""
        self.graph_inputs: set[int] = set()
        """Addresses (`_cdata`) of the storages of the graphs' inputs, which live as long as the graphs do."""
        self._num_forward = 0
        self._num_replays = 0

    def end(self, *, forward: bool) -> None:
        """End a graph: make it wait for its copies, so that later graphs may reuse the memory that these read."""
        self.inflight.release(max_held=0)
        self._copies.end_capture()
        self._num_forward += forward

    def abandon(self) -> None:
        """Drops all captures, so that tensors that autograd keeps of a failed one do not hold its memory."""
        self._copies.forget_capture()
        self.inflight.abandon()
        if self.chunk is not None:
            self.chunk.abandon()
        self.regions.release()

    def count_replay(self) -> None:
        """Count a replay of a layer's forward graph."""
        self._num_replays += 1

    def take_report(self) -> dict[str, ModuleReport]:
        """Returns the bytes that replays have moved since the last report, by module."""
        replays, self._num_replays = self._num_replays, 0
        if not replays:
            return {}
        # All layers are replayed equally often, each of them once a micro-batch.
        return {name: report.scaled(replays, self._num_forward) for name, report in self.path.tally.modules.items()}
