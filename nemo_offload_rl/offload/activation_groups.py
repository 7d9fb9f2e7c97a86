"""Groups of activations: one module's forward pass in one layer; what a whole pass looked like; what is on its way."""

import weakref
from collections import deque
from collections.abc import Sequence
from itertools import accumulate

import torch

from nemo_offload_rl.offload.activation_copies import CopyEngine, Ticket
from nemo_offload_rl.offload.parcel import Parcel, check_version

Saved = tuple[torch.Tensor, int, Parcel]
"""A tensor that autograd saved, its version then, and its storage."""


class Group:
    """One module's forward pass in one layer."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.index = -1
        self.parcels: list[weakref.ref[Parcel]] = []
        self.saved: list[Saved] = []
        """Tensors with their versions, until the copies out of them are asked for."""
        self.nbytes = 0


class Profile:
    """What the last whole forward pass of a model chunk looked like.

    Args:
        groups: of that pass, in order.
        has_margin: the last group of each module stays, since the backward pass needs it before a copy could pay off.
    """

    def __init__(self, groups: Sequence[Group], *, has_margin: bool) -> None:
        last = {group.name: group.index for group in groups}
        self.num_groups = len(groups)
        self.per_layer = len({group.name for group in groups if group.nbytes})
        """Modules that have storages of their own to move."""
        self.margin = frozenset(last.values()) if has_margin else frozenset()
        eligible = [0 if group.index in self.margin else group.nbytes for group in groups]
        total = max(1, sum(eligible))
        self.shares = [part / total for part in accumulate(eligible)]
        """Of the bytes that may leave: in the groups up to and with each."""


class Stash:
    """GPU memory that copies still read."""

    def __init__(self, copies: CopyEngine) -> None:
        self._copies = copies
        self._held: deque[tuple[Group, Ticket, list[Saved]]] = deque()

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, group: Group, ticket: Ticket, saved: list[Saved]) -> None:
        """Keep what a group saved until the copies of `ticket` have been waited for."""
        self._held.append((group, ticket, saved))

    def release(self, keep: int) -> None:
        """Let the compute stream wait for all groups but the `keep` youngest, and drop what those held."""
        while len(self._held) > keep:
            group, ticket, saved = self._held.popleft()
            self._copies.wait(ticket)
            for tensor, version, parcel in saved:
                check_version(tensor, version, group.name)
                parcel.storage = None
