"""Estimates what policy and generation take of a GPU in each phase of a step, at most."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from nemo_offload_rl.config.algorithms import ALGORITHMS
from nemo_offload_rl.config.megatron.device_split import split_devices
from nemo_offload_rl.plan.activation_facts import LOGPROB_TOKENS, TRAIN_TOKENS, activation_facts, with_tokens
from nemo_offload_rl.plan.activations import EXPERT_LOAD_FACTOR
from nemo_offload_rl.plan.generation import POLICY_OVERHEAD_BYTES, EngineMemory, bytes_beside_policy
from nemo_offload_rl.plan.plan import RankPlan, settings
from nemo_offload_rl.plan.planner import PlannedRun
from nemo_offload_rl.plan.saved_tensors import ActivationFacts
from nemo_offload_rl.plan.training_memory import forward_pass_bytes, training_pass_bytes
from nemo_offload_rl.residency.table import Phase, Target

MARGIN = 1.15
"""What a pass may take over the estimate, for temporary tensors and fragmentation; an H200 took 1.02 to 1.08 times the
estimate with rows of 65,536 to 118,784 tokens (docs/results/activation_offload.md)."""

_Config = Mapping[str, Any]


def training_bytes(config: _Config, hf_config: Mapping[str, Any], *, algorithm: str) -> tuple[int, ...]:
    """Returns the GPU memory of a training step's longest micro-batch, of one rank of each pipeline stage.

    Args:
        config: a validated recipe, with numbers for packed rows.
        hf_config: the model's Hugging Face config with every field, as its `to_dict()` gives it.
        algorithm: a key of `ALGORITHMS`, the section that marks the recipe.
    """
    policy = config["policy"]
    return training_pass_bytes(
        hf_config, policy, _busy_facts(config, hf_config, algorithm), settings(policy).activations
    )


def logprob_bytes(config: _Config, hf_config: Mapping[str, Any], *, algorithm: str) -> tuple[int, ...]:
    """Returns the GPU memory of the longest micro-batch of a log-prob pass; arguments as `training_bytes`."""
    policy = config["policy"]
    if policy["sequence_packing"]["enabled"]:
        passes = with_tokens(config, {TRAIN_TOKENS: policy["sequence_packing"][LOGPROB_TOKENS]})
    elif "logprob_batch_size" in policy:
        passes = {**config, "policy": {**policy, "train_micro_batch_size": policy["logprob_batch_size"]}}
    else:
        passes = dict(config)
    return forward_pass_bytes(hf_config, passes["policy"], _busy_facts(passes, hf_config, algorithm))


def _busy_facts(config: _Config, hf_config: Mapping[str, Any], algorithm: str) -> list[ActivationFacts]:
    """The facts of each pipeline stage, with the load of a rank whose experts are busy."""
    world_size = split_devices(config["cluster"], config["policy"]).policy_ranks
    group_size = ALGORITHMS[algorithm].group_size
    stages = activation_facts(hf_config, config["policy"], world_size=world_size, group_size=group_size)
    return [
        dataclasses.replace(facts, num_expert_tokens=math.ceil(EXPERT_LOAD_FACTOR * facts.num_expert_tokens))
        for facts in stages
    ]


def phase_bytes(
    config: _Config,
    hf_config: Mapping[str, Any],
    run: PlannedRun,
    engine: EngineMemory,
    *,
    algorithm: str,
    gpu_bytes: int,
) -> dict[Phase, int]:
    """Returns what a phase takes of the GPU of a rank that takes most, by phase.

    Passes count with the margin that `train_mb_tokens: auto` is chosen by. vLLM takes its share of the GPU while it is
    awake; while it sleeps its context and graphs.

    Args:
        config: as `training_bytes`.
        hf_config: as `training_bytes`.
        run: the recipe's plan.
        engine: what vLLM takes of the same GPU.
        algorithm: as `training_bytes`.
        gpu_bytes: memory of the smallest GPU.
    """
    forward = logprob_bytes(config, hf_config, algorithm=algorithm)
    training = training_bytes(config, hf_config, algorithm=algorithm)
    beside = bytes_beside_policy(config["policy"], engine, gpu_bytes)
    stages = [
        _stage_bytes(
            rank, engine, beside, int(MARGIN * forward[rank.stage]), int(MARGIN * training[rank.stage]), gpu_bytes
        )
        for rank in run.plan.ranks
    ]
    return {phase: max(of_stage[phase] for of_stage in stages) for phase in Phase}


def _stage_bytes(
    rank: RankPlan, engine: EngineMemory, beside: int, forward: int, training: int, gpu_bytes: int
) -> dict[Phase, int]:
    process = POLICY_OVERHEAD_BYTES + engine.refit_graph_bytes
    held = {phase: sum(rank.gpu_bytes[phase].values()) + process for phase in Phase}
    awake = held[Phase.GENERATE] + int(engine.share_of(gpu_bytes) * gpu_bytes)
    # What leaves from the end of training is copied on beside refit and generation, where there is room.
    leaving = rank.gpu_bytes[Phase.TRAIN][Target.OPTIMIZER_STATE] - rank.gpu_bytes[Phase.REFIT][Target.OPTIMIZER_STATE]
    cached = _cached_bytes(held[Phase.TRAIN] + beside, training, engine, gpu_bytes)
    if engine.stays_awake:
        refit = with_cache = held[Phase.REFIT] + beside + engine.refit_bytes + leaving + cached
    else:
        refit = held[Phase.REFIT] + beside + engine.weights_bytes + engine.refit_bytes
        # The KV cache is mapped behind the weights, likewise.
        with_cache = refit + leaving + cached + engine.kv_cache_bytes(gpu_bytes)
    generation = awake + leaving + cached
    return {
        # Optimizer state comes back for training beside the last of the log-prob passes, which may use the cache.
        Phase.LOGPROB: max(held[Phase.LOGPROB], held[Phase.TRAIN]) + beside + max(forward, cached),
        # Activations are gone when the optimizer's step makes its fp32 gradients.
        Phase.TRAIN: held[Phase.TRAIN] + beside + max(training, rank.step_grad_bytes),
        Phase.REFIT: with_cache if with_cache <= gpu_bytes else max(refit, awake),
        Phase.GENERATE: generation if generation <= gpu_bytes else awake,
    }


def _cached_bytes(held: int, training: int, engine: EngineMemory, gpu_bytes: int) -> int:
    """What torch's allocator keeps of a training pass until the next: all or nothing (`Residency`), here at most."""
    needed = engine.free_bytes_for_refit
    return 0 if needed is None else max(0, min(training, gpu_bytes - needed - held))
