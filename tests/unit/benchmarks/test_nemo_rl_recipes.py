"""Tests the rows and the tables of benchmarks/nemo_rl_recipes.py, for a small folder of recipes."""

import json
from pathlib import Path

from nemo_rl_recipes import row_of, tables

REPOSITORY = Path(__file__).parents[3]
PAGE = REPOSITORY / "docs/results/nemo_rl_recipes.md"


def test_the_page_has_the_tables_of_its_result():
    result, page = json.loads(PAGE.with_suffix(".json").read_text()), PAGE.read_text()
    (_, *counts), keys, features = tables(result["rows"])
    shown = [list(row.values())[:5] for row in counts] + [list(row.values()) for row in features]
    shown += [[f"`{name}`" if "more keys" not in name else name, *numbers] for name, *numbers in map(dict.values, keys)]
    for cells in shown:
        assert f"| {' | '.join(map(str, cells))} |" in page
    assert max(row["seconds"] for row in result["rows"]) < 1
    refused = [row for row in result["rows"] if row["megatron_policy"] and not row["loads"]]
    unknown = [row["recipe"] for row in refused if "unknown key" in row["why"]]
    assert not unknown
    told = "67 of 168. 67 recipes ask only for features that this package has; 67 of these load. 50 of"
    assert told in " ".join(page.split())


def test_a_recipe_is_told_with_its_keys_and_what_it_asks_for(tmp_path):
    tiny = REPOSITORY / "examples/configs/grpo_tiny_cpu.yaml"
    refused = "policy: {megatron_cfg: {mtp_num_layers: 2}}\nnonsense: 1\n"
    for name, text in {"loads": "policy: {model_name: Qwen/Qwen3-30B-A3B}\n", "wrong": refused}.items():
        (tmp_path / f"{name}.yaml").write_text(f"defaults: {tiny}\n{text}")
    loads, wrong, absent = (row_of(tmp_path / f"{name}.yaml", tmp_path) for name in ("loads", "wrong", "absent"))
    assert loads.items() >= {"loads": True, "refused_keys": "", "asks_for": "", "architecture_supported": True}.items()
    assert wrong["refused_keys"] == "policy.megatron_cfg.mtp_num_layers, nonsense"
    assert wrong["asks_for"] == "multi-token prediction"
    assert (absent["loads"], absent["refused_keys"]) == (False, "(the file)")
