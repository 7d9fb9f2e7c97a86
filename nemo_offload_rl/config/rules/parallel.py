"""Rules for parallel sizes, batch sizes and packed rows: they fit the cluster and the model."""

from typing import Any

from nemo_offload_rl.config.algorithms import AlgorithmSpec
from nemo_offload_rl.config.megatron import GRAPH_IMPL_KEY as GRAPHS
from nemo_offload_rl.config.megatron import DeviceSplit, checked_split, data_parallel_size, num_interleaved
from nemo_offload_rl.config.model.families import (
    NUM_EXPERTS_KEYS,
    NUM_HEADS_KEYS,
    NUM_LAYERS_KEYS,
    count_of,
    has_experts,
    model_fields,
)
from nemo_offload_rl.config.problems import show
from nemo_offload_rl.config.rules import base
from nemo_offload_rl.config.rules.base import RuleResult, note, rule

VIRTUAL_STAGES = f"{base.MEGATRON}.virtual_pipeline_model_parallel_size"
GROUP_SIZE = f"{base.MEGATRON}.microbatch_group_size_per_vp_stage"


@rule(base.TP, base.PP, base.CP, base.GPUS, base.NODES, base.COLOCATED)
@rule(base.EP, base.ETP, base.PP, base.GPUS, base.NODES, base.COLOCATED)
def parallel_world_size(one: int, two: int, three: int, gpus: int, nodes: int, apart: Any) -> RuleResult:
    """Requires the ranks to be a whole number of replicas of the model, and of its experts."""
    split = checked_split(gpus, nodes, apart)
    ranks = split.policy_ranks if isinstance(split, DeviceSplit) else gpus * nodes  # another rule reports the split
    if data_parallel_size(ranks, one, two, three) is not None:
        return None
    generation = "" if ranks == gpus * nodes else " less those of generation"
    return (
        f"gives replicas of {one} x {two} x {three} ranks with the parallel sizes beside it, which do not divide the "
        f"{ranks} ranks of the cluster ({base.GPUS} {gpus} x {base.NODES} {nodes}{generation}); change either"
    )


@rule(
    "policy.train_global_batch_size",
    "policy.train_micro_batch_size",
    f"{VIRTUAL_STAGES}?",
    f"{GROUP_SIZE}?",
    base.PACKING,
    *(base.TP, base.PP, base.CP, base.GPUS, base.NODES, base.COLOCATED),
)
def virtual_pipeline_micro_batches(
    gbs: int, mbs: int, vpp: int | None, group_size: int | None, packs: bool, *sizes: Any
) -> RuleResult:
    """Requires virtual stages to have a pipeline, and a training step as many micro-batches as their schedule takes.

    Micro-batches that fill up a forward-only pass have no effect on its results, but in training, experts would count
    their tokens. Packed samples can be split into any number of micro-batches up to their own.
    """
    tp, pp, cp, gpus, nodes, apart = sizes
    if vpp is None:
        return None
    if pp == 1 or vpp == 1:
        return VIRTUAL_STAGES, f"is {vpp} with {base.PP} {pp}, but both must be 2 or more; change one, or set null"
    if group_size is not None and group_size < pp:
        return GROUP_SIZE, f"is {group_size}, below {base.PP} ({pp}); set it to null, or to {pp} or more"
    split = checked_split(gpus, nodes, apart)
    dp = data_parallel_size(split.policy_ranks, tp, pp, cp) if isinstance(split, DeviceSplit) else None
    if dp is None or gbs % (dp * mbs):  # another rule reports it
        return None
    samples = 1 if packs else mbs
    number = gbs // (dp * samples)
    needed = num_interleaved(number, pp, pp if group_size is None else group_size)
    if number == needed:
        return None
    return (
        f"is {gbs}, {number} {'samples' if packs else 'micro-batches'} for each data-parallel rank, but "
        f"{VIRTUAL_STAGES} {vpp} needs {needed}; set it to {needed * samples * dp}, or use no virtual stages"
    )


