"""The reference policy of a KL penalty: weights in the arena that are swapped into the parameters for a while."""

import contextlib
from collections.abc import Iterator

import torch

from nemo_offload_rl.offload.model_buffers import Params, estimate_param_bytes
from nemo_offload_rl.offload.pinned_arena import PinnedArena
from nemo_offload_rl.offload.transfer import Home, Mover
from nemo_offload_rl.offload.types import ShardFacts, Target


def estimate_bytes(facts: ShardFacts) -> int:
    """Bytes of a rank's reference weights, on the host."""
    return estimate_param_bytes(facts) if facts.keeps_reference else 0


class ReferenceWeights:
    """The weights a run started from.

    Parameters keep their addresses, so that optimizer, DDP buffers and captured graphs do not notice; the policy's own
    weights wait in the params' host memory, so that a swap needs no memory beyond the reference weights' own.

    Args:
        params: on the GPU; what they hold now is the reference.
        mover: copies.
        arena: gives the host memory.
    """

    def __init__(self, params: Params, mover: Mover, arena: PinnedArena) -> None:
        self._params = params
        self._mover = mover
        self._arena = arena
        self._homes = [
            Home(home.range, arena.allocate(Target.REFERENCE_WEIGHTS, home.range.nbytes))
            for home in params.housing.homes
        ]
        mover.save(self._homes)

    @property
    def nbytes(self) -> int:
        """Of host memory."""
        return sum(home.range.nbytes for home in self._homes)

    @contextlib.contextmanager
    @torch.no_grad()
    def swapped_in(self) -> Iterator[None]:
        """Compute with the reference weights; the policy's own come back at the end, whatever happens."""
        self._mover.exchange(self._params.housing.homes, self._homes)
        try:
            yield
        finally:
            self._mover.restore(self._params.housing.homes)

    def close(self) -> None:
        """Give the host memory back."""
        for home in self._homes:
            assert home.host is not None
            self._arena.release(home.host)
        self._homes = []
