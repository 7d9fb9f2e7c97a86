"""Tests the data, the overrides, the rows and the page of benchmarks/nemo_rl_runs.py."""

import json
import re
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from gpu_watch import GpuWatch
from nemo_rl_data import VOCABULARY, datasets, write_datasets, write_tokenizer
from nemo_rl_runs import (
    ORIGIN,
    SAVES,
    Case,
    add_row,
    cases,
    figures,
    merge,
    overrides_of,
    parse_arguments,
    row_of,
    status_of,
)
from nemo_rl_runs_page import override_lines, page_of

from nemo_offload_rl.config import load
from nemo_offload_rl.data.named import load_named
from nemo_offload_rl.data.tokenizer import load_tokenizer

REPOSITORY = Path(__file__).parents[3]
EXEMPLAR = REPOSITORY / "examples/configs/grpo_math_1B_megatron.yaml"


def test_the_loader_of_named_datasets_reads_every_row(tmp_path):
    write_datasets(tmp_path)
    for name, splits in datasets().items():
        for split, rows in splits.items():
            assert len(load_named(name, split=split, root=tmp_path)) == len(rows)
    for row in load_named("gsm8k", split="train", root=tmp_path):
        assert row.answer.isdecimal()
    problem = load_named("OpenMathInstruct-2", split="train_1M", root=tmp_path)[0]
    solution = load_named("OpenMathInstruct-2", split="train_1M", output_key="generated_solution", root=tmp_path)[0]
    assert rf"\boxed{{{problem.answer}}}" in solution.answer
    pairs = load_named("HelpSteer3", split="train", root=tmp_path)
    assert all(pair.rejected.startswith("Perhaps") and not pair.chosen.startswith("Perhaps") for pair in pairs)


def test_the_word_problems_are_calculated_right():
    problems = datasets()["gsm8k"]
    assert {split: len(rows) for split, rows in problems.items()} == {"train": 48, "test": 16}
    rows = [row for split in problems.values() for row in split]
    assert len({row["question"] for row in rows}) == 64
    for row in rows:
        assert set(row) == {"question", "answer"}
        solution, answer = row["answer"].split("\n#### ")
        steps = re.findall(r"([\d+*/ -]+) = <<([\d+*/-]+)=(\d+)>>(\d+)", solution)
        assert len(steps) == solution.count("<<") > 0
        for written, calculation, result, repeated in steps:
            assert written.replace(" ", "") == calculation and result == repeated
            assert eval(calculation) == int(result)
        assert steps[-1][2] == answer


