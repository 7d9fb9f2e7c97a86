"""Batches and lengths fit each other."""

from typing import Any

from nemo_offload_rl.config.rules.base import CP, GPUS, NODES, PP, TP, Verdict, rule


@rule("policy.train_global_batch_size", "policy.train_micro_batch_size", TP, PP, CP, GPUS, NODES)
def micro_batches_fill_global_batch(gbs: int, mbs: int, tp: int, pp: int, cp: int, gpus: int, nodes: int) -> Verdict:
    """Every data-parallel rank gets the same number of whole micro-batches."""
    return _fills(gbs, mbs, "policy.train_micro_batch_size", tp * pp * cp, gpus * nodes)


@rule("sft.val_global_batch_size", "sft.val_micro_batch_size", TP, PP, CP, GPUS, NODES)
def micro_batches_fill_validation_batch(
    gbs: int, mbs: int, tp: int, pp: int, cp: int, gpus: int, nodes: int
) -> Verdict:
    """Every data-parallel rank gets the same number of whole micro-batches."""
    return _fills(gbs, mbs, "sft.val_micro_batch_size", tp * pp * cp, gpus * nodes)


def _fills(gbs: int, mbs: int, mbs_key: str, model_parallel: int, world: int) -> Verdict:
    if world % model_parallel:
        return None  # reported at the parallel sizes
    dp = world // model_parallel
    if gbs % (dp * mbs) == 0:
        return None
    return f"is {gbs}, which is no multiple of data-parallel size {dp} x {mbs_key} {mbs} = {dp * mbs}; change either"


@rule("data.max_input_seq_length", "policy.max_total_sequence_length")
def prompts_fit_into_sequences(prompt: int, total: int) -> Verdict:
    """A prompt is part of a sequence."""
    return None if prompt <= total else f"is {prompt}, above policy.max_total_sequence_length ({total})"


@rule("policy.generation.max_new_tokens", "policy.max_total_sequence_length")
def answers_fit_into_sequences(new: int, total: int) -> Verdict:
    """An answer is part of a sequence."""
    return None if new <= total else f"is {new}, above policy.max_total_sequence_length ({total})"


@rule(
    "policy.sequence_packing.enabled",
    "policy.sequence_packing.train_mb_tokens?",
    "policy.sequence_packing.logprob_mb_tokens?",
    "policy.sequence_packing.sequence_length_round?",
    "policy.sequence_packing.algorithm?",
    "policy.max_total_sequence_length",
    "policy.generation?",
)
def packing_has_its_sizes(
    enabled: bool,
    train: int | None,
    logprob: int | None,
    rounding: int | None,
    algorithm: str | None,
    longest: int,
    generation: dict[str, Any] | None,
) -> Verdict:
    """A packed row has a stated size that the longest sequence fits into."""
    if not enabled:
        return None
    sizes = {"train_mb_tokens": train, "sequence_length_round": rounding, "algorithm": algorithm}
    if generation is not None:
        sizes["logprob_mb_tokens"] = logprob
    missing = [name for name, size in sizes.items() if size is None]
    if missing:
        return f"is true, which needs policy.sequence_packing.{' and '.join(missing)} too"
    for name in ("train_mb_tokens", "logprob_mb_tokens"):
        size = sizes[name] if name in sizes else None
        if isinstance(size, int) and size < longest:
            return f"needs {name} ({size}) to be at least policy.max_total_sequence_length ({longest})"
    return None
