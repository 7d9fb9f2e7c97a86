"""The GPU memory that the plan gives each phase of a GRPO step, beside which its peak is reported."""

from collections.abc import Mapping
from typing import Any

from nemo_offload_rl.hf_config import hf_config
from nemo_offload_rl.memory.units import GIB
from nemo_offload_rl.plan.activation_facts import LOGPROB_TOKENS, TRAIN_TOKENS, activation_facts
from nemo_offload_rl.plan.generation import POLICY_OVERHEAD_BYTES, asleep_bytes
from nemo_offload_rl.plan.plan import settings
from nemo_offload_rl.plan.row_tokens import MARGIN, with_tokens
from nemo_offload_rl.plan.training_memory import forward_pass_bytes, training_pass_bytes
from nemo_offload_rl.residency.table import Phase, Target
from nemo_offload_rl.run.preflight import check_sizes


def planned_gib(config: Mapping[str, Any], gpu_bytes: int) -> dict[str, float]:
    """Returns GiB by the timer's name of a phase; nothing where the plan has no vLLM.

    Passes count with the estimates and the margin that `train_mb_tokens: auto` is chosen by. The engine takes its
    share of the GPU while it is awake; while it sleeps its context and graphs.

    Args:
        config: the recipe as the run resolves it.
        gpu_bytes: memory of the GPU.
    """
    run = check_sizes(config, "grpo")
    if run is None or run.engine is None:
        return {}
    rank, engine = run.plan.largest_rank, run.engine
    process = POLICY_OVERHEAD_BYTES + engine.refit_graph_bytes
    held = {phase: sum(rank.gpu_bytes[phase].values()) + process for phase in Phase}
    awake = held[Phase.GENERATE] + int(engine.share_of(gpu_bytes) * gpu_bytes)
    asleep = asleep_bytes(config["policy"])
    # What leaves from the end of training is copied on beside refit and generation, where there is room.
    leaving = rank.gpu_bytes[Phase.TRAIN][Target.OPTIMIZER_STATE] - rank.gpu_bytes[Phase.REFIT][Target.OPTIMIZER_STATE]
    refit = held[Phase.REFIT] + asleep + engine.weights_bytes + engine.refit_bytes
    beside = refit + leaving + engine.kv_cache_bytes(gpu_bytes)  # the KV cache is mapped while weights come, likewise
    forward, training = _pass_bytes(config, len(run.needs))
    logprobs = max(held[Phase.LOGPROB], held[Phase.TRAIN]) + asleep + forward  # optimizer state comes back beside them
    phases = {
        "refit": beside if beside <= gpu_bytes else max(refit, awake),
        "generation": awake + leaving if awake + leaving <= gpu_bytes else awake,
        "logprobs": logprobs,
        "reference_logprobs": logprobs,
        "training": held[Phase.TRAIN] + asleep + training + rank.step_grad_bytes,
    }
    return {name: nbytes / GIB for name, nbytes in phases.items()}


def _pass_bytes(config: Mapping[str, Any], world_size: int) -> tuple[int, int]:
    """Bytes of a log-prob pass and of a training pass, of the pipeline stage that takes most."""
    fields, policy = hf_config(config["policy"]).to_dict(), config["policy"]
    packing = policy["sequence_packing"]
    of_logprobs = policy
    if packing["enabled"]:  # activation facts are of training's rows
        of_logprobs = with_tokens(config, {TRAIN_TOKENS: packing[LOGPROB_TOKENS]})["policy"]
    forward = forward_pass_bytes(fields, of_logprobs, activation_facts(fields, of_logprobs, world_size=world_size))
    facts = activation_facts(fields, policy, world_size=world_size)
    training = training_pass_bytes(fields, policy, facts, settings(policy).activations)
    return int(MARGIN * max(forward)), int(MARGIN * max(training))
