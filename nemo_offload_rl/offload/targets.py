"""The table of targets: what each takes of a rank's memory."""

from collections.abc import Callable, Mapping

from nemo_offload_rl.offload import model_buffers, optimizer_state, reference_weights
from nemo_offload_rl.offload.types import ShardFacts, Target

ESTIMATES: Mapping[Target, Callable[[ShardFacts], int]] = {
    Target.PARAMS: model_buffers.estimate_param_bytes,
    Target.GRADS: model_buffers.estimate_grad_bytes,
    Target.OPTIMIZER_STATE: optimizer_state.estimate_bytes,
    Target.REFERENCE_WEIGHTS: reference_weights.estimate_bytes,
}
"""Bytes on one rank, before the padding of megatron-core's buffers and of our ranges."""
