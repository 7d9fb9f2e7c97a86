"""Reads a model's architecture, from which parameter counts are computed, from its Hugging Face config.

It reads the same fields as Megatron-Bridge's bridge of each model family, so that the counts match the model that a
worker builds.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nemo_offload_rl.config.key_table.row import Kind
from nemo_offload_rl.config.key_table.table import not_allowed
from nemo_offload_rl.config.megatron import megatron_field
from nemo_offload_rl.config.model.families import FAMILIES, Family, expert_layers, family_of
from nemo_offload_rl.config.problems import show, show_choices
from nemo_offload_rl.config.rules.base import MEGATRON
from nemo_offload_rl.config.schema.megatron import MegatronConfig


class UnknownArchitectureError(ValueError):
    """Says that the sizes of a model cannot be computed before it is built."""


@dataclass(frozen=True)
class Architecture:
    """Describes a decoder-only transformer with RMSNorm, gated MLPs and rotary embeddings; sizes are in elements."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    """FFN size of an MLP; in a mixture of experts, of one expert."""
    dense_ffn_hidden_size: int
    """FFN size of an MLP in a layer without experts."""
    num_heads: int
    num_query_groups: int
    head_dim: int
    vocab_size: int
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    router_bias: bool
    qk_norm: bool
    expert_layers: tuple[bool, ...]
    """Whether each layer has experts."""
    num_experts: int | None
    experts_per_token: int | None
    """Number of experts that a token is routed to (top-k)."""

    @property
    def has_dense_layers(self) -> bool:
        """Whether a mixture-of-experts model also has layers without experts."""
        return self.num_experts is not None and not all(self.expert_layers)


def read_architecture(hf_config: Mapping[str, Any], megatron_cfg: MegatronConfig) -> Architecture:
    """Returns the architecture that a worker will build.

    Args:
        hf_config: a Hugging Face config with every field, as its `to_dict()` gives it.
        megatron_cfg: the recipe's `policy.megatron_cfg` section, whose fields override those of the model.

    Raises:
        UnknownArchitectureError: the model's family is not supported here, or a field has a value that is not.
        ValueError: the config lacks a field that the family needs, or the field is not a valid size.
    """
    kind = hf_config["model_type"] if "model_type" in hf_config else None
    family = family_of(hf_config)
    if not family.has_known_sizes:
        known = [name for name, other in FAMILIES.items() if other.has_known_sizes]
        raise UnknownArchitectureError(
            f"The model's model_type is {show(kind)}, and the plan knows the sizes only of {show_choices(known)}. "
            "The worker determines the exact sizes when it builds the model, and checks them against the host's "
            "memory before it page-locks anything."
        )
    config = {"policy": {"megatron_cfg": megatron_cfg}}
    for row, path, value in not_allowed(config, Kind.UNKNOWN_SIZES):
        raise UnknownArchitectureError(f"{path} {row.refusal(value)}")
    return _read(family, _Fields(str(kind), hf_config, megatron_cfg))


@dataclass(frozen=True)
class _Fields:
    """Looks up fields in a model's config, and in `megatron_cfg`, which overrides some of them.

    Attributes:
        kind: the config's model_type.
        hf_config: the config with every field.
        megatron_cfg: the recipe's `policy.megatron_cfg` section.
    """

    kind: str
    hf_config: Mapping[str, Any]
    megatron_cfg: MegatronConfig

    def has(self, name: str) -> bool:
        """Returns whether the config has a value of that name other than null."""
        return name in self.hf_config and self.hf_config[name] is not None

    def value(self, name: str) -> Any:
        """Returns the value of a field of the model's config.

        Raises:
            ValueError: the config lacks the field.
        """
        if not self.has(name):
            raise ValueError(
                f"The model's config (model_type {self.kind}) has no {name}; give policy.hf_config.{name}."
            )
        return self.hf_config[name]

    def size(self, name: str) -> int:
        """Returns the value of a field of the model's config that is a size.

        Raises:
            ValueError: the config lacks the field, or its value is not an integer of at least 1.
        """
        value = self.value(name)
        if not isinstance(value, int) or value < 1:
            raise ValueError(
                f"The model's config (model_type {self.kind}) has {name} {show(value)}, but it must be an integer of "
                f"at least 1; give policy.hf_config_overrides.{name}."
            )
        return value

    def optional(self, name: str, otherwise: Any) -> Any:
        """Returns the value of a field of the model's config, or `otherwise` where the config lacks it."""
        return self.hf_config[name] if self.has(name) else otherwise

    def overridden(self, name: str, value: Any) -> Any:
        """Returns the field of `megatron_cfg` if it is set there, otherwise the model's own `value`."""
        own = megatron_field(self.megatron_cfg, name)
        return value if own is None else own


