"""Decides which groups of activations are offloaded, for the planner and for the manager; does not import torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol


@dataclass(frozen=True)
class ActivationOptions:
    """Holds the options of a recipe's activation offloading; on the worker, those of one pipeline rank.

    Attributes:
        modules: as in `policy.megatron_cfg.offload_modules`.
        fraction: part of a micro-batch's eligible bytes to offload, from 0 to 1; what stays is spread over the layers.
        min_elements: storages with fewer elements stay on the GPU.
        host_memory_limit_bytes: the most host memory of one rank for activations; None for as much as they need.
        strict: whether a module without effect is an error.
        resident_bytes: bytes that stay on this rank's GPU at any time (`delta_offload_bytes_across_pp_ranks` times its
            pipeline rank).
        max_inflight: groups whose GPU memory may be held for their copies before the compute stream waits; None for the
            groups of one layer, or of two where layers differ (`Profile.lead`): fewer would make it wait for copies
            that are fast enough, more would only take memory. With a number each group makes its own request, so that
            each can be waited for.
        margin_stage: the model chunk whose backward pass follows its forward pass at once, on the pipeline's last rank;
            None elsewhere. In this chunk the last group of each module stays.
    """

    modules: tuple[str, ...]
    fraction: float
    min_elements: int
    host_memory_limit_bytes: int | None = None
    strict: bool = False
    resident_bytes: int = 0
    max_inflight: int | None = None
    margin_stage: int | None = 0


class Pace:
    """Decides in the order of the forward pass whether each group is offloaded, and spreads the offloads evenly.

    Args:
        fraction: the most to offload of the groups' bytes.
        ahead: bytes by which offloads may run ahead of the groups so far; for a pass whose groups are known.
        total: bytes of all groups; None if they are not known.
    """

    def __init__(self, fraction: float, ahead: int = 0, total: int | None = None) -> None:
        self._fraction = fraction
        self._total = total
        self._due = ahead
        self._offloaded_bytes = 0

    def offloads(self, nbytes: int) -> bool:
        """Tell whether to offload the next group, of `nbytes`, and count it."""
        self._due += nbytes
        due = self._due if self._total is None else min(self._due, self._total)
        offloads = self._offloaded_bytes + nbytes <= self._fraction * due
        self._offloaded_bytes += nbytes if offloads else 0
        return offloads


def choose_offloaded(layers: Sequence[Sequence[int]], fraction: float) -> list[bool]:
    """Spread the offloaded groups over the layers, so that the link is used evenly.

    If the first groups were offloaded and the last ones stayed, a link that is fast enough on average would make the
    GPU wait in the first layers. Offloads run a layer ahead of an even pace: the link is busy from the first layer on,
    and done in time.

    Args:
        layers: bytes of the groups that may be offloaded, of each layer in the order of the forward pass.
        fraction: the most to offload of all these bytes.

    Returns:
        Whether each of the groups is offloaded, in their order.
    """
    of_layers = [sum(layer) for layer in layers]
    pace = Pace(fraction, ahead=max(of_layers, default=0), total=sum(of_layers))
    return [pace.offloads(nbytes) for nbytes in chain(*layers)]


def choose_in_first_pass(layers: Sequence[Sequence[int]], fraction: float) -> list[bool]:
    """Decides like `choose_offloaded`, but for the first pass, in which only the groups so far are known."""
    pace = Pace(fraction)
    return [pace.offloads(nbytes) for nbytes in chain(*layers)]


class ScheduledGroup(Protocol):
    """Describes one module's forward pass in one layer, as far as a schedule needs it."""

    name: str
    """The module."""
    key: tuple[str, int]
    """The module, and the number of its groups before this one in the pass."""
    nbytes: int
    """Bytes of storages that no earlier group has saved."""


class Profile:
    """Records the last whole forward pass of a model chunk, and which of its groups are offloaded.

    Args:
        groups: the groups of that pass, in order.
        fraction: the most to offload of the eligible bytes.
        has_margin: whether the last group of each module stays: the backward pass needs it before a copy pays off.
    """

    def __init__(self, groups: Sequence[ScheduledGroup], fraction: float, *, has_margin: bool) -> None:
        margin = {group.name: group.key for group in groups}.values() if has_margin else ()
        self.per_layer = len({group.name for group in groups if group.nbytes})
        """Number of modules that have storages of their own to move."""
        self.offloads: dict[tuple[str, int], bool] = dict.fromkeys(margin, False)
        """By group key, whether it is offloaded; a group without bytes to move has no entry."""
        self.asks: set[tuple[str, int]] = set()
        """Keys of groups at whose commit copies are requested: a request costs host time, so a layer makes only one."""
        layers = [[group for group in layer if group.key not in margin] for layer in _layers(groups)]
        chosen = choose_offloaded([[group.nbytes for group in layer] for layer in layers], fraction)
        of_groups = zip(chain(*layers), chosen, strict=True)
        self.offloads.update((group.key, chosen) for group, chosen in of_groups if group.nbytes)
        pending = [[group.key for group in layer if self.offloads.get(group.key)] for layer in layers]
        self.asks.update(*pending[:1])  # the link is idle at first: the first layer requests at once
        self.asks.update(*(keys[-1:] for keys in pending[1:]))
        of_layers = zip(layers, pending, strict=True)
        kinds = {tuple(name for name, _ in keys) for layer, keys in of_layers if any(group.nbytes for group in layer)}
        self.lead = 1 if len(kinds) <= 1 else 2
        """Layers by which copies to the host may lag, and prefetches run ahead. It is 2 where layers offload different
        modules: the copies of a layer that is offloaded as a whole take longer than its passes, even on a link that
        keeps up with all layers together."""
        self._sizes = _sizes(groups)

    def is_outdated_by(self, groups: Sequence[ScheduledGroup]) -> bool:
        """Tell whether the groups of a pass differ from this profile's; that takes less time than a new profile.

        A short pass does not count: it tells nothing of groups whose storages were below the minimum.
        """
        sizes = _sizes(groups)
        is_short = any(nbytes == 0 and key in self._sizes and self._sizes[key] > 0 for key, nbytes in sizes.items())
        return sizes != self._sizes and not is_short

    def offloaded_modules(self) -> set[str]:
        """Returns the modules with at least one offloaded group."""
        return {name for (name, _), offloads in self.offloads.items() if offloads}


def _sizes(groups: Sequence[ScheduledGroup]) -> dict[tuple[str, int], int]:
    return {group.key: group.nbytes for group in groups}


def _layers(groups: Sequence[ScheduledGroup]) -> list[list[ScheduledGroup]]:
    """Splits groups, in their order, into layers; a layer has at most one group of each name."""
    layers: list[list[ScheduledGroup]] = []
    names: set[str] = set()
    for group in groups:
        if not layers or group.name in names:
            layers.append([])
            names.clear()
        names.add(group.name)
        layers[-1].append(group)
    return layers
