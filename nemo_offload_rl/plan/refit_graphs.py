"""What a refit's CUDA graphs keep on the GPU between refits: pools of temporaries, in two processes.

All graphs of a process share one pool and are replayed in turn, so that it holds the largest need of one of them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from nemo_offload_rl.memory.units import MIB, round_up
from nemo_offload_rl.plan.architecture import Architecture
from nemo_offload_rl.plan.engine_targets import has_vllm_beside_it
from nemo_offload_rl.plan.model_facts import DTYPE_BYTES

# Over these kinds of parallelism ranks exchange weights in an export, which is then not recorded.
_EXCHANGED = ("tensor_model", "pipeline_model", "expert_model", "expert_tensor")

# torch's allocator, as it is set by default, takes memory in segments of two sizes, each for tensors of up to half of
# it; and for a larger tensor a segment of its own, a multiple of the smaller size.
_SMALL_SEGMENT, _LARGE_SEGMENT = 2 * MIB, 20 * MIB


def refit_graph_bytes(policy: Mapping[str, Any], architecture: Architecture) -> int:
    """Returns the most that graphs keep on one GPU in both processes; 0 where refits are not replayed.

    Args:
        policy: the recipe's section, validated.
        architecture: of the model.
    """
    sizes = [policy["megatron_cfg"][f"{kind}_parallel_size"] for kind in _EXCHANGED]
    if not has_vllm_beside_it(policy) or any(size > 1 for size in sizes):
        return 0
    of_export = export_temporaries(architecture, DTYPE_BYTES[policy["precision"]])
    return pool_bytes(of_export) + pool_bytes(())  # vLLM copies into its parameters, without temporaries


def export_temporaries(architecture: Architecture, dtype_bytes: int) -> list[int]:
    """Returns the bytes of each tensor that an export makes anew and has at one time: those of one layer's attention.

    Query, key and value lie mixed in one matrix, group by group, and are copied out of it; their biases likewise. All
    else is exported as it lies: the halves of gate and up are views, and a tied output layer is the embedding.

    Args:
        architecture: of the model, none of whose weights is split over ranks.
        dtype_bytes: of an element.
    """
    of_keys = architecture.num_query_groups * architecture.head_dim
    rows = (architecture.num_heads * architecture.head_dim, of_keys, of_keys)
    widths = (architecture.hidden_size, 1) if architecture.qkv_bias else (architecture.hidden_size,)
    return [num_rows * width * dtype_bytes for width in widths for num_rows in rows]


def pool_bytes(temporaries: Sequence[int]) -> int:
    """Returns the most that torch takes from the driver for the graphs of one process.

    Besides temporaries it keeps the state of random numbers of each graph, on a stream of its own: one small segment.

    Args:
        temporaries: bytes of each tensor that is there at one time.
    """
    small = sum(size for size in temporaries if size <= _SMALL_SEGMENT // 2)
    large = sum(size for size in temporaries if _SMALL_SEGMENT // 2 < size < _LARGE_SEGMENT // 2)
    own = [round_up(size, _SMALL_SEGMENT) for size in temporaries if size >= _LARGE_SEGMENT // 2]
    return _SMALL_SEGMENT + _shared(small, _SMALL_SEGMENT) + _shared(large, _LARGE_SEGMENT) + sum(own)


def _shared(nbytes: int, segment: int) -> int:
    """Returns the most for tensors that share segments, as another is taken only where all are more than half full."""
    return -(-nbytes // (segment // 2)) * segment
