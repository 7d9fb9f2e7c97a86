"""Rules for parallel sizes: they fit the cluster and the model."""

from typing import Any

from nemo_offload_rl.config.megatron.device_split import DeviceSplit, checked_split
from nemo_offload_rl.config.megatron.microbatches import gathers_different_rows, num_interleaved
from nemo_offload_rl.config.megatron.parallel_sizes import data_parallel_size
from nemo_offload_rl.config.model.model_kind import (
    NUM_EXPERTS_KEYS,
    NUM_HEADS_KEYS,
    NUM_LAYERS_KEYS,
    count_of,
    model_fields,
    model_kind,
)
from nemo_offload_rl.config.rules.base import (
    COLOCATED,
    CP,
    DIVISOR,
    EP,
    ETP,
    GPUS,
    LENGTH,
    MEGATRON,
    MODEL,
    MODEL_FIELDS,
    NODES,
    PACKING,
    PP,
    TP,
    Verdict,
    rule,
)

VIRTUAL_STAGES = f"{MEGATRON}.virtual_pipeline_model_parallel_size?"
GROUP_SIZE = f"{MEGATRON}.microbatch_group_size_per_vp_stage?"


@rule(TP, PP, CP, GPUS, NODES, COLOCATED)
def model_parallel_size_divides_world_size(tp: int, pp: int, cp: int, gpus: int, nodes: int, apart: Any) -> Verdict:
    """Requires the ranks to be a whole number of model replicas."""
    ranks, words = _ranks(gpus, nodes, apart)
    if data_parallel_size(ranks, tp, pp, cp) is not None:
        return None
    return f"tensor {tp} x pipeline {pp} x context {cp} = {tp * pp * cp} ranks per replica do not divide {words}"


@rule(EP, ETP, PP, GPUS, NODES, COLOCATED)
def expert_parallel_size_divides_world_size(ep: int, etp: int, pp: int, gpus: int, nodes: int, apart: Any) -> Verdict:
    """Requires the ranks to be a whole number of replicas of the experts."""
    ranks, words = _ranks(gpus, nodes, apart)
    if data_parallel_size(ranks, ep, etp, pp) is not None:
        return None
    return f"expert {ep} x expert tensor {etp} x pipeline {pp} = {ep * etp * pp} ranks do not divide {words}"


def _ranks(gpus: int, nodes: int, colocated: dict[str, Any] | None) -> tuple[int, str]:
    """Returns the number of the policy's ranks, and the words for them in a message."""
    split = checked_split(gpus, nodes, colocated)
    less = split.num_engine_devices if isinstance(split, DeviceSplit) else 0  # another rule reports an invalid split
    generation = f" less {less} of generation, {COLOCATED.removesuffix('?')}" if less else ""
    ranks = gpus * nodes - less
    return ranks, f"the {ranks} ranks of the cluster ({GPUS} {gpus} x {NODES} {nodes}{generation}); change either"


@rule(f"{MEGATRON}.moe_token_dispatcher_type?", PACKING, TP, PP, EP, ETP, *MODEL)
def packed_tokens_are_not_gathered(
    dispatcher: str | None, packs: bool, tp: int, pp: int, ep: int, etp: int, *model: Any
) -> Verdict:
    """Refuses megatron-core's allgather dispatcher with packed rows on a pipeline, or of several data-parallel ranks.

    Packed rows differ in length. Pipeline stages send each other the lengths, which this dispatcher cannot handle; and
    it gathers as many tokens from every rank that shares the experts.
    """
    if dispatcher != "allgather" or not packs or not model_kind(*model).has_experts:
        return None
    if pp > 1:
        rows = f"packed rows on a pipeline ({PP} {pp}, {PACKING} true)"
    elif gathers_different_rows(tp, ep, etp):
        rows = f"packed rows of different data-parallel ranks ({EP} {ep} x {ETP} {etp} above {TP} {tp}, {PACKING} true)"
    else:
        return None
    return f"is allgather, which does not support {rows}; set it to alltoall"


@rule(VIRTUAL_STAGES, PP)
def virtual_pipeline_needs_pipeline(vpp: int | None, pp: int) -> Verdict:
    """Refuses a virtual pipeline without pipeline stages for the interleaved schedule to divide chunks among."""
    if vpp is None:
        return None
    if pp == 1:
        return f"is {vpp}, but {PP} is 1; set it to null, or use pipeline parallelism"
    return None if vpp > 1 else "is 1, which leaves pipeline stages whole; set it to null, or to 2 or more"


@rule(GROUP_SIZE, VIRTUAL_STAGES, PP)
def groups_of_micro_batches_fill_the_pipeline(group_size: int | None, vpp: int | None, pp: int) -> Verdict:
    """Requires groups of micro-batches that keep all stages of a virtual pipeline busy."""
    if group_size is None or vpp is None or group_size >= pp:
        return None
    return f"is {group_size}, which is below {PP} ({pp}); set it to null, or to {pp} or more"


