"""Tests the rows and the tables of benchmarks/nemo_rl_recipes.py, for a small folder of recipes."""

import json
from pathlib import Path

from nemo_rl_recipes import row_of, tables

REPOSITORY = Path(__file__).parents[3]
TINY = REPOSITORY / "examples/configs/grpo_tiny_cpu.yaml"
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

    counts, _, features, found = tables([loads, wrong, odd, orphan])
    assert list(counts[1].values())[:5] == ["grpo", 3, 1, 2, 1]
    assert list(features[0].values()) == ["multi-token prediction", 1, 1]
    assert [row["recipe"] for row in found] == ["odd.yaml"] and found[0]["why"].startswith("must be ")


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
    assert "67 of 168. 67 recipes ask only for features that this package has; 67 of these load. 50 of" in " ".join(
        page.split()
    )
