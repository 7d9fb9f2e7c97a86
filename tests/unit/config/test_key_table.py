"""The table of what a key may be: its rows about Megatron's fields."""

import re
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import nemo_offload_rl
from nemo_offload_rl.config import RecipeError, load
from nemo_offload_rl.config.installed.declared_fields import SECTIONS, megatron_fields
from nemo_offload_rl.config.key_table.megatron import DDP, MEGATRON, MEGATRON_ROWS, OPTIMIZER
from nemo_offload_rl.config.key_table.row import PASSES, Kind, Row
from nemo_offload_rl.config.key_table.table import row_of, rows_of
from nemo_offload_rl.config.keys.tree import is_valid_key
from nemo_offload_rl.config.problems import show
from tests.unit.config.conftest import CONFIGS

TINY = CONFIGS / "sft_tiny_cpu.yaml"
ROOT = CONFIGS.parents[1]
DDP_NAME = DDP.rpartition(".")[2]

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


@pytest.mark.parametrize(
    ("path", "refused", "allowed"),
    [
        (f"{MEGATRON}.pipeline_model_parallel_comm_backend", "ucc", "nccl"),
        (f"{MEGATRON}.tensor_parallel_num_weight_shards", 2, None),
        (f"{MEGATRON}.cpu_offloading_num_layers", False, 0),
        (f"{OPTIMIZER}.main_grads_dtype", "bfloat16", "float32"),
        (f"{DDP}.num_buckets", 4, None),
    ],
)
def test_a_fixed_field_has_only_its_values(path: str, refused: Any, allowed: Any) -> None:
    row = row_of(path, Kind.FIXED)
    assert row is not None
    assert row.allows(allowed) and not row.allows(refused)
    assert row.refusal(refused) == f"{row.why} (found {show(refused)}); {row.shown_remedy}"


@pytest.mark.parametrize("row", rows_of(Kind.TESTED), ids=lambda row: row.key)
def test_a_tested_field_names_a_test_file_with_it(row: Row) -> None:
    file = ROOT / row.why
    assert file.name.startswith("test_")
    assert re.search(rf"\b{row.key.rpartition('.')[2]}\b", file.read_text(encoding="utf-8"))


def test_one_row_decides_whether_a_field_passes() -> None:
    decided = [row.key for row in rows_of(Kind.FIXED, *PASSES)]
    assert len(decided) == len(set(decided))


@pytest.mark.parametrize(
    ("override", "path"),
    [
        ("qk_clip=false", "qk_clip"),
        ("model_overrides={qk_clip: true}", "model_overrides.qk_clip"),
        ("optimizer.muon_momentum=0.9", "optimizer.muon_momentum"),
        (
            "distributed_data_parallel_config.align_param_gather=true",
            "distributed_data_parallel_config.align_param_gather",
        ),
    ],
)
def test_other_fields_pass_only_unchecked_and_a_note_says_so(override: str, path: str) -> None:
    with pytest.raises(RecipeError) as refused:
        load(TINY, [f"++{MEGATRON}.{override}"])
    assert [problem.path for problem in refused.value.problems] == [f"{MEGATRON}.{path}"]
    assert "policy.unchecked_megatron_fields" in str(refused.value)
    loaded = load(TINY, [f"++{MEGATRON}.{override}", "policy.unchecked_megatron_fields=true"])
    assert f"{MEGATRON}.{path} is passed on to Megatron unchecked" in loaded.notes
    assert not any("unchecked" in note for note in load(TINY, ["policy.unchecked_megatron_fields=true"]).notes)


def test_unchecked_fields_have_their_types_all_the_same() -> None:
    with pytest.raises(RecipeError, match="qk_clip: must be bool"):
        load(TINY, [f"+{MEGATRON}.qk_clip=7", "policy.unchecked_megatron_fields=true"])
    with pytest.raises(RecipeError, match="fp8 and fp4 are not supported here"):
        load(TINY, [f"+{MEGATRON}.fp8=e4m3", "policy.unchecked_megatron_fields=true"])
