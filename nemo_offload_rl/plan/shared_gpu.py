"""Computes what the policy and a vLLM engine take of a GPU that they share, and the policy alone in each verb."""

from collections.abc import Iterator

from nemo_offload_rl.config.schema import MasterConfig
from nemo_offload_rl.memory.units import GIB, show_gib
from nemo_offload_rl.plan.generation import (
    POLICY_OVERHEAD_BYTES,
    EngineMemory,
    engine_bytes_beside_policy,
    kept_in_refit,
)
from nemo_offload_rl.plan.plan import OffloadPlan, RankPlan
from nemo_offload_rl.plan.planner import PlannedRun, Planner
from nemo_offload_rl.plan.row_tokens import MARGIN, logprob_bytes, training_bytes
from nemo_offload_rl.residency.table import Phase, Target

# GPU memory of the process that compares the model with transformers while rank 0 is built: a CUDA context and two
# small models.
_MODEL_CHECK_BYTES = GIB


def policy_build_bytes(plan: OffloadPlan) -> int:
    """Returns the peak GPU memory of one rank while it is built.

    At the end, all of its training state is on the GPU. The rank moves the state into flat buffers, one target after
    the other, and frees a target's old memory only after that target has moved.

    Args:
        plan: the offload plan, with the sizes of every pipeline stage.
    """
    states = [rank.gpu_bytes[Phase.TRAIN].values() for rank in plan.ranks]
    most = max(sum(state) + max(state) for state in states)
    return most + POLICY_OVERHEAD_BYTES + _MODEL_CHECK_BYTES


def why_not_at_once(run: PlannedRun, gpu_bytes: int) -> str | None:
    """Returns why the policy has to wait until the engine is built; None if both can be built at the same time.

    Args:
        run: the plan of a recipe with vLLM, whose KV cache is given in bytes.
        gpu_bytes: memory of the smallest GPU.
    """
    plan, engine = run.plan, run.engine
    assert engine is not None, "the recipe has vLLM"
    policy = policy_build_bytes(plan)
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


def phase_bytes(config: MasterConfig, planner: Planner, run: PlannedRun, gpu_bytes: int) -> dict[Phase, int]:
    """Returns for each phase the GPU memory of the rank that takes most.

    Passes count with the margin that `train_mb_tokens: auto` uses. An awake vLLM takes its share of the GPU; a
    sleeping one takes its CUDA context and graphs.

    Args:
        config: as in `training_bytes`.
        planner: as in `training_bytes`.
        run: the plan of the recipe, which has vLLM.
        gpu_bytes: memory of the smallest GPU.
    """
    assert run.engine is not None, "the recipe has vLLM"
    beside = engine_bytes_beside_policy(config["policy"], run.engine, gpu_bytes)
    passes = zip(run.plan.ranks, logprob_bytes(config, planner), training_bytes(config, planner), strict=True)
    stages = [
        _stage_bytes(rank, run.engine, beside, int(MARGIN * forward), int(MARGIN * training), gpu_bytes)
        for rank, forward, training in passes
    ]
    return {phase: max(of_stage[phase] for of_stage in stages) for phase in Phase}


