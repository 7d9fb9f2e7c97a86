"""Parallel sizes fit the cluster and the model."""

from typing import Any

from nemo_offload_rl.config.model_kind import NUM_EXPERTS_KEYS, model_kind
from nemo_offload_rl.config.rules.base import CP, EP, ETP, GPUS, MEGATRON, MODEL, NODES, PP, TP, Verdict, rule


@rule(TP, PP, CP, GPUS, NODES)
def model_parallel_size_divides_world_size(tp: int, pp: int, cp: int, gpus: int, nodes: int) -> Verdict:
    """Every rank has its place in a model replica."""
    if (gpus * nodes) % (tp * pp * cp) == 0:
        return None
    return (
        f"tensor {tp} x pipeline {pp} x context {cp} = {tp * pp * cp} ranks a replica do not divide the {gpus * nodes} "
        f"ranks of the cluster ({GPUS} {gpus} x {NODES} {nodes}); change either"
    )


@rule(EP, ETP, PP, GPUS, NODES)
def expert_parallel_size_divides_world_size(ep: int, etp: int, pp: int, gpus: int, nodes: int) -> Verdict:
    """The ranks of the experts fill the cluster too."""
    if (gpus * nodes) % (ep * etp * pp) == 0:
        return None
    return (
        f"expert {ep} x expert tensor {etp} x pipeline {pp} = {ep * etp * pp} ranks do not divide the {gpus * nodes} "
        f"ranks of the cluster ({GPUS} {gpus} x {NODES} {nodes}); change either"
    )


@rule(f"{MEGATRON}.moe_token_dispatcher_type?", "policy.sequence_packing.enabled", PP, *MODEL)
def pipelined_packed_tokens_are_not_gathered(dispatcher: str | None, packs: bool, pp: int, *model: Any) -> Verdict:
    """Packed rows differ in length, which stages tell each other; megatron-core's allgather dispatcher cannot."""
    if dispatcher != "allgather" or not packs or pp == 1 or not model_kind(*model).has_experts:
        return None
    return (
        f"is allgather, which takes no packed rows on a pipeline ({PP} {pp}, policy.sequence_packing.enabled true); "
        "set it to alltoall"
    )


@rule(f"{MEGATRON}.virtual_pipeline_model_parallel_size?", PP)
def virtual_pipeline_needs_pipeline(vpp: int | None, pp: int) -> Verdict:
    """The interleaved schedule deals chunks to several stages."""
    if vpp is None or pp > 1:
        return None
    return f"is {vpp}, but {PP} is 1; set it to null, or use pipeline parallelism"


@rule(
    PP,
    "policy.hf_config?",
    f"{MEGATRON}.virtual_pipeline_model_parallel_size?",
    f"{MEGATRON}.num_layers_in_first_pipeline_stage",
    f"{MEGATRON}.num_layers_in_last_pipeline_stage",
    f"{MEGATRON}.pipeline_model_parallel_layout?",
)
def pipeline_stages_share_layers_evenly(
    pp: int, hf_config: dict[str, Any] | None, vpp: int | None, first: int | None, last: int | None, layout: Any
) -> Verdict:
    """What the first and the last stage leave is split evenly over the others."""
    layers = hf_config.get("num_hidden_layers") if hf_config else None
    if not isinstance(layers, int) or layout is not None:
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


@rule(TP, "policy.hf_config?")
def tensor_parallel_size_divides_heads(tp: int, hf_config: dict[str, Any] | None) -> Verdict:
    """Each tensor-parallel rank has whole attention heads."""
    heads = hf_config.get("num_attention_heads") if hf_config else None
    if not isinstance(heads, int) or heads % tp == 0:
        return None
    return f"is {tp}, which does not divide the model's {heads} attention heads"


@rule(EP, "policy.hf_config?")
def expert_parallel_needs_experts(ep: int, hf_config: dict[str, Any] | None) -> Verdict:
    """A dense model has no experts to deal out."""
    if ep == 1 or not hf_config:
        return None
    experts = next((hf_config[key] for key in NUM_EXPERTS_KEYS if key in hf_config), None)
    if experts is None:
        return f"is {ep}, but policy.hf_config is a dense model; set it to 1"
    return None if experts % ep == 0 else f"is {ep}, which does not divide the model's {experts} experts"


@rule(
    f"{MEGATRON}.sequence_parallel", TP, "policy.make_sequence_length_divisible_by", "policy.max_total_sequence_length"
)
def sequence_parallel_needs_divisible_lengths(enabled: bool, tp: int, multiple: int, longest: int) -> Verdict:
    """Each tensor-parallel rank has an equal part of a sequence."""
    if not enabled or tp == 1:
        return None
    if multiple % tp:
        return (
            f"needs policy.make_sequence_length_divisible_by ({multiple}) to be a multiple of {TP} ({tp}); "
            f'set it to "${{{TP}}}"'
        )
    if longest % multiple:
        return (
            f"needs policy.max_total_sequence_length ({longest}) to be a multiple of "
            f"policy.make_sequence_length_divisible_by ({multiple})"
        )
    return None


@rule("cluster.master_port_range_low?", "cluster.master_port_range_high?")
def port_range_has_both_ends(low: int | None, high: int | None) -> Verdict:
    """A range of ports is given whole."""
    if (low is None) != (high is None):
        return "cluster.master_port_range_low and master_port_range_high come together; give both or neither"
    if low is not None and high is not None and low > high:
        return f"is {low}, above cluster.master_port_range_high ({high})"
    return None
