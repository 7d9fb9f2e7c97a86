"""Counts the parameters of a model that each rank holds, and the shard of them that its optimizer steps.

The layout of parameters over ranks is megatron-core's: linear layers are split over tensor-parallel ranks, norms and
routers are replicated, layers are assigned to pipeline stages, experts to expert-parallel ranks.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from nemo_offload_rl.config.megatron import megatron_field
from nemo_offload_rl.config.rules.base import EP, ETP, PP, TP
from nemo_offload_rl.config.rules.parallel import (
    expert_parallel_experts,
    pipeline_layers,
    tensor_parallel_heads,
)
from nemo_offload_rl.config.schema.megatron import MegatronConfig, MegatronDDPConfig, MegatronOptimizerConfig
from nemo_offload_rl.config.schema.policy import PolicyConfig
from nemo_offload_rl.memory.units import round_up
from nemo_offload_rl.plan import host_budget
from nemo_offload_rl.plan.architecture import Architecture, read_architecture
from nemo_offload_rl.residency.table import ShardFacts

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1}
# megatron-core's DDP buffers: each parameter starts at a multiple of 64 elements, each bucket ends at one of 128.
_PARAM_ALIGNMENT, _BUCKET_ALIGNMENT, _BUSBW_ALIGNMENT = 64, 128, 2**16


@dataclass(frozen=True)
class _Sizes:
    """Holds the parallel sizes: the numbers of ranks that share the parts of a model."""

    tensor: int
    pipeline: int
    expert: int
    expert_tensor: int
    data: int
    expert_data: int


@dataclass(frozen=True)
class _Weight:
    """Describes parameters of a rank that have the same size.

    Attributes:
        num_elements: elements of each parameter.
        is_expert: whether they belong to experts.
        is_router: whether they belong to a router.
        count: the number of such parameters.
    """

    num_elements: int
    is_expert: bool = False
    is_router: bool = False
    count: int = 1


def shard_facts(
    hf_config: Mapping[str, Any], policy: PolicyConfig, *, world_size: int, has_reference: bool
) -> tuple[ShardFacts, ...]:
    """Returns the sizes of the shard that one rank of each pipeline stage holds.

    Parameter counts are exact. So is the optimizer's shard with one data-parallel rank; with several it is the largest
    rank's, plus at most the padding of the DDP buffers (64 elements a parameter, 128 a bucket).

    Args:
        hf_config: the model's Hugging Face config with every field, as its `to_dict()` gives it.
        policy: the recipe's `policy` section.
        world_size: ranks of the whole cluster.
        has_reference: whether reference weights are kept for a KL penalty.

    Returns:
        One entry a pipeline stage.

    Raises:
        ValueError: the model cannot be split as the recipe says; the message names the key.
        UnknownArchitectureError: the model's sizes are not known before it is built.
    """
    cfg = policy["megatron_cfg"]
    architecture = read_architecture(hf_config, cfg)
    sizes = _sizes(cfg, world_size)
    _check_split(hf_config, cfg, architecture)
    stages = []
    for stage in range(sizes.pipeline):
        weights = list(_stage_weights(architecture, sizes, cfg, stage))
        frozen = [w for w in weights if w.is_router and cfg["freeze_moe_router"]]
        trained = [w for w in weights if not (w.is_router and cfg["freeze_moe_router"])]
        num_optimizer_params = _optimizer_shard(trained, sizes, cfg, stage)
        stages.append(
            ShardFacts(
                num_params=_count(trained),
                num_frozen_params=_count(frozen),
                param_size=DTYPE_BYTES[policy["precision"]],
                grad_size=_grad_size(policy),
                local_grad_size=4 if _local_patterns(policy) else 0,
                num_optimizer_params=num_optimizer_params,
                optimizer_size=optimizer_size(policy),
                has_reference=has_reference,
                num_cpu_optimizer_params=int(host_budget.fraction(cfg["optimizer"]) * num_optimizer_params),
                cpu_optimizer_gpu_size=host_budget.gpu_size(policy),
            )
        )
    return tuple(stages)


def num_model_params(hf_config: Mapping[str, Any], megatron_cfg: MegatronConfig, *, only_experts: bool = False) -> int:
    """Counts the parameters of the whole model.

    Args:
        hf_config: the model's Hugging Face config with every field, as its `to_dict()` gives it.
        megatron_cfg: the recipe's `policy.megatron_cfg`.
        only_experts: whether to count those of its experts alone.

    Raises:
        UnknownArchitectureError: the model's sizes are not known before it is built.
    """
    on_one_stage: MegatronConfig = {
        **megatron_cfg,
        "pipeline_model_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None,
        "num_layers_in_first_pipeline_stage": None,
        "num_layers_in_last_pipeline_stage": None,
    }
    whole = _Sizes(tensor=1, pipeline=1, expert=1, expert_tensor=1, data=1, expert_data=1)
    architecture = read_architecture(hf_config, megatron_cfg)
    weights = _stage_weights(architecture, whole, on_one_stage, stage=0)
    return _count([weight for weight in weights if weight.is_expert or not only_experts])


def optimizer_size(policy: PolicyConfig) -> int:
    """Returns the bytes of optimizer state per parameter; a float32 model's parameters are its master weights.

    megatron-core keeps float32 moments and, for a bfloat16 model, float32 master weights. Transformer Engine's
    precision-aware Adam keeps the moments in the types that it is given, and of a bfloat16 parameter's master weight
    only the 16 bits that the parameter lacks, unless `store_param_remainders` is false.
    """
    section = policy["megatron_cfg"]["optimizer"]
    has_masters = policy["precision"] == "bfloat16"
    # Parameters that the CPU optimizer leaves to the GPU have float32 state and masters, whatever the recipe says.
    if host_budget.fraction(section):
        return host_budget.moments_size(section) + 4 * has_masters
    if section["optimizer"] == "sgd":
        return 4 * (section["sgd_momentum"] > 0) + 4 * has_masters
    if not section["use_precision_aware_optimizer"]:
        return 8 + 4 * has_masters
    moments = sum(_dtype_bytes(section, name) for name in ("exp_avg_dtype", "exp_avg_sq_dtype"))
    master = (
        2
        if has_masters and megatron_field(section, "store_param_remainders")
        else _dtype_bytes(section, "main_params_dtype")
    )
    return moments + master


def _dtype_bytes(section: MegatronOptimizerConfig, name: str) -> int:
    """Returns the bytes of a type of optimizer state."""
    return DTYPE_BYTES[megatron_field(section, name)]


def _grad_size(policy: PolicyConfig) -> int:
    in_fp32 = policy["megatron_cfg"]["distributed_data_parallel_config"]["grad_reduce_in_fp32"]
    return 4 if in_fp32 else DTYPE_BYTES[policy["precision"]]


def _local_patterns(policy: PolicyConfig) -> list[str]:
    """Returns patterns of the parameters whose gradients are accumulated in fp32 beside the gradient buffer.

    Names of parameters are not known here, so that the plan counts all of them as soon as there is a pattern.
    """
    ddp = policy["megatron_cfg"]["distributed_data_parallel_config"]
    return list(megatron_field(ddp, "param_name_patterns_for_fp32_local_accumulation"))


def fp32_grad_bytes(policy: PolicyConfig, facts: ShardFacts) -> int:
    """Returns the bytes of the fp32 copies of bf16 gradients that the optimizer step allocates on the GPU.

    megatron-core copies the gradients of a rank's whole shard, whether its state is resident, streamed or on the CPU;
    the precision-aware optimizer copies none, and none are copied that are accumulated in fp32. Parameters that are
    stepped on the GPU beside the CPU optimizer always have fp32 copies.

    Args:
        policy: the recipe's `policy` section.
        facts: the sizes of the rank's shard.
    """
    section = policy["megatron_cfg"]["optimizer"]
    if facts.grad_size == 4 or {"all", "*"} & set(_local_patterns(policy)):
        return 0
    if not section["use_precision_aware_optimizer"]:
        return 4 * facts.num_optimizer_params
    if host_budget.fraction(section):
        return 4 * (facts.num_optimizer_params - facts.num_cpu_optimizer_params)
    return 0


def _count(weights: list[_Weight]) -> int:
    return sum(weight.num_elements * weight.count for weight in weights)


def _sizes(cfg: MegatronConfig, world_size: int) -> _Sizes:
    tensor, pipeline = cfg["tensor_model_parallel_size"], cfg["pipeline_model_parallel_size"]
    expert, expert_tensor = cfg["expert_model_parallel_size"], cfg["expert_tensor_parallel_size"]
    # Gradients are reduced, and optimizer state is sharded, over context-parallel ranks too.
    return _Sizes(
        tensor,
        pipeline,
        expert,
        expert_tensor,
        data=world_size // (tensor * pipeline),
        expert_data=world_size // (expert * expert_tensor * pipeline),
    )


def _check_split(hf_config: Mapping[str, Any], cfg: MegatronConfig, architecture: Architecture) -> None:
    """Applies the recipe's parallelism rules to a model whose config is not in the recipe.

    Raises:
        ValueError: the model cannot be split as the recipe says.
    """
    model = ("", dict(hf_config), None)
    freq = megatron_field(cfg, "moe_layer_freq")
    first, last = cfg["num_layers_in_first_pipeline_stage"], cfg["num_layers_in_last_pipeline_stage"]
    virtual = cfg["virtual_pipeline_model_parallel_size"]
    tensor, pipeline = cfg["tensor_model_parallel_size"], cfg["pipeline_model_parallel_size"]
    broken = {
        TP: tensor_parallel_heads(tensor, *model),
        PP: pipeline_layers(pipeline, virtual, first, last, None, *model),
        EP: expert_parallel_experts(cfg["expert_model_parallel_size"], *model, freq),
    }
    for key, message in broken.items():
        if message is not None:
            raise ValueError(f"{key} {message}")
    qkv = architecture.head_dim * (architecture.num_heads + 2 * architecture.num_query_groups)
    shared = [(TP, tensor, "queries, keys and values", qkv)]
    if not all(architecture.expert_layers):
        shared.append((TP, tensor, "MLP", architecture.dense_ffn_hidden_size))
    if any(architecture.expert_layers):
        shared.append((ETP, cfg["expert_tensor_parallel_size"], "MLP", architecture.ffn_hidden_size))
    for key, ranks, name, size in shared:
        if size % ranks:
            raise ValueError(f"{key} is {ranks}, which does not divide the {size} rows of the model's {name}.")


def num_layers_of_stage(architecture: Architecture, cfg: MegatronConfig, stage: int) -> int:
    """Returns the number of layers of a pipeline stage, over all its virtual stages.

    Follows megatron-core's `get_num_layers_to_build`.
    """
    num_stages = cfg["pipeline_model_parallel_size"]
    first, last = cfg["num_layers_in_first_pipeline_stage"], cfg["num_layers_in_last_pipeline_stage"]
    if stage == 0 and first is not None:
        return int(first)
    if stage == num_stages - 1 and last is not None:
        return int(last)
    rest = architecture.num_layers - (first or 0) - (last or 0)
    return int(rest // (num_stages - (first is not None) - (last is not None)))


def _stage_weights(architecture: Architecture, sizes: _Sizes, cfg: MegatronConfig, stage: int) -> Iterator[_Weight]:
    hidden = architecture.hidden_size
    # The worker pads the vocabulary to a multiple of the tensor-parallel size only.
    embedding = _Weight(-(-architecture.vocab_size // sizes.tensor) * hidden)
    is_first, is_last = stage == 0, stage == sizes.pipeline - 1
    if is_first:
        yield embedding
    for layer in layers_of_stage(architecture, cfg, stage):
        yield from _layer_weights(architecture, sizes, has_experts=architecture.expert_layers[layer])
    if is_last:
        yield _Weight(hidden)  # the last norm
        # A tied output layer shares the embedding's memory only where both are on one stage.
        if not architecture.tied_embeddings or not is_first:
            yield embedding


def layers_of_stage(architecture: Architecture, cfg: MegatronConfig, stage: int) -> list[int]:
    """Returns the indices of a pipeline stage's layers, over all its virtual stages, which are assigned in turn."""
    counts = [num_layers_of_stage(architecture, cfg, one) for one in range(cfg["pipeline_model_parallel_size"])]
    virtual = cfg["virtual_pipeline_model_parallel_size"] or 1
    in_chunk = [count // virtual for count in counts]
    starts = (sum(in_chunk) * chunk + sum(in_chunk[:stage]) for chunk in range(virtual))
    return [layer for start in starts for layer in range(start, start + in_chunk[stage])]


def _layer_weights(architecture: Architecture, sizes: _Sizes, *, has_experts: bool) -> Iterator[_Weight]:
    hidden, head_dim = architecture.hidden_size, architecture.head_dim
    query = architecture.num_heads * head_dim
    qkv = query + 2 * architecture.num_query_groups * head_dim
    yield from (_Weight(hidden), _Weight(hidden))  # the norms before attention and MLP
    if architecture.qk_norm:
        yield from (_Weight(head_dim), _Weight(head_dim))
    yield _Weight(hidden * qkv // sizes.tensor)
    if architecture.qkv_bias:
        yield _Weight(qkv // sizes.tensor)
    yield _Weight(query // sizes.tensor * hidden)
    if architecture.output_bias:
        yield _Weight(hidden)
    if not has_experts or architecture.num_experts is None:
        yield from _mlp_weights(architecture, sizes.tensor, is_expert=False)
        return
    yield _Weight(hidden * architecture.num_experts, is_router=True)
    if architecture.router_bias:
        yield _Weight(architecture.num_experts, is_router=True)
    num_experts = architecture.num_experts // sizes.expert
    for weight in _mlp_weights(architecture, sizes.expert_tensor, is_expert=True):
        yield replace(weight, count=num_experts)


def _mlp_weights(architecture: Architecture, tensor: int, *, is_expert: bool) -> Iterator[_Weight]:
    """Yields a gated MLP's weights: gate and up projection as one matrix, split by rows; down projection by columns."""
    ffn = (architecture.ffn_hidden_size if is_expert else architecture.dense_ffn_hidden_size) // tensor
    hidden = architecture.hidden_size
    yield _Weight(2 * ffn * hidden, is_expert)
    yield _Weight(ffn * hidden, is_expert)
    if architecture.mlp_bias:
        yield from (_Weight(2 * ffn, is_expert), _Weight(hidden, is_expert))


def _optimizer_shard(weights: list[_Weight], sizes: _Sizes, cfg: MegatronConfig, stage: int) -> int:
    """Counts the elements whose optimizer state one rank keeps; experts are sharded over fewer ranks than the rest."""
    if not cfg["optimizer"]["use_distributed_optimizer"]:
        return _count(weights)
    ddp = cfg["distributed_data_parallel_config"]
    experts = [weight for weight in weights if weight.is_expert]
    others = [weight for weight in weights if not weight.is_expert]
    return sum(
        _largest_shard(group, ranks, ddp, sizes.data, bucketed=stage == 0)
        for group, ranks in ((others, sizes.data), (experts, sizes.expert_data))
        if group
    )


def _largest_shard(weights: list[_Weight], ranks: int, ddp: MegatronDDPConfig, data: int, *, bucketed: bool) -> int:
    if ranks == 1:
        return _count(weights)
    padded = sum(round_up(weight.num_elements, _PARAM_ALIGNMENT) * weight.count for weight in weights)
    num_buckets = 3  # an embedding that two stages share has a bucket of its own
    if bucketed and ddp["overlap_grad_reduce"]:  # megatron-core's buckets, on the first stage alone
        given = megatron_field(ddp, "bucket_size")
        num_buckets += padded // (given or max(40_000_000, 1_000_000 * data))
    busbw = megatron_field(ddp, "pad_buckets_for_high_nccl_busbw")
    alignment = math.lcm(ranks, _BUCKET_ALIGNMENT, _BUSBW_ALIGNMENT if busbw else 1)
    return min(_count(weights), -(-(padded + num_buckets * (alignment - 1)) // ranks))
