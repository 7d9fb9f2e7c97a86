"""Groups the tensors that a micro-batch's pass saves, and tracks their offloads until the backward pass."""

import functools
import weakref
from collections import Counter, deque
from contextlib import ExitStack
from itertools import chain
from typing import NamedTuple, Protocol

import torch

from nemo_offload_rl.activation_offload.copies import CopyEngine, CopyHandle
from nemo_offload_rl.activation_offload.report import ModuleReport
from nemo_offload_rl.activation_offload.schedule import Pace
from nemo_offload_rl.activation_offload.storage import (
    InPlaceError,
    OffloadPath,
    Region,
    ResidentTensor,
    SavedStorage,
    changed_in_place,
    offload,
    unpack_resident,
    without_history,
)


class Group:
    """Holds the tensors that one module's forward pass in one layer saves for its backward pass.

    Args:
        name: of the module.
        chunk: the pass of a micro-batch that the group belongs to.
        report: counts the module's bytes in this step.
    """

    __slots__ = ("chunk", "in_backward", "index", "key", "name", "nbytes", "report", "saved", "storages")

    def __init__(self, name: str, chunk: "weakref.ref[Chunk]", report: ModuleReport) -> None:
        self.name = name
        self.chunk = chunk
        self.report = report
        self.index = -1
        """Its index among the groups of its chunk; -1 before its commit."""
        self.in_backward = False
        """Whether autograd has unpacked a tensor of it."""
        self.key = (name, -1)
        """The module, and the number of its groups before this one in the pass; -1 before the commit."""
        self.storages: list[weakref.ref[SavedStorage]] = []
        """The storages of its tensors, in the order in which its backward pass needs them."""
        self.saved: list[PackedTensor] = []
        """Its tensors, until its commit is done."""
        self.nbytes = 0

    def settle(self) -> tuple[list["PackedTensor"], list[SavedStorage]]:
        """Check the saved tensors and list their storages, once the group's forward pass is queued.

        Returns:
            The saved tensors, and those of their storages that no earlier group had saved.

        Raises:
            InPlaceError: a tensor has changed since it was saved.
        """
        for one in self.saved:
            one.check()
        storages = list(dict.fromkeys([one.stored for one in reversed(self.saved)]))
        self.storages = [weakref.ref(stored) for stored in storages]
        fresh = [stored for stored in reversed(storages) if stored.is_resident is None]
        self.nbytes = sum([stored.nbytes for stored in fresh])
        return self.saved, fresh

    def on_host_only(self) -> list[SavedStorage]:
        """Return the group's storages that are on the host only."""
        storages = [ref() for ref in self.storages]
        return [stored for stored in storages if stored is not None and stored.storage is None]

    def was_offloaded(self) -> bool:
        """Tell whether one of the group's storages was copied to the host, perhaps by another group."""
        return any(stored is not None and stored.was_offloaded for stored in (ref() for ref in self.storages))


class PackedTensor:
    """Holds a saved tensor that may be offloaded: first the tensor itself, then only how to view it in its storage.

    Args:
        tensor: the tensor that a module saved.
        group: the module's group, which the tensor belongs to.
        stored: its storage.
        is_alias: whether only autograd refers to the tensor, while other tensors may share its storage.
    """

    __slots__ = ("_is_alias", "_tensor", "_version", "_view", "group", "stored")

    def __init__(self, tensor: torch.Tensor, group: Group, stored: SavedStorage, *, is_alias: bool = False) -> None:
        self.group = group
        self.stored = stored
        self._is_alias = is_alias
        self._tensor: torch.Tensor | None = tensor
        self._version = tensor._version
        # Taken at once for an alias: `release` empties it, perhaps for another `PackedTensor` of the same tensor.
        self._view = _view_of(tensor) if is_alias else None

    def make_resident(self) -> None:
        """Keeps the tensor on the GPU until the backward pass."""
        if self._tensor is not None:
            self._tensor = without_history(self._tensor)

    def release(self) -> None:
        """Drop the tensor; `stored` has its bytes."""
        tensor, self._tensor = self._tensor, None
        if tensor is not None:
            self._view = self._view or _view_of(tensor)
            if self._is_alias:  # autograd keeps a leaf that requires a gradient, to accumulate it
                tensor.data = tensor.new_empty(0)

    def check(self) -> None:
        """Check that the tensor has not changed since it was saved, so that its copy is valid.

        Raises:
            InPlaceError: it has changed; autograd itself would refuse its backward pass.
        """
        tensor = self._tensor
        if tensor is not None and tensor._version != self._version:
            raise InPlaceError(
                f"{changed_in_place(tensor, self._version, self.group.name)} while it was being copied to the host; "
                f"remove {self.group.name} from policy.megatron_cfg.offload_modules"
            )

    def unpacked(self) -> torch.Tensor:
        """Return the saved tensor, on the GPU.

        Raises:
            InPlaceError: it was never offloaded, and has changed.
        """
        if self._tensor is not None:
            return unpack_resident((self._tensor, self._version, self.group.name))
        assert self._view is not None
        offset, size, stride, dtype = self._view
        storage = self.stored.fetch()
        return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, size, stride)


Saved = ResidentTensor | PackedTensor
"""What a saved tensor is kept as until the backward pass."""


def _view_of(tensor: torch.Tensor) -> tuple[int, torch.Size, tuple[int, ...], torch.dtype]:
    """Returns the offset, shape and strides of a tensor in its storage, and its dtype."""
    return int(tensor.storage_offset()), tensor.size(), tensor.stride(), tensor.dtype


class GroupListener(Protocol):
    """Decides which groups are offloaded."""

    def commit(self, chunk: "Chunk", group: Group) -> None:
        """Handle a group whose forward pass is queued."""
        ...


