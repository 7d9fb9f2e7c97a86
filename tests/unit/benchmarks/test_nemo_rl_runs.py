"""Tests the data, the overrides and the rows of benchmarks/nemo_rl_runs.py."""

import re
from argparse import Namespace
from pathlib import Path

import pytest
from gpu_watch import GpuWatch
from nemo_rl_data import VOCABULARY, datasets, write_datasets, write_tokenizer
from nemo_rl_runs import (
    SAVES,
    Case,
    cases,
    overrides_of,
    parse_arguments,
    row_of,
)

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


def test_a_run_that_fails_has_its_row(tmp_path):
    (tmp_path / "recipe.yaml").write_text(f"defaults: {EXEMPLAR}\n")
    arguments = Namespace(folder=tmp_path, scale="small", change=["x:a=1", "one:grpo.no_such_key=1"], limit_s=60)
    (tmp_path / "logs" / "one" / "exp_001").mkdir(parents=True)  # of an earlier run
    (tmp_path / "logs" / "one" / "exp_001" / "metrics.jsonl").write_text('{"step": 1, "train/loss": 1.0}\n')
    with GpuWatch() as watch:
        row = row_of(Case("one", "recipe.yaml", 3), arguments, tmp_path, watch)
    assert row["steps"] == 0 and "no_such_key" in row["status"]
    assert row["overrides"].endswith("grpo.no_such_key=1")
    assert row["status"].startswith("exit status 2: ")


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