@rule(
    base.PP,
    f"{VIRTUAL_STAGES}?",
    f"{base.MEGATRON}.num_layers_in_first_pipeline_stage",
    f"{base.MEGATRON}.num_layers_in_last_pipeline_stage",
    f"{base.MEGATRON}.pipeline_model_parallel_layout?",
    *base.MODEL_FIELDS,
)
def pipeline_layers(
    pp: int, vpp: int | None, first: int | None, last: int | None, layout: Any, *model: Any
) -> RuleResult:
    """Requires the layers that the first and last stage leave to divide evenly among the other stages."""
    layers = count_of(model_fields(*model), NUM_LAYERS_KEYS)
    if layers is None or layout is not None:
        return None
    stages = pp - (first is not None) - (last is not None)
    rest = layers - (first or 0) - (last or 0)
    if stages == 0 and rest == 0:
        return None
    chunks = stages * (vpp or 1)
    if stages > 0 and rest > 0 and rest % chunks == 0:
        return None
    return (
        f"is {pp}, but {rest} of the model's {layers} layers cannot be split evenly over {chunks} stages; change it, "
        "or set num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage"
    )


@rule(base.TP, *base.MODEL_FIELDS)
@rule("policy.generation.vllm_cfg.tensor_parallel_size", *base.MODEL_FIELDS)
def tensor_parallel_heads(tp: int, *model: Any) -> RuleResult:
    """Requires whole attention heads on each tensor-parallel rank, and on each GPU of an engine."""
    heads = count_of(model_fields(*model), NUM_HEADS_KEYS)
    if heads is None or heads % tp == 0:
        return None
    return f"is {tp}, which does not divide the model's {heads} attention heads; choose a divisor"


@rule(base.EP, *base.MODEL)
def expert_parallel_experts(ep: int, *model: Any) -> RuleResult:
    """Refuses expert parallelism for a dense model, and uneven shares of the experts."""
    is_moe = has_experts(*model)
    if ep == 1 or is_moe is None:
        return None
    if not is_moe:
        name = "policy.hf_config" if model[1] else f"the model {show(model[0])}"
        return f"is {ep}, but {name} is a dense model; set it to 1"
    experts = count_of(model_fields(*model[:3]), NUM_EXPERTS_KEYS)
    assert experts is not None, "a model's kind is known by their number"
    if experts % ep == 0:
        return None
    return f"is {ep}, which does not divide the model's {experts} experts; choose a divisor"


@rule(f"{base.MEGATRON}.sequence_parallel", base.TP, *base.MODEL)
def sequence_parallel_experts(sequence_parallel: bool, tp: int, *model: Any) -> RuleResult:
    """Refuses tensor-parallel experts without sequence parallelism, which megatron-core rejects in the first step."""
    if sequence_parallel or tp == 1 or not has_experts(*model):
        return None
    return f"is false, but a mixture of experts needs it with {base.TP} {tp}; set this to true, or {base.TP} to 1"


@rule(f"{base.MEGATRON}.sequence_parallel", base.TP, base.DIVISOR, base.LENGTH)
def sequence_parallel_length(enabled: bool, tp: int, multiple: int, longest: int) -> RuleResult:
    """Requires sequences that split evenly over the tensor-parallel ranks."""
    if not enabled or tp == 1 or longest % multiple == 0:
        return None
    return f"needs {base.LENGTH} ({longest}) to be a multiple of {base.DIVISOR} ({multiple})"


@rule("cluster.segment_size?", base.NODES)
def cluster_segment_size(size: int | None, nodes: int) -> RuleResult:
    """Requires the nodes to be a whole number of segments."""
    if size is None or nodes % size == 0:
        return None
    return f"is {size}, which does not divide {base.NODES} ({nodes}); change either, or set it to null"


@rule(f"{base.MEGATRON}.moe_expert_capacity_factor?", base.OFFLOADING, GRAPHS)
def moe_expert_capacity_factor(capacity: float | None, enabled: bool, graphs: str) -> RuleResult:
    """Refuses dropped tokens with both offloading and CUDA graphs, which was never compared with plain steps."""
    if capacity is None or not enabled or graphs == "none":
        return None
    return f"is {show(capacity)}, which drops tokens and excludes {base.OFFLOADING} beside {GRAPHS}; switch one off"


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
