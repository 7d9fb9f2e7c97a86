"""Tests the rows and the page of benchmarks/nemo_rl_recipes.py, for a small folder of recipes."""

import json
from pathlib import Path

import nemo_rl_recipes
from nemo_rl_recipes import deep_verdict, page_of, row_of

from nemo_offload_rl.cli import main

REPOSITORY = Path(__file__).parents[3]
TINY = REPOSITORY / "examples/configs/grpo_tiny_cpu.yaml"
EXEMPLAR = REPOSITORY / "examples/configs/grpo_math_1B_megatron.yaml"
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


def test_what_validate_deep_says_is_told_of_recipes_that_load(tmp_path, monkeypatch):
    def shallow(arguments):  # this needs neither data nor Megatron
        return main([one for one in arguments if one != "--deep"])

    monkeypatch.setattr(nemo_rl_recipes, "nemo_offload_rl", shallow)
    one = "policy: {generation: {backend: vllm, stop_token_ids: [128009]}}\n"
    eight = "policy: {generation: {backend: vllm, vllm_cfg: {tensor_parallel_size: 8}}}\ncluster: {gpus_per_node: 8}\n"
    right, wrong = written(tmp_path, "right.yaml", one, EXEMPLAR), written(tmp_path, "wrong.yaml", eight, EXEMPLAR)
    verdicts = [deep_verdict(row, tmp_path, tmp_path) for row in (right, wrong, right | {"loads": False})]
    assert verdicts[0] == "passes" and verdicts[2] is None
    assert "is 8, which does not divide the model's 12 attention heads" in verdicts[1]

    rows = [row | {"deep": verdict} for row, verdict in zip((right, wrong), verdicts, strict=False)]
    page = page_of(ORIGIN | {"rows": rows}, "rows.json")
    assert "`validate --deep` passes for 1 of these 2 with" in page and "- wrong.yaml: " in page


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
