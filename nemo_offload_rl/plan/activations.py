"""Computes the bytes of activations that offloading moves, per pipeline stage, and the host memory that they take.

`delta_offload_bytes_across_pp_ranks` is not counted: it keeps bytes on the GPU, but not those of a given micro-batch.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, compress
from typing import Any, Literal

from nemo_offload_rl.activation_offload.schedule import ActivationOptions, choose_in_first_pass, choose_offloaded
from nemo_offload_rl.config.megatron import LAYER_INPUT, megatron_field
from nemo_offload_rl.config.rules.modules import recomputes_layers
from nemo_offload_rl.config.schema import MasterConfig
from nemo_offload_rl.config.schema.megatron import MegatronConfig
from nemo_offload_rl.config.schema.policy import PolicyConfig, has_logprob_batches, row_multiple, sequence_multiple
from nemo_offload_rl.config.schema.value_types import RowTokens
from nemo_offload_rl.memory.units import round_up
from nemo_offload_rl.plan.architecture import UnknownArchitectureError, read_architecture
from nemo_offload_rl.plan.model_facts import DTYPE_BYTES, num_layers_of_stage
from nemo_offload_rl.plan.saved_tensors import QUERIES_KEYS_VALUES, SAVED_BY, ActivationFacts, SavedTensor
from nemo_offload_rl.plan.values import with_values

# Every storage in the host pool starts at a page.
SLAB_ALIGNMENT_BYTES = 4096
# Routing is uneven, so host memory is reserved for this multiple of the average load of a rank's experts. It is an
# assumption; a group that does not fit stays on the GPU.
EXPERT_LOAD_FACTOR = 1.25
# Small tensors that attention saves beside those listed in `saved_tensors`, at most a page each: row offsets, seeds.
# They are offloaded only if the recipe's smallest offloaded size lets them.
_NUM_SMALL_TENSORS_OF_ATTENTION = 8
_SMALL_TENSOR_ELEMENTS = SLAB_ALIGNMENT_BYTES // 4
# Storages that several modules of a layer save: their GPU memory is freed only when all of these modules offload them.
_SAVED_BY_SEVERAL: Mapping[str, frozenset[str]] = {"attention's output": frozenset({"core_attn", "attn_proj"})}


def limit_where_unknown(settings: ActivationOptions, error: UnknownArchitectureError) -> int:
    """Returns the recipe's limit on host memory, for a model whose activation sizes cannot be computed.

    Raises:
        ValueError: the recipe sets no limit.
    """
    if settings.host_memory_limit_bytes is None:
        raise ValueError(
            f"The host memory for this model's activations cannot be computed ({str(error).partition('. ')[0]}); give "
            "it in policy.activation_offload.host_memory_limit_gib."
        ) from error
    return settings.host_memory_limit_bytes


@dataclass(frozen=True)
class ModuleBytes:
    """Counts the bytes that one module offloads.

    Attributes:
        saved: bytes per layer and micro-batch; a tensor that is saved twice counts twice.
        distinct: bytes per layer and micro-batch, without storages that an earlier module has offloaded already.
        held: the part of `distinct` that stays allocated on the GPU, since a module that is not offloaded saves it too.
        micro_batch: `distinct` per micro-batch, over the layers of the stage that are offloaded at the recipe's
            fraction.
        in_flight: `micro_batch` for all micro-batches in flight.
    """

    saved: int
    distinct: int
    held: int
    micro_batch: int
    in_flight: int


def chunks_in_flight(
    num_microbatches: int, *, stage: int, num_stages: int, num_model_chunks: int, group_size: int
) -> int:
    """Returns how many model-chunk forward passes wait for their backward pass at most, in megatron-core's schedules.

    These are a stage's warm-up passes and the first of 1F1B (core pipeline_parallel/schedules.py,
    `get_pp_rank_microbatches`).

    Args:
        num_microbatches: micro-batches of a step on this rank.
        stage: the pipeline stage, from 0.
        num_stages: the pipeline-parallel size.
        num_model_chunks: virtual stages; 1 without.
        group_size: microbatch_group_size_per_vp_stage; only read with several model chunks.
    """
    if num_stages == 1:
        return 1
    stages_after = num_stages - stage - 1
    warm_up = stages_after
    if num_model_chunks > 1:
        warm_up = 2 * stages_after + (num_model_chunks - 1) * group_size
    return min(num_microbatches * num_model_chunks, warm_up + 1)


def module_bytes(facts: ActivationFacts, settings: ActivationOptions) -> dict[str, ModuleBytes]:
    """Returns the bytes of each offloaded module, in forward order; experts count at average load."""
    offloaded = _offloaded(facts, settings)
    in_chunk = _num_offloaded_groups(facts, settings)
    out = {}
    for name, tensors in offloaded.items():
        distinct = sum(tensor.nbytes for tensor in tensors)
        out[name] = ModuleBytes(
            saved=sum(tensor.nbytes for tensor in _moved(facts, settings, name)),
            distinct=distinct,
            held=sum(tensor.nbytes for tensor in tensors if _is_held(tensor, settings)),
            micro_batch=distinct * in_chunk[name] * facts.num_model_chunks,
            in_flight=distinct * in_chunk[name] * facts.num_chunks_in_flight,
        )
    return out


def with_busy_experts(facts: ActivationFacts) -> ActivationFacts:
    """Returns the sizes with `EXPERT_LOAD_FACTOR` times the average load of experts."""
    return dataclasses.replace(facts, num_expert_tokens=math.ceil(EXPERT_LOAD_FACTOR * facts.num_expert_tokens))


def needed_slab_bytes(facts: ActivationFacts, settings: ActivationOptions) -> int:
    """Returns the host memory that offloads every group of all micro-batches in flight.

    Experts count at `EXPERT_LOAD_FACTOR` times their average load.
    """
    busy = with_busy_experts(facts)
    sizes = {name: _group_bytes(name, tensors, settings) for name, tensors in _offloaded(busy, settings).items()}
    in_first, later = (
        sum(num_groups * sizes[name] for name, num_groups in _num_offloaded_groups(busy, settings, which).items())
        for which in (choose_in_first_pass, choose_offloaded)  # the first pass offloads other, perhaps more, groups
    )
    return max(in_first, later) * facts.num_chunks_in_flight


def slab_bytes(facts: ActivationFacts, settings: ActivationOptions) -> int:
    """Returns the host memory that one rank pins for activations: the recipe's limit, or else `needed_slab_bytes`.

    A group that does not fit stays on the GPU.
    """
    given = settings.host_memory_limit_bytes
    return needed_slab_bytes(facts, settings) if given is None else given


def _moved(facts: ActivationFacts, settings: ActivationOptions, module: str) -> list[SavedTensor]:
    recomputed = QUERIES_KEYS_VALUES if LAYER_INPUT in settings.modules else ()
    saved = [tensor for tensor in SAVED_BY[module](facts) if tensor.name not in recomputed]
    return [tensor for tensor in saved if tensor.num_elements >= max(1, settings.min_elements)]


def _is_held(tensor: SavedTensor, settings: ActivationOptions) -> bool:
    """Tells whether a module that is neither offloaded nor recomputed saves the storage, too."""
    is_alone = tensor.name in _SAVED_BY_SEVERAL and not _SAVED_BY_SEVERAL[tensor.name] <= set(settings.modules)
    return is_alone and LAYER_INPUT not in settings.modules


def _offloaded(facts: ActivationFacts, settings: ActivationOptions) -> dict[str, list[SavedTensor]]:
    """Returns for each module the storages of a layer that no earlier module has offloaded."""
    seen: set[str] = set()
    out = {}
    for module in SAVED_BY:
        if module in settings.modules:
            out[module] = [tensor for tensor in _moved(facts, settings, module) if tensor.name not in seen]
            seen |= {tensor.name for tensor in out[module]}
    return out


def _group_bytes(module: str, tensors: Sequence[SavedTensor], settings: ActivationOptions) -> int:
    """Returns the bytes of the host pool that one group takes."""
    moves_small = module == "core_attn" and settings.min_elements <= _SMALL_TENSOR_ELEMENTS
    listed = sum(round_up(tensor.nbytes, SLAB_ALIGNMENT_BYTES) for tensor in tensors)
    return listed + moves_small * _NUM_SMALL_TENSORS_OF_ATTENTION * SLAB_ALIGNMENT_BYTES


def _num_offloaded_groups(
    facts: ActivationFacts,
    settings: ActivationOptions,
    which: Callable[[Sequence[Sequence[int]], float], Sequence[bool]] = choose_offloaded,
) -> dict[str, int]:
    """Counts for each module the layers of a model chunk that are offloaded at the recipe's fraction."""
    sizes = {name: sum(tensor.nbytes for tensor in tensors) for name, tensors in _offloaded(facts, settings).items()}
    later = [name for name in sizes if name != LAYER_INPUT]
    layers = [
        later if index % facts.num_layers_of_segment or (facts.receives_input and index == 0) else list(sizes)
        for index in range(-(-facts.num_layers // facts.num_model_chunks))
    ]
    chosen = which([[sizes[name] for name in layer] for layer in layers], settings.fraction)
    return Counter(dict.fromkeys(sizes, 0)) + Counter(compress(chain(*layers), chosen))


AUTO: Literal["auto"] = "auto"
RowTokensKey = Literal["train_mb_tokens", "logprob_mb_tokens"]
TRAIN_TOKENS: Literal["train_mb_tokens"] = "train_mb_tokens"
LOGPROB_TOKENS: Literal["logprob_mb_tokens"] = "logprob_mb_tokens"


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
            element_size=DTYPE_BYTES[policy["precision"]],
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


@dataclass(frozen=True)
class RowSizes:
    """Holds how long the rows of a rank's micro-batches may be, in tokens.

    Attributes:
        longest: the longest sequence, without padding.
        multiple: what the tokens of each sequence are padded to a multiple of.
        packed_multiple: what those of a packed row are; None where rows are not packed.
        packed_tokens: for each kind of pass, the most tokens of a packed row.
        largest_first: whether a rank runs its packed rows in descending order of their tokens.
        most_logprob_tokens: a log-prob pass's longest micro-batch, padding included; 0 without such passes.
    """

    longest: int
    multiple: int
    packed_multiple: int | None
    packed_tokens: Mapping[RowTokensKey, int]
    largest_first: bool
    most_logprob_tokens: int


def row_sizes(policy: PolicyConfig) -> RowSizes:
    """Returns the sizes of rows that the recipe's `policy` section says, resolved for the ranks' machine.

    Raises:
        ValueError: the tokens of a packed row are still `auto`.
    """
    packing = policy["sequence_packing"]
    packed: dict[RowTokensKey, int] = {}
    for key in (TRAIN_TOKENS, LOGPROB_TOKENS) if packing["enabled"] else ():
        if (tokens := packing.get(key)) == AUTO:
            raise ValueError(
                f"policy.sequence_packing.{key} is auto, which a run replaces by a number before it starts its "
                "workers; give a worker that you build yourself a number of tokens."
            )
        if tokens is not None:
            packed[key] = tokens
    return RowSizes(
        longest=policy["max_total_sequence_length"],
        multiple=sequence_multiple(policy),
        packed_multiple=row_multiple(policy) if packing["enabled"] else None,
        packed_tokens=packed,
        largest_first=packing.get("microbatch_order") == "largest_first",
        most_logprob_tokens=micro_batch_tokens(policy, LOGPROB_TOKENS, 1) if has_logprob_batches(policy) else 0,
    )


def with_tokens(config: MasterConfig, tokens: Mapping[RowTokensKey, RowTokens]) -> MasterConfig:
    """Returns a config with the given values in policy.sequence_packing."""
    return with_values(config, {f"policy.sequence_packing.{key}": value for key, value in tokens.items()})


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