@rule(
    "policy.train_global_batch_size",
    "policy.train_micro_batch_size",
    VIRTUAL_STAGES,
    GROUP_SIZE,
    PACKING,
    *(TP, PP, CP, GPUS, NODES, COLOCATED),
)
def virtual_stages_train_whole_groups(
    gbs: int,
    mbs: int,
    vpp: int | None,
    group_size: int | None,
    packs: bool,
    *sizes: Any,
) -> Verdict:
    """Requires as many micro-batches in a training step as the schedule of virtual stages takes.

    Micro-batches that fill up a forward-only pass have no effect on its results, but in training, experts would count
    their tokens. Packed samples can be split into any number of micro-batches up to their own.
    """
    tp, pp, cp, gpus, nodes, apart = sizes
    dp = data_parallel_size(_ranks(gpus, nodes, apart)[0], tp, pp, cp)
    group_size = pp if group_size is None else group_size
    # Other rules report all but the first two.
    if vpp is None or pp == 1 or group_size < pp or dp is None or gbs % (dp * mbs):
        return None
    samples = 1 if packs else mbs
    number = gbs // (dp * samples)
    needed = num_interleaved(number, pp, group_size)
    if number == needed:
        return None
    return (
        f"is {gbs}, but with {VIRTUAL_STAGES.removesuffix('?')} {vpp} and {PP} {pp} a training step needs {needed} "
        f"{'samples' if packs else 'micro-batches'} on each data-parallel rank; found {number}: set it to "
        f"{needed * samples * dp}, or use no virtual stages"
    )


@rule(
    PP,
    VIRTUAL_STAGES,
    f"{MEGATRON}.num_layers_in_first_pipeline_stage",
    f"{MEGATRON}.num_layers_in_last_pipeline_stage",
    f"{MEGATRON}.pipeline_model_parallel_layout?",
    *MODEL_FIELDS,
)
def pipeline_stages_share_layers_evenly(
    pp: int, vpp: int | None, first: int | None, last: int | None, layout: Any, *model: Any
) -> Verdict:
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


@rule(TP, *MODEL_FIELDS)
def tensor_parallel_size_divides_heads(tp: int, *model: Any) -> Verdict:
    """Requires whole attention heads on each tensor-parallel rank."""
    heads = count_of(model_fields(*model), NUM_HEADS_KEYS)
    if heads is None or heads % tp == 0:
        return None
    return f"is {tp}, which does not divide the model's {heads} attention heads; choose a divisor"


@rule(EP, *MODEL)
def expert_parallel_needs_experts(
    ep: int,
    model_name: str,
    hf_config: dict[str, Any] | None,
    overrides: dict[str, Any] | None,
    freq: int | list[int] | None,
) -> Verdict:
    """Refuses expert parallelism for a dense model."""
    kind = model_kind(model_name, hf_config, overrides, freq)
    if ep == 1 or kind.has_experts is None:
        return None
    if not kind.has_experts:
        return f"is {ep}, but {kind.name} is a dense model; set it to 1"
    experts = count_of(model_fields(model_name, hf_config, overrides), NUM_EXPERTS_KEYS)
    assert experts is not None, "a model's kind is known by their number"
    return (
        None if experts % ep == 0 else f"is {ep}, which does not divide the model's {experts} experts; choose a divisor"
    )


@rule(f"{MEGATRON}.sequence_parallel", TP, DIVISOR, LENGTH)
def sequence_parallel_needs_divisible_lengths(enabled: bool, tp: int, multiple: int, longest: int) -> Verdict:
    """Requires sequences that split evenly over the tensor-parallel ranks."""
    if not enabled or tp == 1 or longest % multiple == 0:
        return None
    return f"needs {LENGTH} ({longest}) to be a multiple of {DIVISOR} ({multiple})"


@rule("cluster.master_port_range_low?", "cluster.master_port_range_high?")
def port_range_has_both_ends(low: int | None, high: int | None) -> Verdict:
    """Requires both ends of the port range, in order."""
    if (low is None) != (high is None):
        return "cluster.master_port_range_low and master_port_range_high must be set together; set both or neither"
    if low is not None and high is not None and low > high:
        return f"is {low}, above cluster.master_port_range_high ({high}); lower it, or raise that"
    return None


@rule("cluster.segment_size?", NODES)
def segments_fill_the_nodes(size: int | None, nodes: int) -> Verdict:
    """Requires the nodes to be a whole number of segments."""
    if size is None or nodes % size == 0:
        return None
    return f"is {size}, which does not divide {NODES} ({nodes}); make {NODES} a multiple of it, or set it to null"


@rule("cluster.max_restarts?", "checkpointing.enabled", "checkpointing.save_optimizer")
def restarts_need_checkpoints(at_most: int | None, enabled: bool, with_optimizer: bool) -> Verdict:
    """Refuses restarts without checkpoints to resume from."""
    if not at_most or (enabled and with_optimizer):
        return None
    key = "save_optimizer" if enabled else "enabled"
    return (
        f"is {at_most}, but checkpointing.{key} is false, and a restarted run resumes from a checkpoint with optimizer "
        "state; set that to true, or this to 0"
    )
