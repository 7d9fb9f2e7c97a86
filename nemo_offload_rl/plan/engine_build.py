"""Decides whether the policy and a vLLM engine fit on the GPU that they share while both are built."""

from nemo_offload_rl.memory.units import GIB, show_gib
from nemo_offload_rl.plan.generation import POLICY_OVERHEAD_BYTES, EngineMemory, kept_in_refit
from nemo_offload_rl.plan.plan import OffloadPlan
from nemo_offload_rl.residency.table import Phase, Target

# GPU memory of the process that compares the model with transformers while rank 0 is built: a CUDA context and two
# small models.
_MODEL_CHECK_BYTES = GIB
# A whole model of random weights takes at most the GPU's memory divided by this, on each rank (`mcore.build`).
_WHOLE_MODELS_PER_GPU = 4


def policy_build_bytes(plan: OffloadPlan, gpu_bytes: int, *, has_random_weights: bool) -> int:
    """Returns the peak GPU memory of one rank while it is built.

    At the end, all of its training state is on the GPU. The rank moves the state into flat buffers, one target after
    the other, and frees a target's old memory only after that target has moved.

    Args:
        plan: the offload plan, with the sizes of every pipeline stage.
        gpu_bytes: memory of the smallest GPU.
        has_random_weights: whether the whole model is initialised with random weights on the GPU, before the rank
            allocates gradients.
    """
    most = 0
    for rank in plan.ranks:
        state = rank.gpu_bytes[Phase.TRAIN]
        most = max(most, sum(state.values()) + max(state.values()))
        if has_random_weights:
            most = max(most, state[Target.PARAMS] + gpu_bytes // _WHOLE_MODELS_PER_GPU)
    return most + POLICY_OVERHEAD_BYTES + _MODEL_CHECK_BYTES


def why_not_at_once(plan: OffloadPlan, engine: EngineMemory, gpu_bytes: int, *, has_random_weights: bool) -> str | None:
    """Returns why the policy has to wait until the engine is built; None if both can be built at the same time.

    Args:
        plan: the offload plan, with the sizes of every pipeline stage.
        engine: the memory that the engine takes; its KV cache is given in bytes.
        gpu_bytes: memory of the smallest GPU.
        has_random_weights: as in `policy_build_bytes`.
    """
    policy = policy_build_bytes(plan, gpu_bytes, has_random_weights=has_random_weights)
    awake = engine.awake_bytes(gpu_bytes)
    both = policy + awake
    if both > gpu_bytes:
        return f"both would take up to {show_gib(both)} of the GPU's {show_gib(gpu_bytes)} GiB"
    # The engine sleeps for the first time after its first generation: vLLM's sleep() asserts that it does not lower the
    # GPU's free memory, which can fail while a policy is being built. So all of the engine is on the GPU in the first
    # refit.
    first_refit = kept_in_refit(plan, engine) + engine.refit_bytes + awake
    if first_refit > gpu_bytes:
        return (
            f"the first refit, which runs before vLLM first sleeps, would take up to {show_gib(first_refit)} of the "
            f"GPU's {show_gib(gpu_bytes)} GiB"
        )
    return None
