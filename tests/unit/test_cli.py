"""The command `nemo-offload-rl`, run as a user runs it."""

import subprocess
import sys
import time

import pytest
import yaml

from nemo_offload_rl.cli import main
from tests.unit.config.conftest import CONFIGS

TINY = str(CONFIGS / "grpo_tiny_cpu.yaml")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "nemo_offload_rl.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


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


def test_validate_takes_options_and_overrides_in_any_order():
    options = ["validate", "--deep", TINY, "grpo.seed=x"], ["validate", TINY, "--deep", "grpo.seed=x"]
    assert [main(arguments) for arguments in options] == [2, 2]


def test_unknown_options_and_commands_exit_with_2():
    for arguments in (["validate", TINY, "--dep"], ["valdate", TINY], []):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2


def test_validate_imports_neither_torch_nor_ray_and_takes_under_a_second():
    code = (
        "import sys; from nemo_offload_rl.cli import main\n"
        "for recipe in sys.argv[1:]: assert main(['validate', recipe, 'cluster.num_nodes=1']) == 0\n"
        "heavy = {'torch', 'ray', 'transformers', 'numpy', 'megatron.core'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    result = subprocess.run([sys.executable, "-c", code, TINY], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    seconds = min(timed("validate", TINY, "grpo.max_num_steps=7") for _ in range(3))
    assert seconds < 1.0


def timed(*arguments: str) -> float:
    start = time.perf_counter()
    assert run(*arguments).returncode == 0
    return time.perf_counter() - start


@pytest.mark.slow
def test_deep_validation_builds_megatrons_configs():
    result = run("validate", TINY, "--deep")
    assert result.returncode == 0, result.stderr
    assert "not checked here: " in result.stderr


@pytest.mark.slow
def test_what_megatron_refuses_is_said_without_a_traceback():
    overrides = [
        "policy.megatron_cfg.activation_checkpointing=true",
        "+policy.megatron_cfg.distribute_saved_activations=true",
    ]
    sequence_parallel = ["policy.megatron_cfg.sequence_parallel=true"]
    two_ranks = ["policy.megatron_cfg.tensor_model_parallel_size=2", "cluster.gpus_per_node=2"]
    result = run("validate", TINY, "--deep", *overrides, *sequence_parallel, *two_ranks)
    assert "Traceback" not in result.stderr
