"""Predicts the seconds of a training step from its FLOPs, those computed again, and the copies that do not hide."""

import math
from collections.abc import Sequence

from nemo_offload_rl.activation_offload.schedule import ActivationOptions
from nemo_offload_rl.config.algorithms import AlgorithmSpec
from nemo_offload_rl.config.megatron.device_split import split_devices
from nemo_offload_rl.config.megatron.further_fields import megatron_field
from nemo_offload_rl.config.megatron.mlp_tiles import tokens_of_tile
from nemo_offload_rl.config.rules.modules import KEPT_ATTENTION, recomputed_modules, recomputes_layers
from nemo_offload_rl.config.schema import MasterConfig
from nemo_offload_rl.config.schema.megatron import MegatronConfig
from nemo_offload_rl.config.schema.policy import has_logprob_batches, sequence_multiple
from nemo_offload_rl.memory.units import round_up
from nemo_offload_rl.plan.activation_facts import LOGPROB_TOKENS, stated_row_tokens
from nemo_offload_rl.plan.activations import module_bytes
from nemo_offload_rl.plan.flops import TRAINING_PASSES, FlopModel
from nemo_offload_rl.plan.plan import PCIE5_X16_BYTES_PER_S
from nemo_offload_rl.plan.saved_tensors import ActivationFacts

PEAK_FLOPS = 989e12
"""Dense bf16 of an H100 or H200 on SXM."""

RATE = 0.48
"""Share of the peak that a training step reaches, with the FLOPs that it computes again and attention's: 0.45 to 0.52
with rows of 131,072 tokens and more (docs/results/long_rows.md), 0.48 to 0.52 with rows of 16,384 without anything
computed again (docs/results/colocated.md)."""

FORWARD_RATE = 0.57
"""The same of a forward pass in training, behind which copies to the host hide: 37.4 TFLOP in 65.8 ms
(docs/results/activation_offload.md)."""

ROW_TOKENS = 1_100
"""Tokens that take as long as what a micro-batch costs beside its own: rows of 8,192 tokens train at 94% of the speed
of rows of 16,384 (`plan.row_tokens.MOST_TOKENS`)."""

# Share of a hidden copy's time that the step takes longer, since it uses the GPU's memory, too: 1.7 of 146 ms.
_HIDDEN_SHARE = 0.012
# Tiles of this many tokens take 2% longer for adding up gradients, smaller ones more (config.megatron.mlp_tiles).
_TILE_TOKENS, _TILE_SHARE = 16_384, 0.02


def training_seconds(
    flops: FlopModel,
    config: MasterConfig,
    spec: AlgorithmSpec,
    stages: Sequence[ActivationFacts],
    offloaded: ActivationOptions | None,
    *,
    link_bytes_per_s: float = PCIE5_X16_BYTES_PER_S,
) -> float:
    """Returns the predicted seconds of training on `train_global_batch_size` samples of the greatest length.

    With L the FLOPs of a forward pass of the layers' matrix products, M the MLPs' part of them, A those of attention's
    scores and values, O those of the output layer:

        trained                                             3 (L + A + O)
        logits in chunks (docs/logits.md)                   O
        full recomputation                                  L + A
        the same with core_attn kept                        L
        layer_input in segments of n (docs/long-rows.md)    (n - 1)/n of the line above
        MLPs in tiles (docs/activation-offload.md)          M, except with layer_input; 2% of 3 M x 16,384 / tile
        selective recomputation                             A for core_attn, M for mlp and moe

        seconds = FLOPs / ranks / (RATE x peak) x (1 + ROW_TOKENS / tokens) x (1 + (stages - 1) / micro-batches)
                  + copies of activations that do not hide

    A micro-batch's copies to the host hide behind its forward pass, those back behind its backward pass.

    Args:
        flops: counts the model's FLOPs.
        config: the recipe, with numbers for packed rows.
        spec: its algorithm.
        stages: the activation sizes of each pipeline stage.
        offloaded: the options of activation offloading; None where it is off.
        link_bytes_per_s: speed of page-locked copies in one direction.
    """
    policy, cfg = config["policy"], config["policy"]["megatron_cfg"]
    layers, mlps, attention, output = _forward_flops(flops, config, spec)
    once = layers + attention + output
    tile = tokens_of_tile(cfg["mlp_tile_tokens"], flops.architecture.hidden_size)
    total = TRAINING_PASSES * once + _computed_again(flops, cfg, layers, mlps, attention, stages[0], offloaded)
    if cfg["use_fused_linear_logprobs"]:
        total += output
    if tile is not None and tile < stages[0].num_tokens:
        total += _TILE_SHARE * _TILE_TOKENS / tile * TRAINING_PASSES * mlps
    ranks = split_devices(config["cluster"], policy).policy_ranks
    pipeline, shared = cfg["pipeline_model_parallel_size"], cfg["tensor_model_parallel_size"]
    rank_tokens = _num_tokens(config, spec) * pipeline * shared / ranks  # as many as the micro-batches' `num_tokens`
    num_microbatches = max(1, math.ceil(rank_tokens / stages[0].num_tokens))
    bubble = 1 + (pipeline - 1) / (num_microbatches * stages[0].num_model_chunks)
    overhead = _row_overhead(min(stages[0].num_tokens, rank_tokens) / shared)
    waited = 0.0
    if offloaded is not None:
        forward_s = once / ranks / num_microbatches / (FORWARD_RATE * PEAK_FLOPS)
        backward_s = (total - once) / ranks / num_microbatches / (RATE * PEAK_FLOPS)
        copy_s = max(_copied_bytes(facts, offloaded) for facts in stages) / link_bytes_per_s
        waited = max(0, copy_s - forward_s) + max(0, copy_s - backward_s) + 2 * _HIDDEN_SHARE * copy_s
    return total / ranks / (RATE * PEAK_FLOPS) * overhead * bubble + num_microbatches * waited


