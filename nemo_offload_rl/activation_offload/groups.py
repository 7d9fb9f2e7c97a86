"""Passes of micro-batches, made of groups; which groups leave; what is on its way."""

import functools
import weakref
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import chain
from typing import NamedTuple, Protocol

from nemo_offload_rl.activation_offload.copies import CopyEngine, CopyHandle
from nemo_offload_rl.activation_offload.host_pool import Region
from nemo_offload_rl.activation_offload.path import OffloadPath
from nemo_offload_rl.activation_offload.saved_tensors import Group, SavedTensor
from nemo_offload_rl.activation_offload.schedule import Pace, which_leave
from nemo_offload_rl.activation_offload.storage import SavedStorage, offload


class GroupListener(Protocol):
    """Who decides what becomes of groups."""

    def commit(self, chunk: "Chunk", group: Group) -> None:
        """A group's forward pass is queued."""
        ...


class Chunk:
    """The forward and backward pass of one micro-batch through one model chunk, in megatron-core's terms.

    Args:
        listener: told of each group.
        stage: the model chunk's number on this rank.
        path: that its activations take.
        fraction: of the bytes that leave, at most, of groups of which no pass before says whether they do.
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
        self.num_not_back: int | None = None
        """Number of groups, from the first, that are not requested back; None while the forward pass is under way."""
        self.pending: list[PendingOffload] = []
        """Offloads that the next request starts."""
        self.lead = 1
        """Of its copies back over its backward pass, in layers."""
        self._num_of: Counter[str] = Counter()
        self._ref = weakref.ref(self)

    @functools.cached_property
    def prefetch_from(self) -> int:
        """The first group of the backward pass to ask for copies back; known when the forward pass is over.

        Those that it takes before have nothing to ask for yet, as nothing of theirs is on the host; or they are of the
        last layer, while which most memory is in use.
        """
        resident_from = next((group.index for group in reversed(self.groups) if group.has_left()), -1) + 1
        last_layer = len(self.groups) - self.num_modules
        return max(resident_from, min(resident_from + (self.lead - 1) * self.num_modules, last_layer))

    @property
    def num_modules(self) -> int:
        """Different modules that have groups here: as many as a layer has."""
        return len(self._num_of)

    def start_group(self, name: str) -> None:
        """What is saved from now on is part of this group."""
        self.open.append(Group(name, self._ref, self.path.tally.of(name)))

    def end_group(self, name: str) -> None:
        """The oldest open group of this name ends: commit it."""
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
        """Its pass has failed: what autograd keeps must not be kept alive by what only a whole pass would let go of."""
        of_groups = [group.saved for group in (*self.groups, *self.open)]
        for saved in chain(*of_groups, *(one.saved for one in self.pending)):
            saved.leave()

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
                    stored.stays = True
                for saved in one.saved:
                    saved.stay()
                continue
            report.moved_bytes += one.group.nbytes
            placed += zip(one.storages, regions, strict=True)
            held.append(one)
        if placed:
            handle = offload(self.path, placed)
            for one in held:
                inflight.hold(one, handle)
        self.pending = []


class Profile:
    """What the last whole forward pass of a model chunk looked like, and which of its groups leave therefore.

    Args:
        groups: of that pass, in order.
        fraction: of the eligible bytes that leave, at most.
        has_margin: the last group of each module stays, since the backward pass needs it before a copy could pay off.
    """

    def __init__(self, groups: Sequence[Group], fraction: float, *, has_margin: bool) -> None:
        margin = {group.name: group.key for group in groups}.values() if has_margin else ()
        self.per_layer = len({group.name for group in groups if group.nbytes})
        """Modules that have storages of their own to move."""
        self.leaves: dict[tuple[str, int], bool] = dict.fromkeys(margin, False)
        """By group key, whether it is offloaded; a group without bytes to move has no entry."""
        self.asks: set[tuple[str, int]] = set()
        """Keys of groups at whose end copies are asked for: the host pays for each request, so a layer makes one."""
        layers = [[group for group in layer if group.key not in margin] for layer in _layers(groups)]
        chosen = which_leave([[group.nbytes for group in layer] for layer in layers], fraction)
        of_groups = zip(chain(*layers), chosen, strict=True)
        self.leaves.update((group.key, leaves) for group, leaves in of_groups if group.nbytes)
        pending = [[group.key for group in layer if self.leaves.get(group.key)] for layer in layers]
        self.asks.update(*pending[:1])  # the link is idle until then, so that the first layer asks at once
        self.asks.update(*(keys[-1:] for keys in pending[1:]))
        kinds = {tuple(name for name, _ in keys) for layer, keys in zip(layers, pending, strict=True) if layer}
        self.lead = 1 if len(kinds) <= 1 else 2
        """Layers that copies out may lag behind, and are asked back ahead. Where other layers leave whole than those
        before and behind them, a whole one's copies take longer than its passes, on a link that keeps up with all."""
        self._sizes = _sizes(groups)

    def is_outdated_by(self, groups: Sequence[Group]) -> bool:
        """Whether a pass of these groups says something else, and of as many; asking takes less than making it anew.

        A short pass does not: of groups whose storages were below the minimum it knows nothing.
        """
        sizes = _sizes(groups)
        is_short = any(nbytes == 0 and key in self._sizes and self._sizes[key] > 0 for key, nbytes in sizes.items())
        return sizes != self._sizes and not is_short

    def modules_that_leave(self) -> set[str]:
        """Those of which some group does."""
        return {name for (name, _), leaves in self.leaves.items() if leaves}


def _sizes(groups: Sequence[Group]) -> dict[tuple[str, int], int]:
    return {group.key: group.nbytes for group in groups}


def _layers(groups: Sequence[Group]) -> list[list[Group]]:
    """Groups in their order; a layer has one of each name at most."""
    layers: list[list[Group]] = []
    names: set[str] = set()
    for group in groups:
        if not layers or group.name in names:
            layers.append([])
            names.clear()
        names.add(group.name)
        layers[-1].append(group)
    return layers


class PendingOffload(NamedTuple):
    """A group that leaves the GPU.

    Attributes:
        group: of these:
        storages: its storages that no other group has settled.
        saved: the tensors in them.
    """

    group: Group
    storages: list[SavedStorage]
    saved: list[SavedTensor]

    def let_go(self) -> None:
        """Its bytes are on the host, as far as the compute stream can see."""
        for saved in self.saved:
            saved.leave()
        for stored in self.storages:
            stored.storage = None


class InflightOffloads:
    """GPU memory that copies still read."""

    def __init__(self, copies: CopyEngine) -> None:
        self._copies = copies
        self._held: deque[tuple[PendingOffload, CopyHandle]] = deque()

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, pending: PendingOffload, handle: CopyHandle) -> None:
        """Keep what a group saved until the copies of `handle` have been waited for."""
        self._held.append((pending, handle))

    def release(self, keep: int) -> None:
        """Let the compute stream wait for all groups but the `keep` youngest, and drop what those held.

        Raises:
            InPlaceError: some of it has changed since it was saved.
        """
        while len(self._held) > keep:
            pending, handle = self._held.popleft()
            self._copies.wait(handle)
            try:
                for saved in pending.saved:
                    saved.check()
            finally:
                pending.let_go()

    def abandon(self) -> None:
        """Drop all of it; storages that were not used will not be used, so that they may have changed."""
        with ExitStack() as stack:  # each of them, though a GPU that has failed says so at every wait
            while self._held:
                pending, handle = self._held.pop()
                stack.callback(pending.let_go)
                stack.callback(self._copies.wait, handle)
