"""The table of targets; see docs/add-a-target.md."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from nemo_offload_rl.offload import model_buffers, optimizer_state, reference_weights
from nemo_offload_rl.offload.residency import Movable
from nemo_offload_rl.offload.site import Site, Subject
from nemo_offload_rl.offload.types import ShardFacts, Target


@dataclass(frozen=True)
class TargetKind:
    """What a target's file offers.

    Attributes:
        estimate_bytes: its size on one rank, from facts alone; the planner adds the padding of nobody's buffers.
        host_bytes: what `make` will take of the arena.
        make: builds the mechanism, given those of the targets above it in the table; None where there is nothing to
            move, such as gradients of a model that is only evaluated.
    """

    estimate_bytes: Callable[[ShardFacts], int]
    host_bytes: Callable[[Subject], int]
    make: Callable[[Site, Mapping[Target, Movable]], Movable | None]


TARGETS: Mapping[Target, TargetKind] = {
    Target.PARAMS: TargetKind(
        model_buffers.estimate_param_bytes, model_buffers.param_host_bytes, model_buffers.make_params
    ),
    Target.GRADS: TargetKind(
        model_buffers.estimate_grad_bytes, model_buffers.grad_host_bytes, model_buffers.make_grads
    ),
    Target.OPTIMIZER_STATE: TargetKind(
        optimizer_state.estimate_bytes, optimizer_state.host_bytes, optimizer_state.make
    ),
    Target.REFERENCE_WEIGHTS: TargetKind(
        reference_weights.estimate_bytes, reference_weights.host_bytes, reference_weights.make
    ),
}
"""In the order in which they are made."""
