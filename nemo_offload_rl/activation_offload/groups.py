"""Holds what a micro-batch's pass saves, in groups of tensors, until it is copied to the host and back."""

import functools
import weakref
from collections import Counter, deque
from contextlib import ExitStack
from itertools import chain
from typing import NamedTuple, Protocol

import torch

from nemo_offload_rl.activation_offload.copies import CopyEngine, CopyHandle
from nemo_offload_rl.activation_offload.host_pool import OffloadPath, Region
from nemo_offload_rl.activation_offload.report import ModuleReport
from nemo_offload_rl.activation_offload.schedule import Pace
from nemo_offload_rl.activation_offload.storage import (
    InPlaceError,
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
        """Among its chunk's; -1 before its commit."""
        self.in_backward = False
        """Something that it saved has been unpacked."""
        self.key = (name, -1)
        """The module, and how many of its groups come before this one in the pass."""
        self.storages: list[weakref.ref[SavedStorage]] = []
        """The storages of what it saved, in the order in which its backward pass needs them."""
        self.saved: list[PackedTensor] = []
        """The tensors that it saved, until its commit is through."""
        self.nbytes = 0

    def settle(self) -> tuple[list["PackedTensor"], list[SavedStorage]]:
        """Check what it saved and list its storages; its forward pass is queued.

        Returns:
            What it saved, and of the storages of that those that no group before it had saved.

        Raises:
            InPlaceError: some of it has changed since.
        """
        for one in self.saved:
            one.check()
        storages = list(dict.fromkeys([one.stored for one in reversed(self.saved)]))
        self.storages = [weakref.ref(stored) for stored in storages]
        fresh = [stored for stored in reversed(storages) if stored.is_resident is None]
        self.nbytes = sum([stored.nbytes for stored in fresh])
        return self.saved, fresh

    def on_host_only(self) -> list[SavedStorage]:
        """Return the storages of its tensors that are on the host alone."""
        storages = [ref() for ref in self.storages]
        return [stored for stored in storages if stored is not None and stored.storage is None]

    def was_offloaded(self) -> bool:
        """Tell whether a storage that it saved was copied to the host, perhaps for another group."""
        return any(stored is not None and stored.was_offloaded for stored in (ref() for ref in self.storages))


class PackedTensor:
    """Stands for a tensor that may be offloaded: first itself, then how to view it in its storage again.

    Args:
        tensor: the tensor that a module saved.
        group: the module's group, which the tensor is part of.
        stored: its storage.
        is_alias: only autograd knows the tensor; other tensors may share its storage.
    """

    __slots__ = ("_is_alias", "_seen_as", "_tensor", "_version", "group", "stored")

    def __init__(self, tensor: torch.Tensor, group: Group, stored: SavedStorage, *, is_alias: bool = False) -> None:
        self.group = group
        self.stored = stored
        self._is_alias = is_alias
        self._tensor: torch.Tensor | None = tensor
        self._version = tensor._version
        self._seen_as = _view_of(tensor) if is_alias else None  # the first one that is released empties it

    def make_resident(self) -> None:
        """Keeps it on the GPU until the backward pass."""
        if self._tensor is not None:
            self._tensor = without_history(self._tensor)

    def release(self) -> None:
        """Let go of the tensor; `stored` has its bytes."""
        tensor, self._tensor = self._tensor, None
        if tensor is not None:
            self._seen_as = self._seen_as or _view_of(tensor)
            if self._is_alias:  # autograd keeps a leaf that requires a gradient, to add that to it
                tensor.data = tensor.new_empty(0)

    def check(self) -> None:
        """Refuse to go on with a copy of something that has changed since.

        Raises:
            InPlaceError: it has; autograd itself would refuse its backward pass.
        """
        tensor = self._tensor
        if tensor is not None and tensor._version != self._version:
            raise InPlaceError(
                f"{changed_in_place(tensor, self._version, self.group.name)} while it was copied to the host; take "
                f"{self.group.name} out of policy.megatron_cfg.offload_modules"
            )

    def unpacked(self) -> torch.Tensor:
        """Return the tensor, on the GPU.

        Raises:
            InPlaceError: it was never offloaded, and has changed.
        """
        if self._tensor is not None:
            return unpack_resident((self._tensor, self._version, self.group.name))
        assert self._seen_as is not None
        offset, size, stride, dtype = self._seen_as
        storage = self.stored.fetch()
        return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, size, stride)


def _view_of(tensor: torch.Tensor) -> tuple[int, torch.Size, tuple[int, ...], torch.dtype]:
    """Returns offset, shape and strides of a tensor in its storage."""
    return int(tensor.storage_offset()), tensor.size(), tensor.stride(), tensor.dtype


