"""Tests the command `nemo-offload-rl` as a user runs it."""

import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from support.forked_python import forked_python

from nemo_offload_rl.cli import main
from tests.unit.config.conftest import CONFIGS

TINY = str(CONFIGS / "grpo_tiny_cpu.yaml")


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "nemo_offload_rl.cli", *arguments]


def run(*arguments: str, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    return subprocess.run([python, *command(*arguments)[1:]], capture_output=True, text=True, timeout=300)


def test_validate_prints_the_resolved_recipe():
    result = run("validate", TINY, "grpo.max_num_steps=7")
    assert result.returncode == 0
    config = yaml.safe_load(result.stdout)
    assert config["grpo"]["max_num_steps"] == 7
    assert config["policy"]["train_global_batch_size"] == 512
    assert "${" not in result.stdout


def test_validate_prints_every_problem_and_no_traceback():
    result = run("validate", TINY, "grpo.max_num_steps=x", "+policy.megatron_cfg.tensor_model_paralel_size=2")
    assert result.returncode == 2
    assert result.stdout == ""
    assert "2 problems" in result.stderr
    assert "nearest valid key: policy.megatron_cfg.tensor_model_parallel_size" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("recipe", ["nope.yaml", "/dev/null", "."])
def test_validate_of_what_is_no_recipe(recipe, capsys):
    assert main(["validate", recipe]) == 2
    assert capsys.readouterr().err.startswith(f"recipe {recipe}: 1 problem\n")


def test_report_writes_the_page_of_a_run_again_or_says_what_to_give(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    missing = f"FOLDER: there is no file {path}; give the folder of a run"
    for text, error in ((None, missing), ("", f"{path} has no step")):
        if text is not None:
            path.write_text(text)
        assert main(["report", str(tmp_path)]) == 2
        assert capsys.readouterr().err.startswith(error)
        assert not (tmp_path / "report.html").exists()
    path.write_text('{"step": 1, "train/loss": 0.5, "timing/train/training": 1.0, "timing/train/total_step_time": 1.5}')
    assert main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"wrote {tmp_path / 'report.html'}\n"
    assert "1 steps" in (tmp_path / "report.html").read_text()
    run = tmp_path / "logs" / "exp_010"
    run.mkdir(parents=True)
    path.rename(run / path.name)
    for wrong in (tmp_path / "logs", run / path.name, run / "tensorboard"):
        assert main(["report", str(wrong)]) == 2
        assert capsys.readouterr().err.endswith(f", which has this file, such as {run}\n")


def test_a_plan_for_no_possible_machine_names_the_option(capsys):
    memory, speed = "a size in GiB above 0 and at most 100,000", "a speed in GB/s above 0 and at most 1,000,000"
    for option, values, rule in (
        ("--gpus", ("0", "-1"), "a number of GPUs of each node, 1 or more"),
        ("--gpu-memory", ("0", "1e300"), memory),
        ("--host-memory", ("0", "1e300", "nan"), memory),
        ("--link", ("0", "nan", "inf", "1e308"), speed),
    ):
        for value in values:
            assert main(["plan", TINY, option, value]) == 2
            assert capsys.readouterr().err == f"{option} is {rule}; found {float(value):g}\n"


def test_a_plan_by_an_earlier_run_names_the_file_that_is_not_there_or_not_text(tmp_path, capsys):
    def error_of(folder):
        assert main(["plan", TINY, "--link-of", str(folder)]) == 2
        return capsys.readouterr().err

    path = tmp_path / "metrics.jsonl"
    path.mkdir()
    missing = f"--link-of: there is no file {tmp_path / 'none' / 'metrics.jsonl'}; give the folder of a run"
    assert error_of(tmp_path / "none").startswith(missing)
    assert error_of(tmp_path).startswith(f"--link-of: {path} is a folder, not a file; give the folder of a run")
    path.rmdir()
    path.write_bytes(b"\xff\n" + b'{"step": 1}\n')
    assert error_of(tmp_path).startswith(f"{path}:1 is not JSON")


def checkpoint(folder: Path) -> Path:
    """Makes a folder with everything that an export reads before it loads the weights."""
    for name, content in {
        "recipe.yaml": "policy: {}",
        "policy/metadata.json": "{}",
        "policy/hf_config/config.json": '{"model_type": "qwen3"}',
        "tokenizer/tokenizer.json": "{}",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    return folder


def test_an_export_of_what_is_no_checkpoint_says_so_without_torch(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    whole = checkpoint(tmp_path / "run" / "step_10")
    checkpoint(tmp_path / "run" / "step_9")
    (checkpoint(tmp_path / "damaged") / "policy" / "hf_config" / "config.json").write_text('{"model_type": ')
    (checkpoint(tmp_path / "older") / "recipe.yaml").write_text("[1]")
    cases = {
        ("absent", "new"): "does not exist; give a checkpoint's folder, such as .../step_100.",
        ("file", "new"): "is a file; give a checkpoint's folder",
        ("empty", "new"): "it has no recipe.yaml and no policy/metadata.json and no policy/hf_config/config.json and "
        "no tokenizer; give a checkpoint's folder",
        ("run", "new"): f"give one of the checkpoints in it, such as {whole}.",
        ("hf", "new"): "it is a Hugging Face folder already.",
        ("damaged", "new"): "config.json cannot be read: Expecting value: line 1 column 16 (char 15); take another",
        ("older", "new"): "recipe.yaml was not written by a run: it has no policy; take another checkpoint.",
        ("run/step_10", "file"): "file is a file; give an empty or new folder.",
        ("run/step_10", "file/x"): f"/file/x cannot be used: {tmp_path / 'file'} is no folder",
        ("run/step_10", "run"): "is not empty and holds no model; give an empty or new folder.",
    }
    code = (
        "import sys; from nemo_offload_rl.cli import main\n"
        "for number in range(1, len(sys.argv), 2): print(main(['export', *sys.argv[number : number + 2]]))\n"
        "assert not {'torch', 'megatron.core', 'transformers'} & set(sys.modules)"
    )
    arguments = [str(tmp_path / name) for case in cases for name in case]
    result = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["2"] * len(cases)
    for line, message in zip(result.stderr.splitlines(), cases.values(), strict=True):
        assert message in line


def test_options_may_be_anywhere_and_unknown_ones_and_commands_exit_with_2():
    options = ["validate", "--deep", TINY, "grpo.seed=x"], ["validate", TINY, "--deep", "grpo.seed=x"]
    assert [main(arguments) for arguments in options] == [2, 2]
    for arguments in (["validate", TINY, "--dep"], ["valdate", TINY], []):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2


def test_validate_imports_neither_torch_nor_ray_and_takes_as_long_as_a_few_imports():
    """Takes under a second where the libraries it needs take a third of one; hosts differ threefold."""
    code = (
        "import sys; from nemo_offload_rl.cli import main\n"
        "for recipe in sys.argv[1:]: assert main(['validate', recipe, 'cluster.num_nodes=1']) == 0\n"
        "heavy = {'torch', 'ray', 'transformers', 'numpy', 'megatron.core'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    result = subprocess.run([sys.executable, "-c", code, TINY], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    libraries = "import hydra, omegaconf, pydantic, yaml; pydantic.TypeAdapter"
    validate = command("validate", TINY, "grpo.max_num_steps=7")

    def ratio():  # of two runs in a row: other load on the machine slows both
        of_imports = cpu_seconds([sys.executable, "-c", libraries])
        return cpu_seconds(validate) / of_imports

    assert any(ratio() < 3 for _ in range(5))


def cpu_seconds(arguments: Sequence[str]) -> float:
    """Returns a program's processor time, which is its wall time if nothing else runs."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(arguments, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.slow
def test_deep_validation_builds_megatrons_configs():
    result = run("validate", TINY, "--deep", python=forked_python())
    assert result.returncode == 0, result.stderr
    assert "not checked here: " in result.stderr
    assert "note: Megatron's results for the model agree with transformers': log-probs of a small twin" in result.stderr


@pytest.mark.slow
def test_what_megatron_refuses_is_said_without_a_traceback(capsys):
    fields = ["+policy.megatron_cfg.no_rope_freq=3", "policy.unchecked_megatron_fields=true"]
    assert main(["validate", TINY, "--deep", *fields]) == 2
    error = capsys.readouterr().err
    assert "policy.megatron_cfg: Megatron refuses this combination: no_rope_freq" in error
