"""Defines the residency table (phases, targets, placements), and the sizes that determine those of a rank's targets."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Phase(StrEnum):
    """Names a phase of a colocated worker: training, log-probs, refit or generation."""

    TRAIN = "train"
    LOGPROB = "logprob"
    REFIT = "refit"
    GENERATE = "generate"


class Target(StrEnum):
    """Names a kind of state that has a placement in every phase."""

    PARAMS = "params"
    GRADS = "grads"
    OPTIMIZER_STATE = "optimizer_state"
    """Moments and fp32 masters."""
    REFERENCE_WEIGHTS = "reference_weights"
    """Of the KL penalty's reference policy; they are swapped into the parameters to compute its log-probs."""


class Placement(StrEnum):
    """Says where a target is in a phase."""

    GPU = "gpu"
    HOST = "host"
    STREAMED = "streamed"
    """On the host; a step passes it through a window of GPU memory, chunk by chunk."""
    DROPPED = "dropped"
    """Its memory is freed and its contents are lost; it comes back as zeros."""
    UNCHANGED = "keep"
    """It stays where it is when the phase begins."""


Table = Mapping[Phase, Mapping[Target, Placement]]

DEFAULT_TABLE: Mapping[Phase, dict[Target, Placement]] = {
    Phase.TRAIN: {
        Target.PARAMS: Placement.GPU,
        Target.GRADS: Placement.GPU,
        Target.OPTIMIZER_STATE: Placement.GPU,
        Target.REFERENCE_WEIGHTS: Placement.HOST,
    },
    Phase.LOGPROB: {
        Target.PARAMS: Placement.GPU,
        Target.GRADS: Placement.DROPPED,
        Target.OPTIMIZER_STATE: Placement.UNCHANGED,
        Target.REFERENCE_WEIGHTS: Placement.HOST,
    },
    Phase.REFIT: {
        Target.PARAMS: Placement.GPU,
        Target.GRADS: Placement.DROPPED,
        Target.OPTIMIZER_STATE: Placement.HOST,
        Target.REFERENCE_WEIGHTS: Placement.HOST,
    },
    Phase.GENERATE: {
        Target.PARAMS: Placement.HOST,
        Target.GRADS: Placement.DROPPED,
        Target.OPTIMIZER_STATE: Placement.HOST,
        Target.REFERENCE_WEIGHTS: Placement.HOST,
    },
}

DEDICATED_TABLE: Mapping[Phase, dict[Target, Placement]] = {
    **DEFAULT_TABLE,
    **{
        phase: {
            Target.PARAMS: Placement.GPU,
            Target.GRADS: Placement.UNCHANGED,
            Target.OPTIMIZER_STATE: Placement.UNCHANGED,
            Target.REFERENCE_WEIGHTS: Placement.HOST,
        }
        for phase in (Phase.REFIT, Phase.GENERATE)
    },
}
"""The table for generation on GPUs of its own, where no state of the policy needs to make room."""

STREAMED_TABLE: Table = {
    phase: cells | ({Target.OPTIMIZER_STATE: Placement.STREAMED} if phase is Phase.TRAIN else {})
    for phase, cells in DEFAULT_TABLE.items()
}
"""`DEFAULT_TABLE` with streamed optimizer state, which is never on the GPU as a whole."""


@dataclass(frozen=True)
class ShardFacts:
    """Holds the sizes of one rank's model shard; counts are in elements, sizes in bytes an element."""

    num_params: int
    """Trainable parameters of this rank."""
    num_frozen_params: int
    param_size: int
    grad_size: int
    """In the gradient buffer: 4, or 2 where gradients are kept in bf16."""
    num_optimizer_params: int
    """Elements whose state this rank's optimizer keeps: its shard."""
    optimizer_size: int
    """Bytes of an element's optimizer state that move: 12 with fp32 masters, 10 with the precision-aware optimizer, 8
    for an fp32 model, whose masters are the parameters themselves."""
    has_reference: bool
    """Whether reference weights are kept for a KL penalty."""
    num_cpu_optimizer_params: int = 0
    """The most of these elements that the CPU optimizer steps."""
    cpu_optimizer_gpu_size: int = 0
    """Bytes of the optimizer state of such an element that are on the GPU nevertheless, and move: 4 where megatron-core
    has fp32 masters of its own, else 0."""
    local_grad_size: int = 0
    """Beside the gradient buffer: 4 where gradients are accumulated in fp32 and reduced in another type, else 0."""
