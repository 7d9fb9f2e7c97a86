"""Rules for mixtures of experts: which layers have experts, and how many tokens an expert takes."""

from typing import Any

from nemo_offload_rl.config.model.model_kind import NUM_LAYERS_KEYS, count_of, model_fields, model_kind
from nemo_offload_rl.config.problems import show
from nemo_offload_rl.config.rules.activations import GRAPHS, OFFLOADING
from nemo_offload_rl.config.rules.base import MEGATRON, MODEL, MODEL_FIELDS, TP, Verdict, rule

LAYER_FREQ = f"{MEGATRON}.moe_layer_freq"
CAPACITY = f"{MEGATRON}.moe_expert_capacity_factor"
PADS = f"{MEGATRON}.moe_pad_expert_input_to_capacity"


@rule(f"{LAYER_FREQ}?", *MODEL_FIELDS)
def layers_with_experts_are_counted(freq: int | list[int] | None, *model: Any) -> Verdict:
    """Checks moe_layer_freq: an interval between layers with experts, or for each layer whether it has experts."""
    rule_says = "must be an integer of 1 or more, or a list with 0 or 1 for each layer"
    if isinstance(freq, int):
        return None if freq >= 1 else f"{rule_says}; found {freq}"
    if freq is None:
        return None
    if not freq or any(one not in (0, 1) for one in freq):
        return f"{rule_says}; found {show(freq)}"
    layers = count_of(model_fields(*model), NUM_LAYERS_KEYS)
    if layers is not None and len(freq) != layers:
        return (
            f"has {len(freq)} numbers, one for each layer, but the model has {layers} layers; give one number per layer"
        )
    return None


@rule(f"{MEGATRON}.sequence_parallel", TP, *MODEL)
def experts_behind_split_attention_have_split_sequences(sequence_parallel: bool, tp: int, *model: Any) -> Verdict:
    """Refuses tensor-parallel experts without sequence parallelism, which megatron-core rejects in the first step."""
    if sequence_parallel or tp == 1 or not model_kind(*model).has_experts:
        return None
    return (
        f"is false, but megatron-core trains a mixture of experts with {TP} {tp} only with sequence parallelism; set "
        f"this to true, or {TP} to 1"
    )


@rule(f"{CAPACITY}?")
def capacities_are_positive(capacity: float | None) -> Verdict:
    """Refuses a negative capacity factor, which megatron-core reads as no limit."""
    if capacity is None or capacity > 0:
        return None
    return f"must be above 0, or null for none; found {show(capacity)}"


@rule(f"{PADS}?", f"{CAPACITY}?")
def padded_experts_have_a_capacity(pads: bool | None, capacity: float | None) -> Verdict:
    """Requires a capacity factor for experts that are padded to it."""
    if not pads or capacity is not None:
        return None
    return f"is true, which needs {CAPACITY}, such as 1.0; found null: set that, or this to false"


@rule(f"{CAPACITY}?", OFFLOADING, GRAPHS)
def experts_that_drop_tokens_are_not_offloaded_beside_graphs(
    capacity: float | None, enabled: bool, graphs: str
) -> Verdict:
    """Refuses dropped tokens with both offloading and CUDA graphs, which was never compared with plain steps."""
    if capacity is None or capacity <= 0 or not enabled or graphs == "none":
        return None
    return (
        f"is {show(capacity)}, with which experts drop tokens, and that is not supported with both {OFFLOADING} and "
        f"{GRAPHS} {graphs}; leave it at null, or switch one of them off"
    )
