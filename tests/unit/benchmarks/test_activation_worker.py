"""Tests the environment in which benchmarks/activation_offload.py builds its workers."""

import os

import pytest
from activation_cases.combinations import Combination, single_gpu
from activation_cases.worker import RECIPES, environment_of, policy, running

from nemo_offload_rl.config import load

FUSED_EXPERTS = "NVTE_CUTEDSL_FUSED_GROUPED_MLP"
SMALL = (
    "policy.hf_config.num_hidden_layers=1",
    "policy.hf_config.hidden_size=64",
    "policy.hf_config.intermediate_size=64",
    "policy.max_total_sequence_length=16",
)


def megatron_cfg(combination: Combination):
    """Returns the config as on a machine with a GPU."""
    return load(RECIPES / f"{combination.model}.yaml", combination.overrides()).config["policy"]["megatron_cfg"]


@pytest.mark.parametrize("before", [None, "0"])
def test_fused_experts_are_switched_on_for_their_combination_and_its_plain_run_alone(monkeypatch, before):
    monkeypatch.delenv(FUSED_EXPERTS, raising=False)
    if before is not None:
        monkeypatch.setenv(FUSED_EXPERTS, before)
    (fused,) = (combination for combination in single_gpu() if "fused_group_mlp" in combination.modules)
    for combination in (fused, fused.plain()):
        outside = dict(os.environ)
        with environment_of(megatron_cfg(combination)):
            assert os.environ[FUSED_EXPERTS] == "1"
        assert dict(os.environ) == outside
    with environment_of(megatron_cfg(Combination("tiny_moe"))):
        assert os.environ.get(FUSED_EXPERTS) == before


def test_a_worker_runs_in_its_recipes_environment():
    section = policy("tiny_dense", [*SMALL, "policy.megatron_cfg.env_vars={TOY_VARIABLE: from the recipe}"])
    with running(section):
        assert os.environ["TOY_VARIABLE"] == "from the recipe"
    assert "TOY_VARIABLE" not in os.environ
