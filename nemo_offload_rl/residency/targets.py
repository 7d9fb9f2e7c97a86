"""Lists all targets with the functions that make them; see docs/add-a-target.md."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from nemo_offload_rl.residency import optimizer_state, params_and_grads, reference_weights
from nemo_offload_rl.residency.context import TargetContext
from nemo_offload_rl.residency.streamed import target as streamed_state
from nemo_offload_rl.residency.table import ShardFacts, Target
from nemo_offload_rl.residency.target import OffloadTarget


@dataclass(frozen=True)
class TargetKind:
    """Bundles the functions that a target's module provides.

    Attributes:
        estimate_bytes: returns its size on one rank from `ShardFacts`; the planner adds the padding of buffers.
        host_bytes: returns the host memory that `make` will take.
        make: builds the target, after those above it in the table; returns None if there is nothing to move, such as
            gradients of a model that is only evaluated.
    """

    estimate_bytes: Callable[[ShardFacts], int]
    host_bytes: Callable[[TargetContext], int]
    make: Callable[[TargetContext], OffloadTarget | None]


def _optimizer_host_bytes(context: TargetContext) -> int:
    kind = streamed_state if context.streams_optimizer_state else optimizer_state
    return kind.host_bytes(context)


def _make_optimizer_state(context: TargetContext) -> OffloadTarget | None:
    return streamed_state.make(context) if context.streams_optimizer_state else optimizer_state.make(context)


TARGETS: Mapping[Target, TargetKind] = {
    Target.PARAMS: TargetKind(
        params_and_grads.estimate_param_bytes, params_and_grads.param_host_bytes, params_and_grads.make_params
    ),
    Target.GRADS: TargetKind(
        params_and_grads.estimate_grad_bytes, params_and_grads.grad_host_bytes, params_and_grads.make_grads
    ),
    Target.OPTIMIZER_STATE: TargetKind(optimizer_state.estimate_bytes, _optimizer_host_bytes, _make_optimizer_state),
    Target.REFERENCE_WEIGHTS: TargetKind(
        reference_weights.estimate_bytes, reference_weights.host_bytes, reference_weights.make
    ),
}
"""All targets, in the order in which they are made."""
