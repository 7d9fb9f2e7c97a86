"""Megatron's fields, read from source: names, types, defaults, and the rows of the key table about them."""

import dataclasses
import inspect
import math
import re
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig, transformer_config

import nemo_offload_rl
from nemo_offload_rl.config.installed.declared_fields import CHOICES, SECTIONS, check_field, megatron_fields
from nemo_offload_rl.config.key_table.megatron import MEGATRON, MEGATRON_ROWS
from nemo_offload_rl.config.key_table.row import PASSES, Kind, Row
from nemo_offload_rl.config.key_table.table import rows_of
from nemo_offload_rl.config.keys.tree import hints_of, if_absent, is_valid_key
from nemo_offload_rl.config.megatron import DEFAULTS, megatron_field
from nemo_offload_rl.config.schema.megatron import MegatronConfig
from tests.unit.config.conftest import CONFIGS


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


VALUES = [
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
]


@pytest.mark.parametrize(("name", "good", "bad", "expected"), VALUES)
def test_values_are_checked_by_annotation(name, good, bad, expected):
    for value in good:
        assert check_field(MEGATRON, name, value) is None, value
    for value in bad:
        message = check_field(MEGATRON, name, value)
        assert message is not None, value
        assert f"must be {expected}" in message


def test_words_that_are_listed_here_are_those_of_megatron():
    """megatron-core lists them in docstrings alone, whose words these are."""
    source = inspect.getsource(transformer_config)
    for name, words in CHOICES.items():
        documented = source.split(f"    {name}: ")[1].split('"""')[1]
        assert all(re.search(rf"\b{word}\b", documented) for word in words), name


def test_every_annotation_is_understood():
    """Each field either takes plain values that the message names, or says that it takes none."""
    for section in SECTIONS:
        for name, annotation in megatron_fields(section).items():
            message = check_field(section, name, object())
            assert message is not None or annotation == "Any", name


ROOT = CONFIGS.parents[1]
# Fields that a config's own `__post_init__` puts into effect, most of them by setting other fields.
READ_IN_POST_INIT = {"moe_enable_deepep", "moe_hybridep_num_sms"}


def words_read(files: Iterable[Path]) -> set[str]:
    """Returns every attribute, and every word in quotes, since some code reads fields with `getattr`."""
    return {word for file in files for word in re.findall(r"""[."'](\w+)""", file.read_text(encoding="utf-8"))}


def test_every_field_that_passes_is_read_somewhere() -> None:
    spec = find_spec("megatron")
    assert spec is not None
    (core,) = (Path(folder) / "core" for folder in spec.submodule_search_locations or ())
    unused = {"fsdp", "inference", "export"}  # parts of megatron-core that are not used here
    config_files = {core.parent / file for source in SECTIONS.values() for file, _ in source.classes}
    provider = core.parent / "bridge" / "models" / "gpt_provider.py"
    own = Path(nemo_offload_rl.__file__).parent
    read = words_read(
        [
            provider,
            *(one for one in core.rglob("*.py") if one not in config_files and not unused & set(one.parts)),
            *(one for one in own.rglob("*.py") if "config" not in one.relative_to(own).parts),
        ]
    )
    names = {row.key.rpartition(".")[2] for row in rows_of(*PASSES)}
    assert names - READ_IN_POST_INIT <= read


def test_a_row_names_a_field_of_the_installed_megatron():
    for row in MEGATRON_ROWS:
        section, _, name = row.key.rpartition(".")
        assert name in megatron_fields(section) or is_valid_key(row.key), row.key


@pytest.mark.parametrize("row", rows_of(Kind.TESTED), ids=lambda row: row.key)
def test_a_tested_field_names_a_test_file_with_it(row: Row) -> None:
    file = ROOT / row.why
    assert file.name.startswith("test_")
    assert re.search(rf"\b{row.key.rpartition('.')[2]}\b", file.read_text(encoding="utf-8"))


def test_one_row_decides_whether_a_field_passes() -> None:
    decided = [row.key for row in rows_of(Kind.FIXED, *PASSES)]
    assert len(decided) == len(set(decided))


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
