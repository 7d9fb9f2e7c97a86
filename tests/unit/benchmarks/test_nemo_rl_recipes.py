"""Tests the rows and the page of benchmarks/nemo_rl_recipes.py, for a small folder of recipes."""

import json
from pathlib import Path

from nemo_rl_recipes import page_of, row_of

REPOSITORY = Path(__file__).parents[3]
TINY = REPOSITORY / "examples/configs/grpo_tiny_cpu.yaml"
ORIGIN = {"machine": "m", "commit": "c", "date": "d", "command": "run", "checkout": "abc"}
PAGE = REPOSITORY / "docs/results/nemo_rl_recipes.md"


def written(folder, name, text, defaults=TINY):
    path = folder / name
    path.write_text(f"defaults: {defaults}\n{text}")
    return row_of(path, folder)


def test_each_recipe_is_told_with_its_keys_and_what_it_asks_for(tmp_path):
    loads = written(tmp_path, "loads.yaml", "policy: {model_name: Qwen/Qwen3-30B-A3B}\n")
    wrong = written(tmp_path, "wrong.yaml", "policy: {megatron_cfg: {mtp_num_layers: 2}}\nnonsense: 1\n")
    odd = written(tmp_path, "odd.yaml", "env: {math: {math_verify_impl: 7}}\npolicy: {model_name: Follow this}\n")
    orphan = row_of(tmp_path / "absent.yaml", tmp_path)
    named = {"recipe": "loads.yaml", "loads": True, "refused_keys": "", "asks_for": "", "algorithm": "grpo"}
    assert named.items() <= loads.items()
    assert loads["architecture_supported"] is True and loads["megatron_policy"] is True
    assert wrong["refused_keys"] == "policy.megatron_cfg.mtp_num_layers, nonsense"
    assert wrong["asks_for"] == "multi-token prediction"
    assert odd["architecture_supported"] is False and odd["model"] == ""
    assert odd["refused_keys"] == "env.math.math_verify_impl"
    assert (orphan["loads"], orphan["megatron_policy"], orphan["refused_keys"]) == (False, None, "(the file)")

    result = ORIGIN | {"rows": [loads, wrong, odd, orphan]}
    page = page_of(result, "rows.json")
    assert "| grpo | 3 | 1 | 2 | 1 |" in page and "at commit abc)" in page
    assert "3 more keys, of fewer than 10 recipes each | 3 | 2 | 1 | 1 |" in page
    assert "| multi-token prediction | 1 | 1 |" in page
    assert "| odd.yaml | `env.math.math_verify_impl` | must be " in page and "| wrong.yaml |" not in page
    assert "Refused, but" not in page_of(result | {"rows": [loads, wrong]}, "rows.json")


def test_the_page_has_the_tables_of_its_result():
    result = json.loads(PAGE.with_suffix(".json").read_text())
    assert page_of(result, "nemo_rl_recipes.json") == PAGE.read_text()
    assert max(row["seconds"] for row in result["rows"]) < 1
    refused = [row for row in result["rows"] if row["megatron_policy"] and not row["loads"]]
    unknown = [row["recipe"] for row in refused if "unknown key" in row["why"]]
    assert not unknown
    assert "67 of 168. 67 recipes ask only for features that this package has; 67 of these load. 50 of" in " ".join(
        PAGE.read_text().split()
    )
