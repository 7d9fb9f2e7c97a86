"""Which groups of activations leave where a fraction of them is to; the planner and the manager ask the same."""

from collections.abc import Sequence
from itertools import chain


def which_leave(layers: Sequence[Sequence[int]], fraction: float) -> list[bool]:
    """Spread what leaves over the layers, so that the link is used evenly.

    With the first groups leaving and the last ones staying, a link that is fast enough on average makes the GPU wait in
    the first layers. What leaves does so a layer ahead of an even pace: the link is busy from the first layer on, and
    done in time.

    Args:
        layers: bytes of the groups that may leave, of each layer in the order of the forward pass.
        fraction: of all these bytes, at most.

    Returns:
        Whether each of the groups leaves, in their order.
    """
    of_layers = [sum(layer) for layer in layers]
    total, due, left = sum(of_layers), max(of_layers, default=0), 0
    leaves: list[bool] = []
    for nbytes in chain(*layers):
        due += nbytes
        leaves.append(left + nbytes <= fraction * min(due, total))
        left += nbytes if leaves[-1] else 0
    return leaves
