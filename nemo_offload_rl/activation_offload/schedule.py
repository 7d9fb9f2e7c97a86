"""Decides which groups of activations are offloaded; the planner and the manager ask the same, without torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol


@dataclass(frozen=True)
class ActivationOptions:
    """States what a recipe offloads, and on the worker what one rank of its pipeline does.

    Attributes:
        modules: as in `policy.megatron_cfg.offload_modules`.
        fraction: of a micro-batch's eligible bytes, from 0 to 1; what stays is spread over the layers.
        min_elements: storages with fewer elements stay on the GPU.
        host_memory_limit_bytes: host memory of one rank for activations; None for what they need.
        strict: a module that does nothing is an error.
        resident_bytes: stay on this rank's GPU at any time (`delta_offload_bytes_across_pp_ranks` times its pipeline
            rank).
        max_inflight: groups whose GPU memory may wait for its copy before the compute stream does; None for as many as
            a layer has, or two where layers differ (`Profile.lead`): fewer would make it wait for copies that are fast
            enough, more would only take memory. With a number each group makes a request of its own, so that each can
            be waited for.
        margin_stage: the model chunk whose backward pass follows its forward pass at once, on the pipeline's last rank;
            None elsewhere. There the last group of each module stays.
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
    """Decides for each group, in the order of the forward pass, whether it is offloaded; offloads are spread evenly.

    Args:
        fraction: of their bytes that is offloaded, at most.
        ahead: bytes by which offloads may be ahead of the groups so far; for a pass whose groups are known.
        total: bytes of all groups; None where they are not known.
    """

    def __init__(self, fraction: float, ahead: int = 0, total: int | None = None) -> None:
        self._fraction = fraction
        self._total = total
        self._due = ahead
        self._offloaded_bytes = 0

    def offloads(self, nbytes: int) -> bool:
        """Tell whether the next group is offloaded, if nothing else makes it stay."""
        self._due += nbytes
        due = self._due if self._total is None else min(self._due, self._total)
        offloads = self._offloaded_bytes + nbytes <= self._fraction * due
        self._offloaded_bytes += nbytes if offloads else 0
        return offloads


def choose_offloaded(layers: Sequence[Sequence[int]], fraction: float) -> list[bool]:
    """Spread the offloaded groups over the layers, so that the link is used evenly.

    With the first groups pending and the last ones staying, a link that is fast enough on average makes the GPU wait in
    the first layers. Offloads run a layer ahead of an even pace: the link is busy from the first layer on, and
    done in time.

    Args:
        layers: bytes of the groups that may be offloaded, of each layer in the order of the forward pass.
        fraction: of all these bytes, at most.

    Returns:
        Whether each of the groups is offloaded, in their order.
    """
    of_layers = [sum(layer) for layer in layers]
    pace = Pace(fraction, ahead=max(of_layers, default=0), total=sum(of_layers))
    return [pace.offloads(nbytes) for nbytes in chain(*layers)]


def choose_in_first_pass(layers: Sequence[Sequence[int]], fraction: float) -> list[bool]:
    """Decides as `choose_offloaded`, in the first pass, where each group depends on those before it."""
    pace = Pace(fraction)
    return [pace.offloads(nbytes) for nbytes in chain(*layers)]


class ScheduledGroup(Protocol):
    """Describes one module's forward pass in one layer, as far as a schedule needs it."""

    name: str
    """The module."""
    key: tuple[str, int]
    """The module, and how many of its groups come before this one in the pass."""
    nbytes: int
    """Of storages that no group before it has saved."""


class Profile:
    """Records the last whole forward pass of a model chunk, and which of its groups are offloaded.

    Args:
        groups: of that pass, in order.
        fraction: of the eligible bytes that are offloaded, at most.
        has_margin: the last group of each module stays, since the backward pass needs it before a copy could pay off.
    """

    def __init__(self, groups: Sequence[ScheduledGroup], fraction: float, *, has_margin: bool) -> None:
        margin = {group.name: group.key for group in groups}.values() if has_margin else ()
        self.per_layer = len({group.name for group in groups if group.nbytes})
        """Modules that have storages of their own to move."""
        self.offloads: dict[tuple[str, int], bool] = dict.fromkeys(margin, False)
        """By group key, whether it is offloaded; a group without bytes to move has no entry."""
        self.asks: set[tuple[str, int]] = set()
        """Keys of groups at whose end copies are asked for: the host pays for each request, so a layer makes one."""
        layers = [[group for group in layer if group.key not in margin] for layer in _layers(groups)]
        chosen = choose_offloaded([[group.nbytes for group in layer] for layer in layers], fraction)
        of_groups = zip(chain(*layers), chosen, strict=True)
        self.offloads.update((group.key, chosen) for group, chosen in of_groups if group.nbytes)
        pending = [[group.key for group in layer if self.offloads.get(group.key)] for layer in layers]
        self.asks.update(*pending[:1])  # the link is idle until then, so that the first layer asks at once
        self.asks.update(*(keys[-1:] for keys in pending[1:]))
        kinds = {tuple(name for name, _ in keys) for layer, keys in zip(layers, pending, strict=True) if layer}
        self.lead = 1 if len(kinds) <= 1 else 2
        """Layers that copies out may lag behind, and are asked back ahead. Where other layers leave whole than those
        before and behind them, a whole one's copies take longer than its passes, on a link that keeps up with all."""
        self._sizes = _sizes(groups)

    def is_outdated_by(self, groups: Sequence[ScheduledGroup]) -> bool:
        """Tell whether a pass of these groups, and of as many, differs; that takes less than making a profile anew.

        A short pass does not: of groups whose storages were below the minimum it knows nothing.
        """
        sizes = _sizes(groups)
        is_short = any(nbytes == 0 and key in self._sizes and self._sizes[key] > 0 for key, nbytes in sizes.items())
        return sizes != self._sizes and not is_short

    def offloaded_modules(self) -> set[str]:
        """Returns the modules of which some group is offloaded."""
        return {name for (name, _), offloads in self.offloads.items() if offloads}


def _sizes(groups: Sequence[ScheduledGroup]) -> dict[tuple[str, int], int]:
    return {group.key: group.nbytes for group in groups}


def _layers(groups: Sequence[ScheduledGroup]) -> list[list[ScheduledGroup]]:
    """Cuts groups, in their order, into layers; a layer has one of each name at most."""
    layers: list[list[ScheduledGroup]] = []
    names: set[str] = set()
    for group in groups:
        if not layers or group.name in names:
            layers.append([])
            names.clear()
        names.add(group.name)
        layers[-1].append(group)
    return layers