def _stage_bytes(
    rank: RankPlan, engine: EngineMemory, beside: int, forward: int, training: int, gpu_bytes: int
) -> dict[Phase, int]:
    process = POLICY_OVERHEAD_BYTES + engine.refit_graph_bytes
    held = {phase: sum(rank.gpu_bytes[phase].values()) + process for phase in Phase}
    awake = held[Phase.GENERATE] + int(engine.share_of(gpu_bytes) * gpu_bytes)
    # Optimizer state that is offloaded at the end of training is copied during refit and generation, if there is room.
    leaving = rank.gpu_bytes[Phase.TRAIN][Target.OPTIMIZER_STATE] - rank.gpu_bytes[Phase.REFIT][Target.OPTIMIZER_STATE]
    cached = _cached_bytes(held[Phase.TRAIN] + beside, training, engine, gpu_bytes)
    if engine.stays_awake:
        refit = with_cache = held[Phase.REFIT] + beside + engine.refit_bytes + leaving + cached
    else:
        refit = held[Phase.REFIT] + beside + engine.weights_bytes + engine.refit_bytes
        # The KV cache is mapped after the weights, also while optimizer state is still being copied.
        with_cache = refit + leaving + cached + engine.kv_cache_bytes(gpu_bytes)
    generation = awake + leaving + cached
    return {
        # These passes may use torch's cache.
        Phase.LOGPROB: rank.logprob_state_bytes + process + beside + max(forward, cached),
        # Activations are freed before the optimizer step allocates its fp32 gradients.
        Phase.TRAIN: held[Phase.TRAIN] + beside + max(training, rank.step_grad_bytes),
        Phase.REFIT: with_cache if with_cache <= gpu_bytes else max(refit, awake),
        Phase.GENERATE: generation if generation <= gpu_bytes else awake,
    }


def _cached_bytes(held: int, training: int, engine: EngineMemory, gpu_bytes: int) -> int:
    """Returns the most memory of a training pass that torch's allocator may keep cached until the next one.

    `Residency` keeps all of the cache or empties it.
    """
    needed = engine.free_bytes_for_refit
    return 0 if needed is None else max(0, min(training, gpu_bytes - needed - held))


def least_beside_awake(plan: OffloadPlan, engine: EngineMemory, gpu_bytes: int) -> int:
    """Returns the GPU memory of training, with the least activations, and of an engine that stays awake."""
    least = max(
        sum(rank.gpu_bytes[Phase.TRAIN].values()) + max(rank.least_activation_bytes, rank.step_grad_bytes)
        for rank in plan.ranks
    )
    return least + POLICY_OVERHEAD_BYTES + engine.refit_graph_bytes + engine.awake_bytes(gpu_bytes)


def policy_peaks(config: MasterConfig, planner: Planner, run: PlannedRun) -> dict[str, int]:
    """Returns the peak bytes of the rank that takes most, by verb: `train`, `logprobs` and, with vLLM, `refit`.

    Training state and the passes of the policy's process count, passes with the margin of the plan's decisions. CUDA
    contexts, NCCL's buffers and the memory of engines do not: `performance/memory/policy/gpu_peak_VERB_gib` has none
    of these either.

    Args:
        config: the recipe as it runs, with numbers for packed rows.
        planner: as in `training_bytes`.
        run: the plan of the recipe.
    """
    passes = zip(run.plan.ranks, logprob_bytes(config, planner), training_bytes(config, planner), strict=True)
    most: dict[str, int] = {}
    for rank, forward, training in passes:
        for verb, nbytes in _peaks_of_rank(rank, run, int(MARGIN * forward), int(MARGIN * training)):
            most[verb] = max(most.get(verb, 0), nbytes)
    return most


def _peaks_of_rank(rank: RankPlan, run: PlannedRun, forward: int, training: int) -> Iterator[tuple[str, int]]:
    graphs = 0 if run.engine is None else run.engine.refit_graph_bytes
    held = {phase: sum(targets.values()) + graphs for phase, targets in rank.gpu_bytes.items()}
    # Activations are freed before the optimizer step allocates its fp32 gradients.
    yield "train", held[Phase.TRAIN] + max(training, rank.step_grad_bytes)
    yield "logprobs", rank.logprob_state_bytes + graphs + forward
    if run.engine is not None and Phase.REFIT in held:
        of_optimizer = [rank.gpu_bytes[phase][Target.OPTIMIZER_STATE] for phase in (Phase.TRAIN, Phase.REFIT)]
        # Optimizer state that is offloaded at the end of training may still be leaving.
        yield "refit", held[Phase.REFIT] + max(0, of_optimizer[0] - of_optimizer[1]) + run.engine.refit_bytes
