"""Rules for batch sizes and packed rows."""

from typing import Any

from nemo_offload_rl.config.algorithms import AlgorithmSpec
from nemo_offload_rl.config.megatron import GRAPH_IMPL_KEY as GRAPHS
from nemo_offload_rl.config.megatron import DeviceSplit, checked_split, data_parallel_size
from nemo_offload_rl.config.rules import base
from nemo_offload_rl.config.rules.base import RuleResult, note, rule

_RANKS = (base.TP, base.PP, base.CP, base.GPUS, base.NODES, base.COLOCATED)
_PACKING = "policy.sequence_packing"
_SIZES = (f"{_PACKING}.train_mb_tokens?", f"{_PACKING}.logprob_mb_tokens?", f"{_PACKING}.sequence_length_round?")


@rule("policy.train_global_batch_size", "policy.train_micro_batch_size", *_RANKS)
@rule(f"{base.SECTION}.val_global_batch_size", f"{base.SECTION}.val_micro_batch_size", *_RANKS)
def batch_micro_batches(
    gbs: int, mbs: int, tp: int, pp: int, cp: int, gpus: int, nodes: int, apart: dict[str, Any] | None
) -> RuleResult:
    """Refuses a batch that is not the same number of whole micro-batches on every data-parallel rank."""
    split = checked_split(gpus, nodes, apart)
    dp = data_parallel_size(split.policy_ranks, tp * pp * cp) if isinstance(split, DeviceSplit) else None
    if dp is None or gbs % (dp * mbs) == 0:  # another rule reports None
        return None
    return f"is {gbs}, which is not a multiple of data-parallel size {dp} x micro-batch size {mbs}; change either"


@rule(base.PACKING, *_SIZES, f"{_PACKING}.algorithm?", base.LENGTH, base.SPEC)
def packing_sizes(
    enabled: bool,
    train: int | str | None,
    logprob: int | str | None,
    rounding: int | None,
    algorithm: str | None,
    longest: int,
    spec: AlgorithmSpec,
) -> RuleResult:
    """Requires the keys of packing, and rows that hold a longest group of sequences that are kept together.

    NeMo-RL packs single sequences alone, which it accepts up to the size of a row, whatever the longest may be.
    """
    if not enabled:
        return None
    if algorithm == "modified_ffd":  # NeMo-RL's recipes without packing have it
        key = f"{_PACKING}.algorithm"
        return key, "is modified_ffd, which NeMo-RL's packer lacks, too; set it to modified_first_fit_decreasing"
    sizes = {"train_mb_tokens": train, "sequence_length_round": rounding, "algorithm": algorithm}
    sizes |= {"logprob_mb_tokens": logprob} if spec.computes_logprobs else {}
    missing = [name for name, size in sizes.items() if size is None]
    if missing:
        return f"is true, which needs {_PACKING}.{' and '.join(missing)} too"
    if spec.group_size == 1:
        return None
    for name in ("train_mb_tokens", "logprob_mb_tokens"):
        size = sizes[name] if name in sizes else None
        if isinstance(size, int) and size < longest * spec.group_size:
            least = f"{spec.group_size} x {base.LENGTH} ({longest})"
            return f"needs {name} ({size}) to be at least {least}; raise {_PACKING}.{name}"
    return None


@note(base.PACKING, f"{_PACKING}.train_mb_tokens?", f"{_PACKING}.logprob_mb_tokens?", base.LENGTH)
def packing_long_samples(enabled: bool, train: int | str | None, logprob: int | str | None, longest: int) -> RuleResult:
    """Notes that a sample which the sequence limit allows may be too long for a packed row."""
    if not enabled:
        return None
    for name, size in (("train_mb_tokens", train), ("logprob_mb_tokens", logprob)):
        if isinstance(size, int) and size < longest:
            return f"{_PACKING}.{name}", (
                f"is {size}, below {base.LENGTH} ({longest}): as in NeMo-RL, a sample of more than {size} tokens stops "
                "the run"
            )
    return None


@rule(base.PACKING, *_SIZES, GRAPHS, f"{base.MEGATRON}.sequence_parallel", base.TP)
def packing_row_sizes(
    enabled: bool, train: Any, logprob: Any, rounding: int | None, impl: str, sequence_parallel: bool, tp: int
) -> RuleResult:
    """Requires stated sizes beside graphs, whose memory auto does not count, and rows that split over the ranks."""
    graphs = impl != "none"
    for name, size in (("train_mb_tokens", train), ("logprob_mb_tokens", logprob)):
        if enabled and graphs and size == "auto":
            return f"{_PACKING}.{name}", f"is auto, which does not count the memory of graphs ({GRAPHS}); set a number"
    for name, size in (("sequence_length_round", rounding), ("train_mb_tokens", train if graphs else None)):
        if enabled and sequence_parallel and isinstance(size, int) and size % tp:
            return (
                f"{_PACKING}.{name}",
                f"must be a multiple of {base.TP} ({tp}) for sequence parallelism; found {size}",
            )
    return None
