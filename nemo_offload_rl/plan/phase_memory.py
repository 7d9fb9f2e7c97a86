"""Estimates the peak GPU memory of policy and generation in each phase of a step."""

import copy
import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from nemo_offload_rl.config.algorithms import ALGORITHMS
from nemo_offload_rl.config.megatron.device_split import split_devices
from nemo_offload_rl.config.schema import MasterConfig
from nemo_offload_rl.config.schema.policy import has_generation
from nemo_offload_rl.plan.activation_facts import LOGPROB_TOKENS, TRAIN_TOKENS, activation_facts, with_tokens
from nemo_offload_rl.plan.activations import EXPERT_LOAD_FACTOR
from nemo_offload_rl.plan.generation import POLICY_OVERHEAD_BYTES, EngineMemory, engine_bytes_beside_policy
from nemo_offload_rl.plan.plan import RankPlan, settings
from nemo_offload_rl.plan.planner import PlannedRun
from nemo_offload_rl.plan.saved_tensors import ActivationFacts
from nemo_offload_rl.plan.training_memory import forward_pass_bytes, training_pass_bytes
from nemo_offload_rl.residency.table import Phase, Target

MARGIN = 1.15
"""Factor on the estimate of a pass, for temporary tensors and fragmentation; an H200 took 1.02 to 1.08 times the
estimate with rows of 65,536 to 118,784 tokens (docs/results/activation_offload.md)."""


def training_bytes(config: MasterConfig, hf_config: Mapping[str, Any], *, algorithm: str) -> tuple[int, ...]:
    """Returns the GPU memory of a training step's longest micro-batch, for one rank of each pipeline stage.

    Args:
        config: a validated recipe, with numbers for packed rows.
        hf_config: the model's Hugging Face config with every field, as its `to_dict()` gives it.
        algorithm: a key of `ALGORITHMS`, the section that marks the recipe.
    """
    policy = config["policy"]
    return training_pass_bytes(
        hf_config, policy, _busy_facts(config, hf_config, algorithm), settings(policy).activations
    )


def logprob_bytes(config: MasterConfig, hf_config: Mapping[str, Any], *, algorithm: str) -> tuple[int, ...]:
    """Returns the GPU memory of a log-prob pass's longest micro-batch; takes the arguments of `training_bytes`."""
    policy = config["policy"]
    if policy["sequence_packing"]["enabled"]:
        passes = with_tokens(config, {TRAIN_TOKENS: policy["sequence_packing"][LOGPROB_TOKENS]})
    else:
        passes = copy.deepcopy(config)
        if has_generation(policy):
            passes["policy"]["train_micro_batch_size"] = policy["logprob_batch_size"]
    return forward_pass_bytes(hf_config, passes["policy"], _busy_facts(passes, hf_config, algorithm))


def _busy_facts(config: MasterConfig, hf_config: Mapping[str, Any], algorithm: str) -> list[ActivationFacts]:
    """Returns the activation sizes of each pipeline stage, with `EXPERT_LOAD_FACTOR` times the average expert load."""
    world_size = split_devices(config["cluster"], config["policy"]).policy_ranks
    group_size = ALGORITHMS[algorithm].group_size
    stages = activation_facts(hf_config, config["policy"], world_size=world_size, group_size=group_size)
    return [
        dataclasses.replace(facts, num_expert_tokens=math.ceil(EXPERT_LOAD_FACTOR * facts.num_expert_tokens))
        for facts in stages
    ]


def phase_bytes(
    config: MasterConfig,
    hf_config: Mapping[str, Any],
    run: PlannedRun,
    engine: EngineMemory,
    *,
    algorithm: str,
    gpu_bytes: int,
) -> dict[Phase, int]:
    """Returns for each phase the GPU memory of the rank that takes most.

    Passes count with the margin that `train_mb_tokens: auto` uses. An awake vLLM takes its share of the GPU; a
    sleeping one takes its CUDA context and graphs.

    Args:
        config: as in `training_bytes`.
        hf_config: as in `training_bytes`.
        run: the recipe's plan.
        engine: the memory that vLLM takes of the same GPU.
        algorithm: as in `training_bytes`.
        gpu_bytes: memory of the smallest GPU.
    """
    forward = logprob_bytes(config, hf_config, algorithm=algorithm)
    training = training_bytes(config, hf_config, algorithm=algorithm)
    beside = engine_bytes_beside_policy(config["policy"], engine, gpu_bytes)
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
        # Optimizer state is prefetched for training during the last log-prob passes, which may use torch's cache.
        Phase.LOGPROB: max(held[Phase.LOGPROB], held[Phase.TRAIN]) + beside + max(forward, cached),
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