def _read(family: Family, fields: _Fields) -> Architecture:
    hidden_size, num_heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    ffn_hidden_size, num_experts, experts_per_token = fields.size("intermediate_size"), None, None
    if family.experts:
        ffn_hidden_size = fields.overridden("moe_ffn_hidden_size", fields.size("moe_intermediate_size"))
        num_experts = fields.size("num_local_experts" if fields.has("num_local_experts") else "num_experts")
        experts_per_token = fields.overridden("moe_router_topk", fields.size("num_experts_per_tok"))
    num_layers = fields.size("num_hidden_layers")
    attention_bias = fields.optional("attention_bias", False)
    all_biased = fields.overridden("add_bias_linear", False)
    qkv_bias = attention_bias if family.qkv_bias is None else family.qkv_bias
    output_bias = attention_bias if family.output_bias is None else family.output_bias
    tied = fields.value("tie_word_embeddings") if family.tied_embeddings is None else family.tied_embeddings
    mlp_bias = fields.optional("mlp_bias", False) if family.mlp_bias is None else family.mlp_bias
    by_layer = (expert_layers(fields.hf_config) if family.experts else None) or [False] * num_layers
    if family.experts:
        _check_expert_layers(fields.overridden("moe_layer_freq", None), by_layer)
    return Architecture(
        num_layers=num_layers,
        hidden_size=hidden_size,
        ffn_hidden_size=ffn_hidden_size,
        dense_ffn_hidden_size=fields.size("intermediate_size"),
        num_heads=num_heads,
        num_query_groups=fields.size("num_key_value_heads") if fields.has("num_key_value_heads") else num_heads,
        head_dim=fields.size("head_dim") if fields.has("head_dim") else hidden_size // num_heads,
        vocab_size=fields.size("vocab_size"),
        tied_embeddings=tied,
        qkv_bias=fields.overridden("add_qkv_bias", qkv_bias) or all_biased,
        output_bias=output_bias or all_biased,
        mlp_bias=mlp_bias or all_biased,
        router_bias=all_biased,
        qk_norm=fields.overridden("qk_layernorm", family.qk_norm),
        expert_layers=tuple(by_layer),
        num_experts=num_experts,
        experts_per_token=experts_per_token,
    )


def _check_expert_layers(freq: int | list[int] | None, by_layer: list[bool]) -> None:
    """Checks that a recipe's `moe_layer_freq` gives experts to the same layers as the model's config.

    Megatron reads an integer N as every Nth layer, starting with the first.

    Raises:
        ValueError: the layers differ.
    """
    if freq is None:
        return
    asked = freq if isinstance(freq, list) else [layer % freq == 0 for layer in range(len(by_layer))]
    if [bool(has) for has in asked] != by_layer:
        raise ValueError(
            f"{MEGATRON}.moe_layer_freq is {show(freq)}, but mlp_only_layers and decoder_sparse_step put experts in "
            f"{sum(by_layer)} of the model's {len(by_layer)} layers, and these are others; delete it, or change "
            "those two in policy.hf_config_overrides."
        )
