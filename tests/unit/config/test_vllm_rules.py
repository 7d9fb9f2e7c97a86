"""Keys of generation with vLLM or on devices of its own: what loads, what counts without a GPU."""

import pytest

from nemo_offload_rl.config import for_machine, load
from nemo_offload_rl.config.installed import declared_fields
from nemo_offload_rl.config.megatron import DeviceSplit, split_devices
from nemo_offload_rl.config.rules import vllm
from nemo_offload_rl.generation.vllm_arguments import ENVIRONMENT
from nemo_offload_rl.plan.plan import settings
from nemo_offload_rl.residency.table import DEDICATED_TABLE
from tests.unit.config.conftest import CONFIGS

TINY = CONFIGS / "grpo_tiny_cpu.yaml"
VLLM = "policy.generation.vllm_cfg"
KWARGS = "policy.generation.vllm_kwargs"
ON = "policy.generation.backend=vllm"
pytestmark = pytest.mark.usefixtures("installed_vllm")


def test_where_vllm_is_not_installed_any_argument_is_left_to_it(monkeypatch):
    monkeypatch.setattr(declared_fields, "source_folder", lambda: None)  # workers may have vLLM
    assert load(TINY, [ON, f"+{KWARGS}.zzz=5"]).config["policy"]["generation"]["vllm_kwargs"]["zzz"] == 5


def test_variables_that_the_engine_sets_are_those_that_are_refused():
    assert set(vllm.OWN_VARIABLES) == set(ENVIRONMENT)


def test_without_a_gpu_the_hugging_face_model_generates():
    config = load(TINY, [ON]).config
    adapted, lines = for_machine(config, has_gpus=False)
    assert adapted["policy"]["generation"]["backend"] == "transformers"
    assert "policy.generation.backend is transformers on this machine: it names an engine that needs a GPU" in lines
    assert for_machine(config, has_gpus=True)[0]["policy"]["generation"]["backend"] == "vllm"


RESOURCES = "policy.generation.colocated.resources"
APART = "policy.generation.colocated.enabled=false"
ONE_OF_TWO = f"{APART} cluster.gpus_per_node=2 {RESOURCES}.gpus_per_node=1"


def split(*overrides):
    config = load(TINY, ["~warm_start", *overrides]).config
    return split_devices(config["cluster"], config["policy"])


def test_one_node_or_whole_nodes_are_divided():
    assert split("cluster.gpus_per_node=2") == DeviceSplit(1, 2)
    one = split(APART, "cluster.gpus_per_node=4", f"{RESOURCES}.gpus_per_node=2")
    assert (one.policy_ranks, one.policy_nodes, one.policy_per_node, one.engine_devices_per_node) == (2, 1, 2, 2)
    several = split(APART, "cluster.num_nodes=4", "cluster.gpus_per_node=2", f"{RESOURCES}.num_nodes=3")
    assert (several.policy_ranks, several.policy_nodes, several.policy_per_node) == (2, 1, 2)
    assert (several.num_engine_devices, several.engine_devices_per_node) == (6, 2)


def test_the_policy_stays_on_its_gpus():
    recipe = load(TINY, [*ONE_OF_TWO.split(), "policy.offload_optimizer_for_refit=true"])
    assert settings(recipe.config["policy"]).table == DEDICATED_TABLE
    assert any("offload_optimizer_for_refit has no effect" in line for line in recipe.notes)