class Chunk:
    """Tracks one micro-batch's forward and backward pass through one of megatron-core's model chunks.

    Args:
        listener: called at the commit of each group.
        stage: the model chunk's number on this rank.
        path: names the copy engine and host memory of its activations.
        fraction: the most that is offloaded, as a fraction of bytes, of groups that no earlier pass has measured.
    """

    def __init__(self, listener: GroupListener, stage: int, path: OffloadPath, fraction: float) -> None:
        self._listener = listener
        self.stage = stage
        self.path = path
        self.pace = Pace(fraction)
        self.open: list[Group] = []
        """Started groups that are not committed: a norm's group commits after the module behind it has started."""
        self.groups: list[Group] = []
        """Committed groups, in order: the backward pass takes them in the reverse order."""
        self.storages: dict[int, weakref.ref[SavedStorage]] = {}
        """Saved storages by address (`_cdata`); once one is freed, another storage may get its address."""
        self.num_not_prefetched: int | None = None
        """Number of groups, from the first, whose prefetch is not requested yet; None during the forward pass."""
        self.pending: list[PendingOffload] = []
        """Offloads that the next copy request starts."""
        self.lead = 1
        """Layers by which prefetches run ahead of the backward pass."""
        self._num_of: Counter[str] = Counter()
        self._ref = weakref.ref(self)

    @functools.cached_property
    def prefetch_from(self) -> int:
        """Returns the index of the first group of the backward pass that prefetches; known after the forward pass.

        Groups that the backward pass takes before it do not prefetch: they have nothing on the host, or they belong to
        the last layer, during which most memory is in use.
        """
        resident_from = next((group.index for group in reversed(self.groups) if group.was_offloaded()), -1) + 1
        last_layer = len(self.groups) - self.num_modules
        return max(resident_from, min(resident_from + (self.lead - 1) * self.num_modules, last_layer))

    @property
    def num_modules(self) -> int:
        """Returns the number of different modules with groups in this chunk, which is that of a layer."""
        return len(self._num_of)

    def start_group(self, name: str) -> None:
        """Starts a group: tensors saved from now on are part of it."""
        self.open.append(Group(name, self._ref, self.path.tally.of(name)))

    def end_group(self, name: str) -> None:
        """Commit the oldest open group of this name."""
        group = next(group for group in self.open if group.name == name)
        self.open.remove(group)
        if group.in_backward:  # its commit was delayed until its backward pass: too late for a copy
            group.saved = []  # with `PackedTensor.group` a cycle, which only the garbage collector would free
            return
        group.index = len(self.groups)
        group.key = (name, self._num_of[name])
        self._num_of[name] += 1
        self.groups.append(group)
        self._listener.commit(self, group)
        group.saved = []

    def abandon(self) -> None:
        """Drops all saved tensors of a failed pass, which otherwise only a whole pass releases."""
        of_groups = [group.saved for group in (*self.groups, *self.open)]
        for saved in chain(*of_groups, *(one.saved for one in self.pending)):
            saved.release()

    def offload(self, inflight: "InflightOffloads") -> None:
        """Request the copies of all pending offloads at once; a group stays on the GPU if the host memory is full.

        Args:
            inflight: holds their GPU memory until the compute stream has waited for the copies.
        """
        placed: list[tuple[SavedStorage, Region]] = []
        held: list[PendingOffload] = []
        for one in self.pending:
            report = one.group.report
            regions = self.path.host.take_all([stored.nbytes for stored in one.storages])
            if regions is None:
                report.refused_bytes += one.group.nbytes
                for stored in one.storages:
                    stored.is_resident = True
                for saved in one.saved:
                    saved.make_resident()
                continue
            report.moved_bytes += one.group.nbytes
            placed += zip(one.storages, regions, strict=True)
            held.append(one)
        if placed:
            handle = offload(self.path, placed)
            for one in held:
                inflight.hold(one, handle)
        self.pending = []


class PendingOffload(NamedTuple):
    """Holds a group that is being offloaded.

    Attributes:
        group: the group.
        storages: the storages of the group that no earlier group had saved.
        saved: the tensors in these storages.
    """

    group: Group
    storages: list[SavedStorage]
    saved: list[PackedTensor]

    def release(self) -> None:
        """Drops the GPU memory; the compute stream has waited for its copies to the host."""
        for saved in self.saved:
            saved.release()
        for stored in self.storages:
            stored.storage = None


class InflightOffloads:
    """Holds the GPU memory of offloads until the compute stream has waited for their copies."""

    def __init__(self, copies: CopyEngine) -> None:
        self._copies = copies
        self._held: deque[tuple[PendingOffload, CopyHandle]] = deque()

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, pending: PendingOffload, handle: CopyHandle) -> None:
        """Keep a group's GPU memory until the compute stream has waited for the copies of `handle`."""
        self._held.append((pending, handle))

    def release(self, max_held: int) -> None:
        """Make the compute stream wait for all groups but the `max_held` newest, and drop their GPU memory.

        Raises:
            InPlaceError: a tensor has changed since it was saved.
        """
        while len(self._held) > max_held:
            pending, handle = self._held.popleft()
            self._copies.wait(handle)
            try:
                for saved in pending.saved:
                    saved.check()
            finally:
                pending.release()

    def abandon(self) -> None:
        """Drop all held memory; the backward pass will not use it, so in-place changes are not checked."""
        with ExitStack() as stack:  # each of them, even if a failed GPU raises at every wait
            while self._held:
                pending, handle = self._held.pop()
                stack.callback(pending.release)
                stack.callback(self._copies.wait, handle)
