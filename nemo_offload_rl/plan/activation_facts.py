"""Derives the sizes that activation offloading depends on, per pipeline stage, from a recipe and a model config."""

import copy
import math
from collections.abc import Mapping
from typing import Any, Literal

from nemo_offload_rl.config.megatron import megatron_field
from nemo_offload_rl.config.rules.modules import recomputes_layers
from nemo_offload_rl.config.schema import MasterConfig
from nemo_offload_rl.config.schema.megatron import MegatronConfig
from nemo_offload_rl.config.schema.policy import PolicyConfig, has_logprob_batches, row_multiple, sequence_multiple
from nemo_offload_rl.config.schema.value_types import RowTokens
from nemo_offload_rl.memory.units import round_up
from nemo_offload_rl.plan.activations import chunks_in_flight
from nemo_offload_rl.plan.architecture import UnknownArchitectureError, read_architecture
from nemo_offload_rl.plan.model_facts import num_layers_of_stage
from nemo_offload_rl.plan.saved_tensors import ActivationFacts

AUTO: Literal["auto"] = "auto"
RowTokensKey = Literal["train_mb_tokens", "logprob_mb_tokens"]
TRAIN_TOKENS: Literal["train_mb_tokens"] = "train_mb_tokens"
LOGPROB_TOKENS: Literal["logprob_mb_tokens"] = "logprob_mb_tokens"

_ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}


