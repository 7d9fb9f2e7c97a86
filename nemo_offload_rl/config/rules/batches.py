"""Rules for batch sizes and sequence lengths."""

import math
from typing import Any

from nemo_offload_rl.config.algorithms import AlgorithmSpec
from nemo_offload_rl.config.megatron.device_split import DeviceSplit, checked_split
from nemo_offload_rl.config.megatron.graph_modules import GRAPH_IMPL_KEY as GRAPHS
from nemo_offload_rl.config.megatron.parallel_sizes import data_parallel_size
from nemo_offload_rl.config.rules.base import (
    COLOCATED,
    CP,
    DIVISOR,
    GPUS,
    LENGTH,
    MEGATRON,
    NODES,
    PACKING,
    PP,
    SPEC,
    TP,
    Verdict,
    note,
    rule,
)


@rule("policy.train_global_batch_size", "policy.train_micro_batch_size", TP, PP, CP, GPUS, NODES, COLOCATED)
def micro_batches_fill_global_batch(
    gbs: int, mbs: int, tp: int, pp: int, cp: int, gpus: int, nodes: int, apart: dict[str, Any] | None
) -> Verdict:
    """Refuses a global batch that is not the same number of whole micro-batches on every data-parallel rank."""
    split = checked_split(gpus, nodes, apart)
    if not isinstance(split, DeviceSplit):
        return None  # another rule reports this
    return _fills(gbs, mbs, "policy.train_micro_batch_size", tp * pp * cp, split.policy_ranks)


@rule("sft.val_global_batch_size", "sft.val_micro_batch_size", TP, PP, CP, GPUS, NODES)
def micro_batches_fill_validation_batch(
    gbs: int, mbs: int, tp: int, pp: int, cp: int, gpus: int, nodes: int
) -> Verdict:
    """Refuses a validation batch that is not the same number of whole micro-batches on every data-parallel rank."""
    return _fills(gbs, mbs, "sft.val_micro_batch_size", tp * pp * cp, gpus * nodes)


@rule("dpo.val_global_batch_size", "dpo.val_micro_batch_size", TP, PP, CP, GPUS, NODES)
def micro_batches_of_pairs_fill_validation_batch(
    gbs: int, mbs: int, tp: int, pp: int, cp: int, gpus: int, nodes: int
) -> Verdict:
    """Refuses a validation batch that is not the same number of whole micro-batches on every data-parallel rank."""
    return _fills(gbs, mbs, "dpo.val_micro_batch_size", tp * pp * cp, gpus * nodes)


def _fills(gbs: int, mbs: int, mbs_key: str, model_parallel: int, world: int) -> Verdict:
    dp = data_parallel_size(world, model_parallel)  # another rule reports None
    if dp is None or gbs % (dp * mbs) == 0:
        return None
    return f"is {gbs}, which is not a multiple of data-parallel size {dp} x {mbs_key} {mbs} = {dp * mbs}; change either"


@rule("data.max_input_seq_length", LENGTH)
def prompts_fit_into_sequences(prompt: int, total: int) -> Verdict:
    """Refuses a prompt limit above the limit of the whole sequence."""
    if prompt <= total:
        return None
    return f"is {prompt}, above {LENGTH} ({total}); lower it, or raise that"


@rule("policy.generation.max_new_tokens", LENGTH)
def answers_fit_into_sequences(new: int, total: int) -> Verdict:
    """Refuses an answer limit above the limit of the whole sequence."""
    if new <= total:
        return None
    return f"is {new}, above {LENGTH} ({total}); lower it, or raise that"


def padded_row(longest: int, divisible_by: int) -> tuple[int, str]:
    """Returns the number of tokens of the longest sequence after padding, and the words for it in a message."""
    padded = math.ceil(longest / divisible_by) * divisible_by
    return padded, f"{longest}" if padded == longest else f"{longest}, which {DIVISOR} {divisible_by} makes {padded}"


