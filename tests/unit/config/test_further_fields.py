"""megatron-core's defaults stand in one table, or in the schema, for a field that a recipe leaves out."""

import dataclasses

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig

from nemo_offload_rl.config.keys.tree import hints_of, if_absent
from nemo_offload_rl.config.megatron import DEFAULTS, megatron_field
from nemo_offload_rl.config.schema.megatron import MegatronConfig

OF_SCHEMA = {
    name: if_absent(hints_of(MegatronConfig)[name]).value
    for name in (
        "activation_offload_fraction", "min_offloaded_tensor_size", "delta_offload_bytes_across_pp_ranks",
        "delay_offload_until_cuda_graph",
    )
}  # fmt: skip


def test_defaults_are_those_of_megatron_core():
    configs = (TransformerConfig, OptimizerConfig, DistributedDataParallelConfig)
    fields = {field.name: field.default for config in configs for field in dataclasses.fields(config)}
    for name, default in {**DEFAULTS, **OF_SCHEMA}.items():
        assert fields[name] == (getattr(torch, default) if name.endswith("_dtype") else default), name


def test_recipe_comes_before_the_default_and_null_after_it():
    assert megatron_field({"store_param_remainders": False}, "store_param_remainders") is False
    assert megatron_field({"store_param_remainders": None}, "store_param_remainders") is True
    assert megatron_field({}, "moe_layer_freq") is None
