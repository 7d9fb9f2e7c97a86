"""Keys of the CPU optimizer: what is refused, what is said, and what loads."""

import pytest

from nemo_offload_rl.config import for_machine, load
from tests.unit.config.conftest import CONFIGS
from tests.unit.config.test_upstream import MEGATRON_RECIPE, OUR_SECTIONS

OPTIMIZER = "policy.megatron_cfg.optimizer"
ON = [f"{OPTIMIZER}.optimizer_cpu_offload=true"]
HALF = [*ON, f"{OPTIMIZER}.optimizer_offload_fraction=0.5", f"{OPTIMIZER}.use_precision_aware_optimizer=true"]
SGD = [f"{OPTIMIZER}.optimizer=sgd", f"{OPTIMIZER}.use_precision_aware_optimizer=false"]


def notes_of(*overrides):
    return [note for note in load(CONFIGS / "grpo_tiny_cpu.yaml", list(overrides)).notes if OPTIMIZER in note]


@pytest.mark.parametrize(
    "overrides",
    [
        ON,
        [*ON, f"~{OPTIMIZER}.optimizer_offload_fraction"],
        [*ON, f"{OPTIMIZER}.optimizer_offload_fraction=1.5"],
        [*HALF, *SGD, f"{OPTIMIZER}.use_distributed_optimizer=false"],
        [*HALF, f"+{OPTIMIZER}.decoupled_weight_decay=false"],
        [f"{OPTIMIZER}.overlap_cpu_optimizer_d2h_h2d=true"],
        [*HALF, f"+{OPTIMIZER}.exp_avg_sq_dtype=bfloat16"],
        [f"+{OPTIMIZER}.use_torch_optimizer_for_cpu_offload=true"],
    ],
)
def test_what_cannot_be_is_refused_with_its_remedy(overrides, error_of):
    error_of(*overrides)


def test_it_takes_adam_and_sgd():
    assert notes_of(*HALF, f"{OPTIMIZER}.overlap_cpu_optimizer_d2h_h2d=true") == []
    load(CONFIGS / "grpo_tiny_cpu.yaml", [*HALF, *SGD])


def test_the_keys_are_nemo_rls():
    overrides = [
        *ON,
        f"{OPTIMIZER}.optimizer_offload_fraction=1.0",
        f"++{OPTIMIZER}.overlap_cpu_optimizer_d2h_h2d=true",
    ]
    optimizer = load(MEGATRON_RECIPE, [*OUR_SECTIONS, *overrides]).config["policy"]["megatron_cfg"]["optimizer"]
    assert optimizer["optimizer_cpu_offload"] is True
    assert optimizer["optimizer_offload_fraction"] == 1.0


def test_without_a_gpu_it_is_off_and_said_in_one_line():
    recipe = CONFIGS / "grpo_tiny_cpu.yaml"
    adapted, lines = for_machine(load(recipe, HALF).config, has_gpus=False)
    optimizer = adapted["policy"]["megatron_cfg"]["optimizer"]
    assert (optimizer["optimizer"], optimizer["optimizer_cpu_offload"]) == ("adam", False)
    (line,) = (line for line in lines if "cpu_offload" in line)
    assert line.endswith("is off on this machine: it needs a GPU; here the whole optimizer runs on the CPU")
    adapted, lines = for_machine(load(recipe, [*HALF, *SGD]).config, has_gpus=False)
    assert adapted["policy"]["megatron_cfg"]["optimizer"]["use_distributed_optimizer"] is False
    assert any("use_distributed_optimizer is off on this machine" in line for line in lines)
