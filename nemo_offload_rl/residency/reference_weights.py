"""Keeps the weights of a KL penalty's reference policy in host memory, and swaps them into the parameters."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

import torch

from nemo_offload_rl.memory.pinned import PinnedArena
from nemo_offload_rl.residency.context import TargetContext
from nemo_offload_rl.residency.metrics import Meter, Started
from nemo_offload_rl.residency.params_and_grads import Params, estimate_param_bytes, param_host_bytes
from nemo_offload_rl.residency.table import Phase, Placement, ShardFacts, Target
from nemo_offload_rl.residency.target import ResidencyError
from nemo_offload_rl.residency.transfer import BackedRange, Chunk, Mover

_LOST = (
    "The policy's weights are lost: copying them back after a swap with the reference weights failed, so the GPU "
    "holds some or all of the reference weights instead. This process cannot continue; restart the worker from the "
    "last checkpoint."
)


def estimate_bytes(facts: ShardFacts) -> int:
    """Returns the host bytes of a rank's reference weights."""
    return estimate_param_bytes(facts) if facts.has_reference else 0


def host_bytes(context: TargetContext) -> int:
    """Returns the bytes that the reference weights will take in the arena."""
    return param_host_bytes(context) if context.options.with_reference else 0


def make(context: TargetContext) -> "ReferenceWeights | None":
    """Keep a copy of the present weights; None unless `Options.with_reference` is set."""
    if not context.options.with_reference:
        return None
    params = context.targets[Target.PARAMS]
    assert isinstance(params, Params)

    def require_params() -> None:
        context.residency.require(Target.PARAMS)

    return ReferenceWeights(context.model, params, context.mover, context.arena, context.meter, require_params)


class ReferenceWeights:
    """Keeps the weights that a run started from on the host, and swaps them into the parameters temporarily.

    Parameters keep their addresses, so that optimizer, DDP buffers and captured graphs are not affected. Meanwhile the
    policy's own weights are in the params' host memory, so that a swap needs no memory beyond the reference weights'
    own.

    If a swap fails, the policy's weights are put back; if that fails too, every later use of them raises.

    Args:
        model: the model's chunks, which they belong to.
        params: the params, on the GPU; a copy of their contents becomes the reference.
        mover: copies the weights.
        arena: provides the host memory.
        meter: records how long swaps take.
        require_params: waits for the params, or raises if they are not on the GPU; see `Residency.require`.
    """

    placements = frozenset({Placement.HOST})
    lazy_wait = False
    needs_gpu_to_save = False
    mapped_bytes = 0

    def __init__(
        self,
        model: Sequence[torch.nn.Module],
        params: Params,
        mover: Mover,
        arena: PinnedArena,
        meter: Meter,
        require_params: Callable[[], None],
    ) -> None:
        self._require_params = require_params
        self._params = params
        self._mover = mover
        self._arena = arena
        self._meter = meter
        self._backed_ranges = [
            BackedRange(backed.range, arena.allocate(Target.REFERENCE_WEIGHTS, backed.range.nbytes))
            for backed in params.flat_buffer.backed_ranges
        ]
        mover.save(self._backed_ranges)
        self._are_lost = False
        # These two cover every use of the weights: computation goes through the model's forward pass, and any other use
        # enters a phase or waits for a move.
        mover.checks.append(self._check)
        self._hooks = [chunk.register_forward_pre_hook(self._check) for chunk in model]

    @property
    def nbytes(self) -> int:
        """Returns the bytes of host memory."""
        return sum(backed.range.nbytes for backed in self._backed_ranges)

    @contextlib.contextmanager
    @torch.no_grad()
    def swapped_in(self) -> Iterator[None]:
        """Swap the reference weights in for the context; the policy's own come back at its end, also after an error.

        Raises:
            ResidencyError: the parameters are not on the GPU, some of them have no reference, or the reference weights
                are swapped in already; or the copy that brings the policy's own weights back failed twice: they are
                lost.
        """
        self._check()
        self._require_params()
        if self._params.is_swapped_out:  # a second swap would overwrite the policy's own weights
            raise ResidencyError(
                "The reference weights are already swapped in; exit the `swapped_in` context before entering it again."
            )
        if without := self._without_reference():
            raise ResidencyError(
                f"{without[0]} and {len(without) - 1} others were reallocated after the reference weights were "
                "copied (a changed dtype, or a new buffer), so they have no reference; change them before `attach`."
            )
        changed: list[Chunk] = []
        try:
            try:
                self._params.is_swapped_out = True
                swap = self._mover.exchange(self._params.flat_buffer.backed_ranges, self._backed_ranges, changed)
                swap.wait_on_current_stream()
                self._meter.record_start(
                    Started(Phase.LOGPROB, Target.REFERENCE_WEIGHTS, Placement.HOST, Placement.GPU, swap)
                )
                yield
            finally:
                self._put_back(changed)
        finally:  # the host still has the weights that a failure or a Ctrl-C kept from coming back
            self._put_back_or_lose(changed)

    def _without_reference(self) -> list[str]:
        """Returns the names of parameters and buffers that got new memory since the reference weights were copied."""
        copied = {id(backed.range) for backed in self._backed_ranges}
        moved_in = [one.name for one in self._params.flat_buffer.slices if id(one.backed.range) not in copied]
        return moved_in + [name for name, _ in self._params.strays()]

    def _put_back(self, changed: list[Chunk]) -> None:
        """Copies the policy's own weights back into the changed chunks, and empties the list of these."""
        self._are_lost = bool(changed)  # until they are back: another Ctrl-C may interrupt this
        self._params.is_swapped_out = False  # or the error of `Params.start` would say to leave `swapped_in`
        if not changed:
            return
        back = self._mover.put_back(changed)
        back.wait_on_current_stream()
        self._are_lost = False
        changed.clear()
        self._meter.record_start(Started(Phase.LOGPROB, Target.PARAMS, Placement.HOST, Placement.GPU, back))

    def _put_back_or_lose(self, changed: list[Chunk]) -> None:
        try:
            self._put_back(changed)
        except Exception as error:
            raise ResidencyError(_LOST) from error

    def _check(self, *_: object) -> None:
        if self._are_lost:
            raise ResidencyError(_LOST)

    def start(self, placement: Placement) -> NoReturn:
        """Moves nothing: the reference weights stay in host memory; only their swap moves data."""
        raise AssertionError(f"reference weights do not move to {placement}")

    def name_for_error(self, error: Exception) -> str:
        """Raises AssertionError: the reference weights have no moves that could fail for memory."""
        raise AssertionError(f"reference weights do not move: {error}")

    def host_view(self, tensor: torch.Tensor) -> None:
        """Returns None: other code has no tensors of the reference weights."""

    def close(self) -> None:
        """Free the host memory, and remove the hooks from the model."""
        for hook in self._hooks:
            hook.remove()
        for backed in self._backed_ranges:
            assert backed.host is not None
            self._arena.release(backed.host)
        self._backed_ranges = []