def logprob_seconds(flops: FlopModel, config: MasterConfig, spec: AlgorithmSpec) -> float:
    """Returns the predicted seconds of a step's log-prob passes, of policy and reference; 0 where it has none."""
    if not spec.computes_logprobs:
        return 0.0
    policy, cfg = config["policy"], config["policy"]["megatron_cfg"]
    if policy["sequence_packing"]["enabled"]:  # then validation has checked that the key is there
        tokens = stated_row_tokens(policy, LOGPROB_TOKENS, spec.group_size)
    else:
        rows = policy["logprob_batch_size"] if has_logprob_batches(policy) else policy["train_micro_batch_size"]
        tokens = rows * spec.group_size * policy["max_total_sequence_length"]
    layers, _, attention, output = _forward_flops(flops, config, spec)
    ranks = split_devices(config["cluster"], policy).policy_ranks
    shared = cfg["tensor_model_parallel_size"] * cfg["context_parallel_size"]
    passes = 2 if spec.has_reference(config) else 1
    return passes * (layers + attention + output) / ranks / (RATE * PEAK_FLOPS) * _row_overhead(tokens / shared)


def _forward_flops(flops: FlopModel, config: MasterConfig, spec: AlgorithmSpec) -> tuple[float, float, float, float]:
    """Returns the FLOPs of all ranks for layers, their MLPs alone, attention, and the output layer."""
    tokens, samples = _num_tokens(config, spec), config["policy"]["train_global_batch_size"] * spec.group_size
    layers = tokens * (flops.per_token - flops.output_per_token)
    attention = samples * flops.attention_flops(tokens // samples)
    return layers, tokens * flops.mlp_per_token, attention, tokens * flops.output_per_token


def _num_tokens(config: MasterConfig, spec: AlgorithmSpec) -> int:
    policy = config["policy"]
    length = round_up(policy["max_total_sequence_length"], sequence_multiple(policy))
    return int(policy["train_global_batch_size"] * spec.group_size * length)


def _row_overhead(tokens: float) -> float:
    return 1 + ROW_TOKENS / tokens


def _computed_again(
    flops: FlopModel,
    cfg: MegatronConfig,
    layers: float,
    mlps: float,
    attention: float,
    facts: ActivationFacts,
    offloaded: ActivationOptions | None,
) -> float:
    """Returns the FLOPs of layers that recomputation and tiles compute again."""
    tiled = mlps if cfg["mlp_tile_tokens"] is not None else 0.0
    if not recomputes_layers(cfg["activation_checkpointing"], cfg["recompute_granularity"]):
        again = recomputed_modules(
            cfg["activation_checkpointing"], cfg["recompute_granularity"], cfg["recompute_modules"]
        )
        return tiled + attention * ("core_attn" in again) + mlps * ("mlp" in again or "moe" in again)
    if offloaded is not None:
        kept = KEPT_ATTENTION in offloaded.modules
        passes = 1 + (facts.num_layers_of_segment - 1) / facts.num_layers_of_segment
        return passes * (layers + (0 if kept else attention))
    share = 1.0
    if megatron_field(cfg, "recompute_method") == "block":  # of the first layers of each stage
        share = min(1.0, (megatron_field(cfg, "recompute_num_layers") or 1) / facts.num_layers)
    return share * (layers + attention) + tiled


def _copied_bytes(facts: ActivationFacts, offloaded: ActivationOptions) -> int:
    """Returns the bytes of a micro-batch that are copied to the host."""
    moved = sum(module.micro_batch for module in module_bytes(facts, offloaded).values())
    limit = offloaded.host_memory_limit_bytes
    return moved if limit is None else min(moved, limit)
