"""Says whether the policy and a vLLM engine fit on the GPU that they share while both are built."""

from nemo_offload_rl.memory.units import GIB, show_gib
from nemo_offload_rl.plan.generation import POLICY_OVERHEAD_BYTES, EngineMemory, kept_in_refit
from nemo_offload_rl.plan.plan import OffloadPlan
from nemo_offload_rl.residency.table import Phase, Target

# Of the process that compares the model with transformers while rank 0 is built: its context, and two small models.
_MODEL_CHECK_BYTES = GIB
# The GPU's memory over what a whole model of random weights takes there at most, on each rank (`mcore.build`).
_WHOLE_MODELS_PER_GPU = 4


def policy_build_bytes(plan: OffloadPlan, gpu_bytes: int, *, has_random_weights: bool) -> int:
    """Returns the most that one rank takes of its GPU while it is built.

    All of its state is there at the end. It moves into ranges one target after the other, and a target's old memory is
    free behind its move alone.

    Args:
        plan: with the sizes of every pipeline stage.
        gpu_bytes: memory of the smallest GPU.
        has_random_weights: whether the model's weights are made on the GPU, before the rank has gradients.
    """
    most = 0
    for rank in plan.ranks:
        state = rank.gpu_bytes[Phase.TRAIN]
        most = max(most, sum(state.values()) + max(state.values()))
        if has_random_weights:
            most = max(most, state[Target.PARAMS] + gpu_bytes // _WHOLE_MODELS_PER_GPU)
    return most + POLICY_OVERHEAD_BYTES + _MODEL_CHECK_BYTES


def why_not_at_once(plan: OffloadPlan, engine: EngineMemory, gpu_bytes: int, *, has_random_weights: bool) -> str | None:
    """Returns the reason for which the policy has to wait until the engine is built; None where there is none.

    Args:
        plan: with the sizes of every pipeline stage.
        engine: what it takes; its KV cache is given in bytes.
        gpu_bytes: memory of the smallest GPU.
        has_random_weights: as `policy_build_bytes`.
    """
    policy = policy_build_bytes(plan, gpu_bytes, has_random_weights=has_random_weights)
    awake = engine.awake_bytes(gpu_bytes)
    both = policy + awake
    if both > gpu_bytes:
        return f"both would take up to {show_gib(both)} of the GPU's {show_gib(gpu_bytes)} GiB"
    # The engine first sleeps behind its first generation: vLLM asserts that then not less of the GPU is free than
    # before, which a policy that is being built could make untrue. So the first refit has all of it beside.
    first_refit = kept_in_refit(plan, engine) + engine.refit_bytes + awake
    if first_refit > gpu_bytes:
        return (
            f"the first refit, before which vLLM would not sleep, would take up to {show_gib(first_refit)} of the "
            f"GPU's {show_gib(gpu_bytes)} GiB"
        )
    return None
