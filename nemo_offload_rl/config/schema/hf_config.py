"""Declares the model in Hugging Face's words: `policy.hf_config` and `policy.hf_config_overrides`."""

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
    """Sections `policy.hf_config` and `policy.hf_config_overrides`: the fields that rules and plan read.

    They are named as Hugging Face names them; config.hf_check knows the other fields of a family. Families that have
    lists where others have numbers (of the MLP's sizes) are why those are not here.
    """

    # The family, such as qwen3 or llama. Absent: in hf_config an error; in hf_config_overrides that of the model.
    model_type: NotRequired[NonEmptyStr]
    # Layers. Absent: as the family has it.
    num_hidden_layers: NotRequired[PositiveInt]
    # Size of the hidden states. Absent: as the family has it.
    hidden_size: NotRequired[PositiveInt]
    # Heads of attention, a multiple of megatron_cfg.tensor_model_parallel_size. Absent: as the family has it.
    num_attention_heads: NotRequired[PositiveInt]
    # Heads of keys and values. Null or absent: as the family has it.
    num_key_value_heads: NotRequired[PositiveInt | None]
    # Size of a head. Null or absent: as the family has it, for most hidden_size / num_attention_heads.
    head_dim: NotRequired[PositiveInt | None]
    # Entries of the vocabulary. Absent: as the family has it.
    vocab_size: NotRequired[PositiveInt]
    # Experts of a layer, in the words of Qwen. Null or absent: as the family has it.
    num_experts: NotRequired[NonNegativeInt | None]
    # Experts of a layer, in the words of Mixtral. Null or absent: as the family has it.
    num_local_experts: NotRequired[NonNegativeInt | None]
    # Experts of a layer, in the words of DeepSeek. Null or absent: as the family has it.
    n_routed_experts: NotRequired[NonNegativeInt | None]
    # Experts that a token is routed to. Null or absent: as the family has it.
    num_experts_per_tok: NotRequired[PositiveInt | None]
