"""megatron-core's defaults stand in one table, where a field that a recipe leaves out is looked up."""

import dataclasses

import pytest
import torch

from nemo_offload_rl.config.megatron.further_fields import DEFAULTS, megatron_field


@pytest.mark.parametrize("name", DEFAULTS)
def test_default_is_that_of_megatron_core(name):
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig

    of_fields = {
        field.name: field.default
        for config in (TransformerConfig, OptimizerConfig, DistributedDataParallelConfig)
        for field in dataclasses.fields(config)
    }
    default = DEFAULTS[name]
    assert of_fields[name] == (getattr(torch, default) if name.endswith("_dtype") else default)


def test_recipe_comes_before_the_default_and_null_after_it():
    assert megatron_field({"min_offloaded_tensor_size": 0}, "min_offloaded_tensor_size") == 0
    assert megatron_field({"min_offloaded_tensor_size": None}, "min_offloaded_tensor_size") == 1024 * 1024
    assert megatron_field({}, "moe_layer_freq") is None