def activation_facts(
    hf_config: Mapping[str, Any], policy: PolicyConfig, *, world_size: int, group_size: int = 1
) -> tuple[ActivationFacts, ...]:
    """Returns the activation sizes of one rank of each pipeline stage, for training on the longest micro-batches.

    Expert-parallel ranks are data-parallel ranks with micro-batches of their own, so a rank's experts get on average
    tokens x top-k of a micro-batch, whatever the expert-parallel size: 1 / EP of the tokens of EP ranks. The ranks of
    an expert-tensor-parallel group gather one another's tokens. Context-parallel ranks have equal parts of each row.

    Args:
        hf_config: the model's Hugging Face config with every field, as its `to_dict()` gives it.
        policy: the recipe's `policy` section, validated.
        world_size: ranks of the whole cluster.
        group_size: rows of a sample that belong together, such as a chosen and a rejected answer.

    Returns:
        One entry a pipeline stage.

    Raises:
        UnknownArchitectureError: the model's sizes are not known before it is built, or its layers save other tensors
            than those counted here.
        ValueError: the model's config lacks a field that its family needs.
    """
    cfg = policy["megatron_cfg"]
    model = read_architecture(hf_config, cfg)
    if model.has_dense_layers and cfg["fine_grained_activation_offloading"]:
        raise UnknownArchitectureError(
            "The model mixes dense layers and layers of experts, and the plan cannot size the activations of that mix. "
            "The worker offloads the activations that it finds."
        )
    tensor, stages = cfg["tensor_model_parallel_size"], cfg["pipeline_model_parallel_size"]
    num_tokens = micro_batch_tokens(policy, TRAIN_TOKENS, group_size) // cfg["context_parallel_size"]
    num_residual_tokens = -(-num_tokens // tensor) if cfg["sequence_parallel"] else num_tokens
    top_k = model.experts_per_token or 0
    expert_ranks = cfg["expert_tensor_parallel_size"]
    num_model_chunks = cfg["virtual_pipeline_model_parallel_size"] or 1
    return tuple(
        ActivationFacts(
            num_tokens=num_tokens,
            num_residual_tokens=num_residual_tokens,
            num_expert_tokens=math.ceil(num_residual_tokens * top_k * expert_ranks * _padding(cfg)),
            hidden_size=model.hidden_size,
            num_heads=model.num_heads // tensor,
            num_query_groups=max(1, model.num_query_groups // tensor),
            head_dim=model.head_dim,
            qk_norm=model.qk_norm,
            expert_ffn_size=model.ffn_hidden_size // expert_ranks if model.num_experts else 0,
            fused_swiglu=megatron_field(cfg, "bias_activation_fusion"),
            element_size=_ELEMENT_BYTES[policy["precision"]],
            num_layers=num_layers_of_stage(model, cfg, stage),
            num_model_chunks=num_model_chunks,
            num_chunks_in_flight=chunks_in_flight(
                _most_microbatches(policy, world_size // (tensor * stages * cfg["context_parallel_size"])),
                stage=stage,
                num_stages=stages,
                num_model_chunks=num_model_chunks,
                group_size=megatron_field(cfg, "microbatch_group_size_per_vp_stage") or stages,
            ),
            receives_input=stage > 0,
            num_layers_of_segment=_num_layers_of_segment(cfg, num_layers_of_stage(model, cfg, stage)),
        )
        for stage in range(stages)
    )


def stated_row_tokens(policy: PolicyConfig, key: RowTokensKey, group_size: int) -> int:
    """Returns the largest number of tokens of a packed row: the recipe's number, or a micro-batch's where it is auto.

    Args:
        policy: the recipe's `policy` section, validated.
        key: `TRAIN_TOKENS` or `LOGPROB_TOKENS`.
        group_size: rows of a sample that belong together, such as a chosen and a rejected answer.
    """
    stated = policy["sequence_packing"][key]
    if stated != AUTO:
        return int(stated)
    return int(policy["max_total_sequence_length"] * _samples(policy, key) * group_size)


def micro_batch_tokens(policy: PolicyConfig, key: RowTokensKey, group_size: int) -> int:
    """Returns the tokens of the longest micro-batch, with the worker's padding, of all context ranks.

    Takes the arguments of `stated_row_tokens`; `LOGPROB_TOKENS` for passes that compute log-probs, packed or not.
    """
    divisible_by = sequence_multiple(policy)
    length = round_up(policy["max_total_sequence_length"], divisible_by)
    if not policy["sequence_packing"]["enabled"]:
        return int(length * _samples(policy, key) * group_size)
    # Padding may make a group of sequences longer than a row, which it then gets for itself.
    row_tokens = stated_row_tokens(policy, key, group_size)
    longest_alone = min(length, round_up(row_tokens, divisible_by)) * group_size
    return round_up(max(row_tokens, longest_alone), row_multiple(policy))


def _samples(policy: PolicyConfig, key: RowTokensKey) -> int:
    if key == LOGPROB_TOKENS and has_logprob_batches(policy):
        return int(policy["logprob_batch_size"])
    return int(policy["train_micro_batch_size"])


def with_tokens(config: MasterConfig, tokens: Mapping[RowTokensKey, RowTokens]) -> MasterConfig:
    """Returns a copy of a config with the given values in policy.sequence_packing."""
    given = copy.deepcopy(config)
    for key, value in tokens.items():
        given["policy"]["sequence_packing"][key] = value
    return given


def _most_microbatches(policy: PolicyConfig, data_parallel_size: int) -> int:
    """Returns the most micro-batches that one rank can have in a step; a packed row may hold a single sample."""
    samples = policy["train_global_batch_size"] // data_parallel_size
    rows = 1 if policy["sequence_packing"]["enabled"] else policy["train_micro_batch_size"]
    return max(1, math.ceil(samples / rows))


def _num_layers_of_segment(cfg: MegatronConfig, num_layers: int) -> int:
    """Returns the layers that uniform recomputation takes at a time, of a stage's; 1 without it."""
    recomputes = recomputes_layers(cfg["activation_checkpointing"], cfg["recompute_granularity"])
    if not recomputes or megatron_field(cfg, "recompute_method") == "block":
        return 1
    of_chunk = -(-num_layers // (cfg["virtual_pipeline_model_parallel_size"] or 1))
    return min(megatron_field(cfg, "recompute_num_layers") or 1, max(1, of_chunk))


def _padding(cfg: MegatronConfig) -> float:
    """Returns the factor by which padding to the expert capacity raises the tokens of an expert; 1 without padding."""
    factor = megatron_field(cfg, "moe_expert_capacity_factor")
    return float(factor) if factor is not None and megatron_field(cfg, "moe_pad_expert_input_to_capacity") else 1.0