class GroupListener(Protocol):
    """Decides which groups are offloaded."""

    def commit(self, chunk: "Chunk", group: Group) -> None:
        """Take a group whose forward pass is queued."""
        ...


class Chunk:
    """Follows one micro-batch forward and backward through one model chunk, in megatron-core's terms.

    Args:
        listener: told of each group.
        stage: the model chunk's number on this rank.
        path: names the copy engine and host memory of its activations.
        fraction: of the bytes that are offloaded, at most, of groups that no pass before has seen.
    """

    def __init__(self, listener: GroupListener, stage: int, path: OffloadPath, fraction: float) -> None:
        self._listener = listener
        self.stage = stage
        self.path = path
        self.pace = Pace(fraction)
        self.open: list[Group] = []
        """Started, and not committed: a norm's group commits after the module behind it has started."""
        self.groups: list[Group] = []
        """Committed, in order: the backward pass takes them in the reverse order."""
        self.storages: dict[int, weakref.ref[SavedStorage]] = {}
        """By the address of a storage, which is another one's once the saved storage is gone."""
        self.num_not_prefetched: int | None = None
        """Number of groups, from the first, that are not requested back; None while the forward pass is under way."""
        self.pending: list[PendingOffload] = []
        """Offloads that the next request starts."""
        self.lead = 1
        """Of its copies back over its backward pass, in layers."""
        self._num_of: Counter[str] = Counter()
        self._ref = weakref.ref(self)

    @functools.cached_property
    def prefetch_from(self) -> int:
        """Returns the first group of the backward pass that prefetches; known when the forward pass is over.

        Those that it takes before have nothing to ask for yet, as nothing of theirs is on the host; or they are of the
        last layer, while which most memory is in use.
        """
        resident_from = next((group.index for group in reversed(self.groups) if group.was_offloaded()), -1) + 1
        last_layer = len(self.groups) - self.num_modules
        return max(resident_from, min(resident_from + (self.lead - 1) * self.num_modules, last_layer))

    @property
    def num_modules(self) -> int:
        """Counts the different modules that have groups here: as many as a layer has."""
        return len(self._num_of)

    def start_group(self, name: str) -> None:
        """Starts a group: tensors saved from now on are part of it."""
        self.open.append(Group(name, self._ref, self.path.tally.of(name)))

    def end_group(self, name: str) -> None:
        """Commit the oldest open group of this name."""
        group = next(group for group in self.open if group.name == name)
        self.open.remove(group)
        if group.in_backward:  # its commit was delayed until then: too late for a copy
            return
        group.index = len(self.groups)
        group.key = (name, self._num_of[name])
        self._num_of[name] += 1
        self.groups.append(group)
        self._listener.commit(self, group)
        group.saved = []

    def abandon(self) -> None:
        """Drops all storages of a failed pass, which otherwise only a whole pass would let go of."""
        of_groups = [group.saved for group in (*self.groups, *self.open)]
        for saved in chain(*of_groups, *(one.saved for one in self.pending)):
            saved.release()

    def offload(self, inflight: "InflightOffloads") -> None:
        """Request the copies of all pending offloads at once; a group stays if the host memory is full.

        Args:
            inflight: holds their memory on the GPU meanwhile.
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
        group: the group that these belong to.
        storages: its storages that no other group has settled.
        saved: the tensors in them.
    """

    group: Group
    storages: list[SavedStorage]
    saved: list[PackedTensor]

    def release(self) -> None:
        """Drops its GPU memory: its bytes are on the host, as far as the compute stream can see."""
        for saved in self.saved:
            saved.release()
        for stored in self.storages:
            stored.storage = None


class InflightOffloads:
    """Holds GPU memory that copies still read."""

    def __init__(self, copies: CopyEngine) -> None:
        self._copies = copies
        self._held: deque[tuple[PendingOffload, CopyHandle]] = deque()

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, pending: PendingOffload, handle: CopyHandle) -> None:
        """Keep what a group saved until the copies of `handle` have been waited for."""
        self._held.append((pending, handle))

    def release(self, max_held: int) -> None:
        """Let the compute stream wait for all groups but the `max_held` youngest, and drop their memory.

        Raises:
            InPlaceError: some of it has changed since it was saved.
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
        """Drop all of it; storages that were not used will not be used, so that they may have changed."""
        with ExitStack() as stack:  # each of them, though a GPU that has failed says so at every wait
            while self._held:
                pending, handle = self._held.pop()
                stack.callback(pending.release)
                stack.callback(self._copies.wait, handle)
