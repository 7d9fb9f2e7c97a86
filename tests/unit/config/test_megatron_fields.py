"""Megatron's fields, read from source: the names that the imported dataclasses have, and types that mean something."""

import ast
import dataclasses
import inspect
import math
import re

import pytest
from megatron.core.transformer import transformer_config

from nemo_offload_rl.config.installed.declared_fields import CHOICES, SECTIONS, check_field, megatron_fields

MEGATRON = "policy.megatron_cfg"


def test_names_are_those_of_the_imported_dataclasses():
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    def names(config):
        return {field.name for field in dataclasses.fields(config) if not field.name.startswith("_")}

    assert names(TransformerConfig) | names(MLATransformerConfig) <= set(megatron_fields(MEGATRON))
    assert names(OptimizerConfig) == set(megatron_fields(f"{MEGATRON}.optimizer"))
    ddp = megatron_fields(f"{MEGATRON}.distributed_data_parallel_config")
    assert names(DistributedDataParallelConfig) == set(ddp)


@pytest.mark.parametrize(
    ("name", "good", "bad", "expected"),
    [
        ("moe_router_topk", [2], ["2", 2.0, True, None], "int"),
        ("layernorm_epsilon", [1e-5, 1], ["1e-5", None, False, math.nan, math.inf], "float"),
        ("qk_layernorm", [True], [1, "true"], "bool"),
        ("rope_type", ["yarn"], [1, None, "yarnn"], "'rope' or 'yarn'"),
        ("moe_z_loss_coeff", [None, 0.1], ["x"], "Optional[float]"),
        ("normalization", ["RMSNorm"], [None, 3, "RMSnorm"], "Literal['LayerNorm', 'RMSNorm']"),
        ("moe_router_score_function", ["sigmoid"], ["relu", None], "Literal['softmax', 'sigmoid', 'sqrtsoftplus']"),
        ("flash_attention_version", [2, None], ["2", 5, True], "Optional[Literal[2, 3, 4]]"),
        ("moe_router_load_balancing_type", ["none", ["aux_loss"]], [3, [3], [], "aux_los", ["nne"]], "'aux_loss', "),
        ("window_size", [[128, 0], None], [[128], [128, "0"], 128], "Optional["),
        ("attention_backend", ["flash"], ["flsh", 1], "AttnBackend (AttnBackend: 'flash', 'fused', "),
        ("mamba_training_ssm_states_dtype", ["bfloat16", None], ["float8", 16], "Optional['float32', "),
        ("moe_layer_freq", [1, [1, 0]], ["1", [1.5]], "Union[int, "),
        ("pipeline_model_parallel_layout", ["Et*4L", ["x"], None], [3], "Optional["),
    ],
)
def test_values_are_checked_by_annotation(name, good, bad, expected):
    for value in good:
        assert check_field(MEGATRON, name, value) is None, value
    for value in bad:
        message = check_field(MEGATRON, name, value)
        assert message is not None, value
        assert f"must be {expected}" in message


def test_a_bound_may_be_infinite_where_megatron_has_it_so():
    optimizer = f"{MEGATRON}.optimizer"
    assert check_field(optimizer, "grad_norm_skip_threshold", math.inf) is None
    for value in (math.nan, -math.inf):
        assert check_field(optimizer, "grad_norm_skip_threshold", value) is not None


def test_a_misspelt_word_gets_the_nearest_one():
    message = check_field(MEGATRON, "moe_router_load_balancing_type", "aux_los")
    assert message is not None and message.endswith("found 'aux_los'; did you mean aux_loss?")


def test_words_that_are_listed_here_are_those_of_megatron():
    """megatron-core lists them in docstrings alone, whose words these are."""
    source = inspect.getsource(transformer_config)
    for name, words in CHOICES[MEGATRON].items():
        documented = source.split(f"    {name}: ")[1].split('"""')[1]
        assert all(re.search(rf"\b{word}\b", documented) for word in words), name


def test_a_function_cannot_be_set():
    assert "cannot be set in a recipe" in check_field(MEGATRON, "activation_func", "gelu")


def test_every_annotation_is_understood():
    """Each field either takes plain values that the message names, or says that it takes none."""
    for section in SECTIONS:
        for name, field in megatron_fields(section).items():
            message = check_field(section, name, object())
            assert message is not None or ast.unparse(field.annotation) == "Any", name