def test_the_tokenizer_has_a_chat_template_and_gives_back_its_text(tmp_path):
    write_tokenizer(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    text = tokenizer.apply_chat_template([{"role": "user", "content": "2 x 3 = π?"}], tokenize=False)
    ids = tokenizer.encode(text)
    assert len(tokenizer) <= VOCABULARY
    assert ids.count(tokenizer.eos_token_id) == 1
    assert tokenizer.decode(ids) == text


def test_a_recipe_for_many_gpus_gets_what_one_needs_and_each_key_once(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"defaults: {EXEMPLAR}\n"
        "cluster: {gpus_per_node: 8}\n"
        "policy: {model_name: Qwen/Qwen2.5-Math-7B, megatron_cfg: {tensor_model_parallel_size: 2}}\n"
    )
    case = Case("own", "recipe.yaml", 3, ["policy.generation.max_new_tokens=2"])
    config = load(recipe).config
    overrides = overrides_of(case, config, "grpo", "own", tmp_path)
    assert "policy.megatron_cfg.tensor_model_parallel_size=1" in overrides and "cluster.gpus_per_node=1" in overrides
    assert [line for line in overrides if "max_new_tokens" in line] == ["policy.generation.max_new_tokens=2"]
    assert not [line for line in overrides if "pipeline_model_parallel_size" in line]
    changed = load(recipe, overrides).config
    assert changed["policy"]["hf_config"]["hidden_size"] == 3584
    assert changed["grpo"]["max_num_steps"] == 3

    small = load(recipe, overrides_of(case, config, "grpo", "small", tmp_path)).config["policy"]["hf_config"]
    assert (small["hidden_size"], small["model_type"]) == (1536, "qwen2")
    with pytest.raises(SystemExit, match="names the model org/another; sizes are known of Qwen"):
        overrides_of(case, load(recipe, ["policy.model_name=org/another"]).config, "grpo", "own", tmp_path)


def test_what_ends_a_run_is_told_with_the_last_error_or_line_of_its_log(tmp_path):
    def status(script, limit_s=60.0):
        return status_of(["sh", "-c", script], tmp_path / "log", limit_s)

    assert status("echo all is well") == "done"
    assert status("echo first; echo no such thing; exit 2") == "exit status 2: no such thing"
    assert status("echo 'ValueError: of 7'; echo 3 steps are lost; exit 1") == "exit status 1: ValueError: of 7"
    assert status("exit 3") == "exit status 3: no output"
    assert status("echo begun; exec sleep 600", 0.5) == "not done after 0.5 s: begun"


def test_a_row_has_the_figures_of_its_run(tmp_path):
    assert figures(tmp_path) == {"steps": 0, "steps_with_gpu_readings": 0}
    rows: list[dict] = [{"step": 0, "validation/accuracy": 0.5}]
    rows += [
        {"step": step, "train/loss": loss, "train/reward": step / 4, "timing/train/total_step_time": float(step)}
        for step, loss in enumerate([3.0, 2.0, 1.5], start=1)
    ]
    gpu = "performance/gpus/node0/gpu0"
    rows[1] |= {f"{gpu}/utilization_percent": 20.0, f"{gpu}/power_w": 300.0, f"{gpu}/memory_gib": 40.0}
    rows[3] |= {f"{gpu}/utilization_percent": 40.0, f"{gpu}/power_w": 250.0, "timing/train/checkpointing": 0.25}
    (tmp_path / "exp_001").mkdir()
    (tmp_path / "exp_001" / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert figures(tmp_path) == {
        "steps": 3, "median_step_s": 2.0, "first_loss": 3.0, "last_loss": 1.5, "mean_reward": 0.5, "last_reward": 0.75,
        "exposed_checkpointing_s": 0.25, "steps_with_gpu_readings": 2, "mean_gpu_utilization_percent": 30.0,
        "largest_gpu_power_w": 300.0, "largest_gpu_memory_gib": 40.0
    }  # fmt: skip


def test_a_run_that_fails_has_its_row_and_its_place_on_the_page(tmp_path):
    (tmp_path / "recipe.yaml").write_text(f"defaults: {EXEMPLAR}\n")
    arguments = Namespace(folder=tmp_path, scale="small", change=["x:a=1", "one:grpo.no_such_key=1"], limit_s=60)
    (tmp_path / "logs" / "one" / "exp_001").mkdir(parents=True)  # of an earlier run
    (tmp_path / "logs" / "one" / "exp_001" / "metrics.jsonl").write_text('{"step": 1, "train/loss": 1.0}\n')
    with GpuWatch() as watch:
        row = row_of(Case("one", "recipe.yaml", 3), arguments, tmp_path, watch)
    assert row["steps"] == 0 and "no_such_key" in row["status"]
    assert row["overrides"].endswith("grpo.no_such_key=1")
    assert row["status"].startswith("exit status 2: ")
    page = page_of({"rows": [row | dict.fromkeys(ORIGIN, "known")]}, "rows.json")
    assert "| one | grpo | 0 |" in page
    assert "Of the 1 runs in the table 0 are done." in " ".join(page.split())
    assert f"Its end: {row['status']}" in "".join(override_lines(row))


def row_named(case, steps, **more):
    return {"case": case, "recipe": "r", "status": "done", "steps": steps, "sizes": "s", "named_model": "n",
            "overrides": "a=1"} | more  # fmt: skip


def test_a_row_stays_until_its_case_runs_again(tmp_path, monkeypatch):
    monkeypatch.setenv("NEMO_OFFLOAD_RL_COMMIT", "first")
    output = tmp_path / "results" / "runs.json"
    add_row(output, row_named("gsm8k", 20))
    add_row(output, row_named("sft", 1))
    monkeypatch.setenv("NEMO_OFFLOAD_RL_COMMIT", "second")
    add_row(output, row_named("sft", 10))
    result = json.loads(output.read_text())
    told = [(row["case"], row["steps"], row["commit"]) for row in result["rows"]]
    assert told == [("sft", 10, "second"), ("gsm8k", 20, "first")]  # in the order of the cases
    assert result["commit"] == "second" and result["rows"][0]["command"] == result["command"]
    page = output.with_suffix(".md").read_text()
    assert "Of the 2 runs in the table 2 are done." in " ".join(page.split())
    assert re.search(r"- `sft`: .*; commit second, .*\n- `gsm8k`: .*; commit first, ", page)
    assert sorted(path.name for path in output.parent.iterdir()) == ["runs.json", "runs.md"]


def test_results_of_several_commands_are_merged(tmp_path):
    for case, machine in [("grpo", "a"), ("dpo", "b")]:
        rows = [row_named(case, 3), row_named("sft", 1 if case == "grpo" else 2)]
        origin = {"machine": machine, "commit": "c", "command": f"run {case}", "date": "d"}
        (tmp_path / f"{case}.json").write_text(json.dumps(origin | {"rows": rows}))
    output = tmp_path / "all.json"
    for case in ("grpo", "dpo"):
        merge(output, tmp_path / f"{case}.json")
    told = [
        (row["case"], row["steps"], row["machine"], row["command"]) for row in json.loads(output.read_text())["rows"]
    ]
    assert told == [("grpo", 3, "a", "run grpo"), ("sft", 2, "b", "run dpo"), ("dpo", 3, "b", "run dpo")]


def test_rows_that_are_written_at_the_same_time_are_all_kept(tmp_path):
    output = tmp_path / "runs.json"
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda case: add_row(output, row_named(case, 1)), ["grpo", "sft", "dpo", "gsm8k"]))
    assert [row["case"] for row in json.loads(output.read_text())["rows"]] == ["grpo", "sft", "dpo", "gsm8k"]


def test_the_word_problems_run_with_checkpoints_and_readings_of_the_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["nemo_rl_runs.py", "--folder", str(EXEMPLAR.parent)])
    arguments = parse_arguments()
    assert arguments.limit_s == 330 and arguments.cases == ["grpo", "sft", "dpo", "gsm8k"]
    case = next(case for case in cases(arguments) if case.name == "gsm8k")
    config = load(EXEMPLAR, overrides_of(case, load(EXEMPLAR).config, "grpo", "small", tmp_path)).config
    assert config["logger"]["monitor_gpus"] is True
    assert config["logger"]["gpu_monitoring"] == {"collection_interval": 1, "flush_interval": 1}
    saving = config["checkpointing"]
    assert (saving["enabled"], saving["save_period"]) == (True, 10)
    assert saving["checkpoint_dir"].endswith("checkpoints/gsm8k")
    plain = overrides_of(Case("sft", "r", 1), load(EXEMPLAR).config, "grpo", "small", tmp_path)
    assert not {SAVES[0], "checkpointing.checkpoint_dir"} & {line.partition("=")[0] for line in plain}
    monkeypatch.setattr("sys.argv", ["nemo_rl_runs.py", "--folder", "x", "--merge", "other.json"])
    assert parse_arguments().cases == []