@rule(
    PACKING,
    "policy.sequence_packing.train_mb_tokens?",
    "policy.sequence_packing.logprob_mb_tokens?",
    "policy.sequence_packing.sequence_length_round?",
    "policy.sequence_packing.algorithm?",
    LENGTH,
    SPEC,
)
def packing_has_its_sizes(
    enabled: bool,
    train: int | str | None,
    logprob: int | str | None,
    rounding: int | None,
    algorithm: str | None,
    longest: int,
    spec: AlgorithmSpec,
) -> Verdict:
    """Requires the keys of packing, and rows that hold a longest group of sequences that are kept together.

    NeMo-RL packs single sequences alone, which it accepts up to the size of a row, whatever the longest may be.
    """
    if not enabled:
        return None
    sizes = {"train_mb_tokens": train, "sequence_length_round": rounding, "algorithm": algorithm}
    if spec.computes_logprobs:
        sizes["logprob_mb_tokens"] = logprob
    missing = [name for name, size in sizes.items() if size is None]
    if missing:
        return f"is true, which needs policy.sequence_packing.{' and '.join(missing)} too"
    if spec.group_size == 1:
        return None
    for name in ("train_mb_tokens", "logprob_mb_tokens"):
        size = sizes[name] if name in sizes else None
        if isinstance(size, int) and size < longest * spec.group_size:
            return (
                f"needs {name} ({size}) to be at least {spec.group_size} x {LENGTH} ({longest}); raise "
                f"policy.sequence_packing.{name}"
            )
    return None


@note(PACKING, "policy.sequence_packing.train_mb_tokens?", "policy.sequence_packing.logprob_mb_tokens?", LENGTH)
def long_samples_may_not_fit_into_rows(
    enabled: bool, train: int | str | None, logprob: int | str | None, longest: int
) -> Verdict:
    """Notes that a sample which the sequence limit allows may be too long for a packed row."""
    if not enabled:
        return None
    for name, size in (("train_mb_tokens", train), ("logprob_mb_tokens", logprob)):
        if isinstance(size, int) and size < longest:
            return (
                f"policy.sequence_packing.{name}",
                f"is {size}, below {LENGTH} ({longest}): as in NeMo-RL, a sample of more than {size} tokens stops the "
                "run",
            )
    return None


@rule(PACKING, "policy.sequence_packing.train_mb_tokens?", "policy.sequence_packing.logprob_mb_tokens?", GRAPHS)
def packed_rows_beside_graphs_have_a_stated_size(
    enabled: bool, train: int | str | None, logprob: int | str | None, impl: str
) -> Verdict:
    """Refuses auto with CUDA graphs.

    The plan does not count the memory that captured graphs keep, so it cannot say how many tokens fit.
    """
    if not enabled or impl == "none":
        return None
    for name, size in (("train_mb_tokens", train), ("logprob_mb_tokens", logprob)):
        if size == "auto":
            return (
                f"policy.sequence_packing.{name}",
                f"is auto, but with {GRAPHS} {impl} graphs keep GPU memory that the plan does not count; set it to a "
                "number of tokens",
            )
    return None


@rule("policy.sequence_packing.algorithm?", PACKING)
def packing_has_an_algorithm(algorithm: str | None, enabled: bool) -> Verdict:
    """Refuses modified_ffd with packing: NeMo-RL's recipes without packing have it, but NeMo-RL's packer does not."""
    if not enabled or algorithm != "modified_ffd":
        return None
    return "is modified_ffd, which NeMo-RL's packer does not support, either; set it to modified_first_fit_decreasing"


@rule(
    PACKING,
    "policy.sequence_packing.train_mb_tokens?",
    "policy.sequence_packing.sequence_length_round?",
    GRAPHS,
    f"{MEGATRON}.sequence_parallel",
    TP,
)
def packed_rows_are_split_evenly(
    enabled: bool, train: int | str | None, rounding: int | None, impl: str, sequence_parallel: bool, tp: int
) -> Verdict:
    """Requires packed rows that split evenly over the tensor-parallel ranks.

    With CUDA graphs, this holds for the row that is padded to its full number of tokens.
    """
    if not enabled or not sequence_parallel:
        return None
    for name, size in (("sequence_length_round", rounding), ("train_mb_tokens", train if impl != "none" else None)):
        if isinstance(size, int) and size % tp:
            return (
                f"policy.sequence_packing.{name}",
                f"must be a multiple of {TP} ({tp}), over whose ranks sequence parallelism splits a row; found {size}",
            )
    return None


@rule("policy.logprob_chunk_size?", SPEC)
def chunks_are_of_log_prob_passes(chunk: int | None, spec: AlgorithmSpec) -> Verdict:
    """Refuses a chunk size for an algorithm that computes log-probs only in training and would not read it."""
    if chunk is None or spec.computes_logprobs:
        return None
    return (
        f"is {chunk}, but {spec.name} computes log-probs only in training; set it to null, and "
        f"{MEGATRON}.use_fused_linear_logprobs to true"
    )
