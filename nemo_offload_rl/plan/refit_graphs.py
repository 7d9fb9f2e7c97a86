"""Computes the GPU memory that a refit's CUDA graphs keep between refits: pools of temporaries, in two processes.

All graphs of a process share one pool and are replayed one at a time, so the pool is as large as the largest graph's
temporaries.
"""

from collections.abc import Sequence

from nemo_offload_rl.config.megatron import exchanges_weights
from nemo_offload_rl.config.schema.policy import PolicyConfig
from nemo_offload_rl.memory.units import GIB, MIB, round_up
from nemo_offload_rl.plan.architecture import Architecture
from nemo_offload_rl.plan.model_facts import DTYPE_BYTES
from nemo_offload_rl.plan.plan import colocates_vllm

# torch's allocator, with its default settings, allocates segments of two sizes, each for tensors of up to half its
# size. A larger tensor gets a segment of its own, a multiple of the smaller size.
_SMALL_SEGMENT, _LARGE_SEGMENT = 2 * MIB, 20 * MIB


def refit_graph_bytes(policy: PolicyConfig, architecture: Architecture) -> int:
    """Returns the most memory that graphs keep on one GPU in both processes; 0 without vLLM on the policy's GPUs.

    Args:
        policy: the recipe's `policy` section, validated.
        architecture: the model's sizes.
    """
    if not colocates_vllm(policy):
        return 0
    of_loads = pool_bytes(())  # vLLM copies into its parameters, without temporaries
    dtype_bytes, cfg = DTYPE_BYTES[policy["precision"]], policy["megatron_cfg"]
    if exchanges_weights(cfg):
        temporaries = exchanged_temporaries(architecture, dtype_bytes, cfg["expert_model_parallel_size"])
        # Graphs that keep more are not used (`GraphSender`).
        return min(pool_bytes(temporaries), int(policy["refit_buffer_size_gb"] * GIB)) + of_loads
    return pool_bytes(export_temporaries(architecture, dtype_bytes)) + of_loads


def exchanged_temporaries(architecture: Architecture, dtype_bytes: int, num_expert_ranks: int) -> list[int]:
    """Returns a bound of the temporary tensors that an export holds at one time where ranks exchange weights.

    A weight is gathered into the ranks' shards, which are joined, while the weight before is still held: three times
    the largest weight. For 1.5 B parameters and a tensor-parallel size of 2, an H200 held 2.0 times the embedding.

    Args:
        architecture: the model's sizes; its weights are not split over ranks.
        dtype_bytes: bytes of an element.
        num_expert_ranks: ranks whose experts are gathered together, one of each.
    """
    gate_and_up_rows = [2 * architecture.dense_ffn_hidden_size]
    if architecture.num_experts is not None:
        gate_and_up_rows.append(2 * architecture.ffn_hidden_size * num_expert_ranks)
    qkv_rows = (architecture.num_heads + 2 * architecture.num_query_groups) * architecture.head_dim
    largest = max(architecture.vocab_size, qkv_rows, *gate_and_up_rows)
    return [largest * architecture.hidden_size * dtype_bytes] * 3


def export_temporaries(architecture: Architecture, dtype_bytes: int) -> list[int]:
    """Returns the bytes of each temporary tensor that an export holds at one time: those of one layer's attention.

    Query, key and value are interleaved by group in one matrix, and are copied out of it; so are their biases. All
    other weights are exported without a copy: gate and up projection are views, and a tied output layer is the
    embedding.

    Args:
        architecture: the model's sizes; its weights are not split over ranks.
        dtype_bytes: bytes of an element.
    """
    of_keys = architecture.num_query_groups * architecture.head_dim
    rows = (architecture.num_heads * architecture.head_dim, of_keys, of_keys)
    widths = (architecture.hidden_size, 1) if architecture.qkv_bias else (architecture.hidden_size,)
    return [num_rows * width * dtype_bytes for width in widths for num_rows in rows]


def pool_bytes(temporaries: Sequence[int]) -> int:
    """Returns the most memory that torch's allocator reserves for the CUDA graphs of one process.

    Besides the temporaries it keeps each graph's random-number state, on a stream of its own: one small segment.

    Args:
        temporaries: bytes of each tensor that a graph holds at one time.
    """
    small = sum(size for size in temporaries if size <= _SMALL_SEGMENT // 2)
    large = sum(size for size in temporaries if _SMALL_SEGMENT // 2 < size < _LARGE_SEGMENT // 2)
    own = [round_up(size, _SMALL_SEGMENT) for size in temporaries if size >= _LARGE_SEGMENT // 2]
    return _SMALL_SEGMENT + _shared(small, _SMALL_SEGMENT) + _shared(large, _LARGE_SEGMENT) + sum(own)


def _shared(nbytes: int, segment: int) -> int:
    """Returns the most bytes of segments for tensors that share them.

    torch allocates another segment only if all others are more than half full.
    """
    return -(-nbytes // (segment // 2)) * segment
