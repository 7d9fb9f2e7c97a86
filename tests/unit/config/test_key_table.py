"""The table of what a key may be: its rows about Megatron's fields."""

import re
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import nemo_offload_rl
from nemo_offload_rl.config.installed.megatron_fields import SECTIONS, megatron_fields
from nemo_offload_rl.config.key_table.megatron import DDP, MEGATRON, MEGATRON_ROWS, OPTIMIZER
from nemo_offload_rl.config.key_table.row import Kind, Row
from nemo_offload_rl.config.key_table.table import row_of, rows_of
from nemo_offload_rl.config.keys.tree import is_valid_key
from nemo_offload_rl.config.problems import show

# Fields that a config's own `__post_init__` puts into effect, most of them by setting other fields.
READ_IN_POST_INIT = {
    *("init_method_std", "embedding_init_method_std"),
    *("mup_width_mult", "mup_base_hidden_size", "mup_base_head_dim", "mup_attn_scale_power"),
    *("moe_router_topk_limited_devices", "moe_enable_deepep", "moe_deepep_num_sms", "moe_hybridep_num_sms"),
    "disable_bf16_reduced_precision_matmul",
}


def words_read(files: Iterable[Path]) -> set[str]:
    """Returns every attribute, and every word in quotes, since some code reads fields with `getattr`."""
    return {word for file in files for word in re.findall(r"""[."'](\w+)""", file.read_text(encoding="utf-8"))}


def test_every_field_that_is_not_refused_is_read_somewhere() -> None:
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
    for section in SECTIONS:
        fixed = {row.key.removeprefix(f"{section}.") for row in rows_of(Kind.FIXED)}
        assert set(megatron_fields(section)) - fixed - READ_IN_POST_INIT <= read, section


@pytest.mark.parametrize("row", MEGATRON_ROWS, ids=lambda row: row.key)
def test_a_row_names_a_field_of_the_installed_megatron(row: Row) -> None:
    section, _, name = row.key.rpartition(".")
    assert name in megatron_fields(section) or is_valid_key(row.key)


@pytest.mark.parametrize(
    ("path", "refused", "allowed"),
    [
        (f"{MEGATRON}.qk_clip", True, False),
        (f"{MEGATRON}.pipeline_model_parallel_comm_backend", "ucc", "nccl"),
        (f"{MEGATRON}.tensor_parallel_num_weight_shards", 2, None),
        (f"{MEGATRON}.cuda_graph_use_single_mempool", False, True),
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
