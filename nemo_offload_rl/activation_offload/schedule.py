"""Which groups of activations leave where a fraction of them is to; the planner and the manager ask the same."""

from collections.abc import Sequence
from itertools import chain


class Pace:
    """Decides for each group, in the order of the forward pass, whether it is offloaded; offloads are spread evenly.

    Args:
        fraction: of their bytes that is offloaded, at most.
        ahead: bytes by which offloads may be ahead of the groups so far; for a pass whose groups are known.
        total: of all groups; None where they are not known.
    """

    def __init__(self, fraction: float, ahead: int = 0, total: int | None = None) -> None:
        self._fraction = fraction
        self._total = total
        self._due = ahead
        self._left = 0

    def leaves(self, nbytes: int) -> bool:
        """Whether the next group does, if nothing else makes it stay."""
        self._due += nbytes
        due = self._due if self._total is None else min(self._due, self._total)
        leaves = self._left + nbytes <= self._fraction * due
        self._left += nbytes if leaves else 0
        return leaves


def which_leave(layers: Sequence[Sequence[int]], fraction: float) -> list[bool]:
    """Spread the offloaded groups over the layers, so that the link is used evenly.

    With the first groups pending and the last ones staying, a link that is fast enough on average makes the GPU wait in
    the first layers. Offloads run a layer ahead of an even pace: the link is busy from the first layer on, and
    done in time.

    Args:
        layers: bytes of the groups that may leave, of each layer in the order of the forward pass.
        fraction: of all these bytes, at most.

    Returns:
        Whether each of the groups leaves, in their order.
    """
    of_layers = [sum(layer) for layer in layers]
    pace = Pace(fraction, ahead=max(of_layers, default=0), total=sum(of_layers))
    return [pace.leaves(nbytes) for nbytes in chain(*layers)]


def which_leave_unknown(layers: Sequence[Sequence[int]], fraction: float) -> list[bool]:
    """As `which_leave`, in the first pass, where each group is decided on by those before it."""
    pace = Pace(fraction)
    return [pace.leaves(nbytes) for nbytes in chain(*layers)]
