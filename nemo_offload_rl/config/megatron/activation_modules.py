"""The parts of a transformer layer whose saved activations can be offloaded between forward and backward."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from nemo_offload_rl.config.problems import show

OFFLOAD_MODULES_KEY = "policy.megatron_cfg.offload_modules"


@dataclass(frozen=True)
class ActivationModule:
    """Describes a module that `policy.megatron_cfg.offload_modules` may name.

    Attributes:
        moves: the saved activations that are offloaded, in words.
        of_experts: whether only layers with experts have the module.
    """

    moves: str
    of_experts: bool = False


LAYER_INPUT = "layer_input"
"""The module that is offloaded with full recomputation, alone or with core_attn; megatron-core does not know it."""

ACTIVATION_MODULES: Mapping[str, ActivationModule] = {
    LAYER_INPUT: ActivationModule(
        "the input of each segment of recompute_num_layers layers, with full recomputation, which keeps nothing else"
    ),
    "attn_norm": ActivationModule(
        "the input of the norm before attention; nothing where Transformer Engine fuses it into the next linear layer"
    ),
    "qkv_linear": ActivationModule("the input of the query, key and value projections"),
    "core_attn": ActivationModule("queries, keys and values, and what the attention kernel keeps"),
    "attn_proj": ActivationModule("the input of the output projection; needs core_attn, whose output it is"),
    "mlp_norm": ActivationModule(
        "the input of the norm before the MLP; nothing where Transformer Engine fuses it into the next linear layer"
    ),
    "expert_fc1": ActivationModule("the input of the experts' first linear layer", of_experts=True),
    "moe_act": ActivationModule("the input of the experts' activation function", of_experts=True),
    "fused_group_mlp": ActivationModule(
        "the input and the intermediates of experts fused by Transformer Engine; instead of expert_fc1 and moe_act",
        of_experts=True,
    ),
}


def modules_without_layer(modules: Iterable[str], *, has_experts: bool) -> list[str]:
    """Returns the modules that no layer of the model contains."""
    known = [name for name in modules if name in ACTIVATION_MODULES]
    return [name for name in known if ACTIVATION_MODULES[name].of_experts and not has_experts]


def dense_refusal(absent: Iterable[str], model: str) -> str:
    """Returns the message about modules that a dense model does not have."""
    dense = ", ".join(name for name, module in ACTIVATION_MODULES.items() if not module.of_experts)
    return (
        f"names {_listed(absent)}, which only a mixture-of-experts model has, but {model} is a dense model; "
        f"a dense model has {dense}"
    )


def check_modules_fit_model(modules: Iterable[str], *, is_moe: bool) -> None:
    """Checks modules against the built model; the rules can do so only if the recipe tells the model's kind.

    Args:
        modules: `policy.megatron_cfg.offload_modules`.
        is_moe: whether some layer of the model is a mixture of experts.

    Raises:
        ValueError: a module exists only with experts, and the model has none.
    """
    absent = modules_without_layer(modules, has_experts=is_moe)
    if absent:
        raise ValueError(f"{OFFLOAD_MODULES_KEY}: {dense_refusal(absent, "the policy's model")}")


def _listed(names: Iterable[str]) -> str:
    return " and ".join(show(name) for name in names)
