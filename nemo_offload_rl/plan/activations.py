"""Computes the bytes of activations that offloading moves, and the host memory that they take, as pure functions.

`delta_offload_bytes_across_pp_ranks` is not counted: it keeps bytes on the GPU, but not those of a given micro-batch.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, compress

from nemo_offload_rl.activation_offload.schedule import ActivationOptions, choose_in_first_pass, choose_offloaded
from nemo_offload_rl.config.megatron import LAYER_INPUT
from nemo_offload_rl.memory.units import round_up
from nemo_offload_rl.plan.architecture import UnknownArchitectureError
from nemo_offload_rl.plan.saved_tensors import QUERIES_KEYS_VALUES, SAVED_BY, ActivationFacts, SavedTensor

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


def needed_slab_bytes(facts: ActivationFacts, settings: ActivationOptions) -> int:
    """Returns the host memory that offloads every group of all micro-batches in flight.

    Experts count at `EXPERT_LOAD_FACTOR` times their average load.
    """
    busy = dataclasses.replace(facts, num_expert_tokens=math.ceil(EXPERT_LOAD_FACTOR * facts.num_expert_tokens))
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
