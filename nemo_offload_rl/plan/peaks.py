"""Computes the peak GPU memory that the plan gives the policy in each of its verbs, as a run's metrics measure it."""

from collections.abc import Iterator

from nemo_offload_rl.config.schema import MasterConfig
from nemo_offload_rl.plan.plan import RankPlan
from nemo_offload_rl.plan.planner import PlannedRun, Planner
from nemo_offload_rl.plan.row_tokens import MARGIN, logprob_bytes, training_bytes
from nemo_offload_rl.residency.table import Phase, Target


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
        for verb, nbytes in _of_rank(rank, run, int(MARGIN * forward), int(MARGIN * training)):
            most[verb] = max(most.get(verb, 0), nbytes)
    return most


def _of_rank(rank: RankPlan, run: PlannedRun, forward: int, training: int) -> Iterator[tuple[str, int]]:
    graphs = 0 if run.engine is None else run.engine.refit_graph_bytes
    held = {phase: sum(targets.values()) + graphs for phase, targets in rank.gpu_bytes.items()}
    # Activations are freed before the optimizer step allocates its fp32 gradients.
    yield "train", held[Phase.TRAIN] + max(training, rank.step_grad_bytes)
    # Optimizer state is prefetched for training during the last log-prob passes.
    yield "logprobs", max(held[Phase.LOGPROB], held[Phase.TRAIN]) + forward
    if run.engine is not None and Phase.REFIT in held:
        of_optimizer = [rank.gpu_bytes[phase][Target.OPTIMIZER_STATE] for phase in (Phase.TRAIN, Phase.REFIT)]
        # Optimizer state that is offloaded at the end of training may still be leaving.
        yield "refit", held[Phase.REFIT] + max(0, of_optimizer[0] - of_optimizer[1]) + run.engine.refit_bytes
