"""The reference policy of a KL penalty: weights in the arena that are swapped into the parameters for a while."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import NoReturn

import torch

from nemo_offload_rl.offload.measurements import Meter, Started
from nemo_offload_rl.offload.model_buffers import Params, estimate_param_bytes, param_host_bytes
from nemo_offload_rl.offload.pinned_arena import PinnedArena
from nemo_offload_rl.offload.residency import Movable, ResidencyError
from nemo_offload_rl.offload.site import Site, Subject
from nemo_offload_rl.offload.transfer import Home, Mover
from nemo_offload_rl.offload.types import Cell, Phase, ShardFacts, Target


def estimate_bytes(facts: ShardFacts) -> int:
    """Bytes of a rank's reference weights, on the host."""
    return estimate_param_bytes(facts) if facts.keeps_reference else 0


def host_bytes(subject: Subject) -> int:
    """What the reference weights will take of the arena."""
    return param_host_bytes(subject) if subject.options.keep_reference else 0


def make(site: Site, made: Mapping[Target, Movable]) -> "ReferenceWeights | None":
    """Keep the weights of now, if they are wanted."""
    if not site.options.keep_reference:
        return None
    params = made[Target.PARAMS]
    assert isinstance(params, Params)
    return ReferenceWeights(params, site.mover, site.arena, site.meter, lambda: site.require(Target.PARAMS))


class ReferenceWeights:
    """The weights a run started from; always on the host.

    Parameters keep their addresses, so that optimizer, DDP buffers and captured graphs do not notice; the policy's own
    weights wait in the params' host memory, so that a swap needs no memory beyond the reference weights' own.

    Args:
        params: on the GPU; what they hold now is the reference.
        mover: copies.
        arena: gives the host memory.
        meter: learns what swaps take.
        require_params: waits for the params, or says that they are elsewhere; see `Residency.require`.
    """

    cells = frozenset({Cell.HOST})
    waits_itself = False
    is_computed_when_read = False
    mapped_bytes = 0

    def __init__(
        self, params: Params, mover: Mover, arena: PinnedArena, meter: Meter, require_params: Callable[[], None]
    ) -> None:
        self._require_params = require_params
        self._params = params
        self._mover = mover
        self._arena = arena
        self._meter = meter
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
        """Compute with the reference weights; the policy's own come back at the end, whatever happens.

        Raises:
            ResidencyError: the parameters are not on the GPU, or some of them have no reference.
        """
        self._require_params()
        if strays := self._params.strays():
            raise ResidencyError(
                f"{strays[0][0]} and {len(strays) - 1} others have got memory of their own since the reference weights "
                "were kept (a changed dtype, or a new buffer), so they have no reference; change them before `attach`."
            )
        self._params.is_lent = True
        swap = self._mover.exchange(self._params.housing.homes, self._homes)
        swap.hold_current_stream()
        self._meter.record_start(Started(Phase.LOGPROB, Target.REFERENCE_WEIGHTS, Cell.HOST, Cell.GPU, swap))
        try:
            yield
        finally:
            back = self._mover.restore(self._params.housing.homes)
            back.hold_current_stream()
            self._params.is_lent = False
            self._meter.record_start(Started(Phase.LOGPROB, Target.PARAMS, Cell.HOST, Cell.GPU, back))

    def start(self, cell: Cell) -> NoReturn:
        """It is where it always is."""
        raise AssertionError(f"reference weights do not move to {cell}")

    def first_name(self, error: Exception) -> str:
        """It has no moves of its own that could fail for memory."""
        raise AssertionError(f"reference weights do not move: {error}")

    def host_view(self, tensor: torch.Tensor) -> None:
        """It has no tensors that anybody else knows."""

    def close(self) -> None:
        """Give the host memory back."""
        for home in self._homes:
            assert home.host is not None
            self._arena.release(home.host)
        self._homes = []
