"""The sections `policy.hf_config` and `policy.hf_config_overrides`: the model in terms of Hugging Face's config."""

from typing import NotRequired, TypedDict

from pydantic import with_config

from nemo_offload_rl.config.schema.value_types import (
    STRICT_WITH_FURTHER_FIELDS,
    NonEmptyStr,
    NonNegativeInt,
    PositiveInt,
)


@with_config(STRICT_WITH_FURTHER_FIELDS)
class HfConfigFields(TypedDict):
    """Sections `policy.hf_config` and `policy.hf_config_overrides`: the fields that the rules and the plan read.

    The fields have Hugging Face's names; config.model.hf_check checks the other fields of a family. The MLP's sizes are
    not here, since some families have lists where others have numbers.
    """

    # The model family, such as qwen3 or llama. Absent: an error in hf_config; the model's own in hf_config_overrides.
    model_type: NotRequired[NonEmptyStr]
    # Number of layers. Absent: the family's default.
    num_hidden_layers: NotRequired[PositiveInt]
    # Size of the hidden states. Absent: the family's default.
    hidden_size: NotRequired[PositiveInt]
    # Number of attention heads, a multiple of megatron_cfg.tensor_model_parallel_size. Absent: the family's default.
    num_attention_heads: NotRequired[PositiveInt]
    # Number of key and value heads. Null or absent: the family's default.
    num_key_value_heads: NotRequired[PositiveInt | None]
    # Size of an attention head. Null or absent: the family's default, usually hidden_size / num_attention_heads.
    head_dim: NotRequired[PositiveInt | None]
    # Number of vocabulary entries. Absent: the family's default.
    vocab_size: NotRequired[PositiveInt]
    # Number of experts in a layer, under Qwen's name. Null or absent: the family's default.
    num_experts: NotRequired[NonNegativeInt | None]
    # Number of experts in a layer, under Mixtral's name. Null or absent: the family's default.
    num_local_experts: NotRequired[NonNegativeInt | None]
    # Number of experts in a layer, under DeepSeek's name. Null or absent: the family's default.
    n_routed_experts: NotRequired[NonNegativeInt | None]
    # Number of experts that each token is routed to. Null or absent: the family's default.
    num_experts_per_tok: NotRequired[PositiveInt | None]
