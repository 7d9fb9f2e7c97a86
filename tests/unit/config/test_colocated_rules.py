"""Generation on devices of its own: what the cluster is divided into, and what is refused before Ray starts."""

import pytest

from nemo_offload_rl.config import load
from nemo_offload_rl.config.megatron import DeviceSplit, split_devices
from nemo_offload_rl.plan.plan import settings
from nemo_offload_rl.residency.table import DEDICATED_TABLE
from tests.unit.config.conftest import CONFIGS, each_of

TINY = CONFIGS / "grpo_tiny_cpu.yaml"
RESOURCES = "policy.generation.colocated.resources"
APART = "policy.generation.colocated.enabled=false"
TRANSPORT = "policy.generation.refit_transport"
ONE_OF_FOUR = f"{APART} cluster.gpus_per_node=4 {RESOURCES}.gpus_per_node=1"
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


BROKEN = {
    "colocated_resources": [
        APART,
        f"{APART} cluster.gpus_per_node=4",
        f"{APART} cluster.gpus_per_node=2 {RESOURCES}.gpus_per_node=2",
        f"{ONE_OF_FOUR} {RESOURCES}.num_nodes=2",
        f"{APART} cluster.num_nodes=2",
        f"{APART} cluster.num_nodes=2 {RESOURCES}.num_nodes=2",
        f"{APART} cluster.num_nodes=2 cluster.gpus_per_node=2 {RESOURCES}.num_nodes=1 {RESOURCES}.gpus_per_node=1",
    ],
    "ranks": [
        f"{ONE_OF_FOUR} policy.megatron_cfg.tensor_model_parallel_size=2",
        f"{ONE_OF_FOUR} policy.train_micro_batch_size=1",
        f"policy.generation.backend=vllm {APART} cluster.gpus_per_node=4 {RESOURCES}.gpus_per_node=3 "
        "policy.generation.vllm_cfg.tensor_parallel_size=2",
    ],
    "colocated_refit_transport": [f"+{TRANSPORT}=nixl", f"{ONE_OF_TWO} +{TRANSPORT}=mcore"],
}


@each_of(BROKEN)
def test_sizes_that_do_not_fit_are_refused_with_a_remedy(overrides, error_of):
    error_of(*overrides)


@pytest.mark.parametrize("transport", ["nccl_reshard", "nixl", "vllm_s3_sparse", "vllm_zmq_sparse"])
def test_weights_are_broadcast_whichever_transport_is_named(transport):
    recipe = load(
        TINY, [*ONE_OF_TWO.split(), f"+{TRANSPORT}={transport}", f"+policy.generation.refit_cfg.{transport}.x=1"]
    )
    assert recipe.config["policy"]["generation"]["refit_transport"] is None
    assert (
        f"{TRANSPORT} is null instead of {transport}: refits broadcast the full weights, bit for bit the same"
        in recipe.notes
    )


def test_the_policy_stays_on_its_gpus():
    recipe = load(TINY, [*ONE_OF_TWO.split(), "policy.offload_optimizer_for_refit=true"])
    assert settings(recipe.config["policy"]).table == DEDICATED_TABLE
    assert any("offload_optimizer_for_refit has no effect" in line for line in recipe.notes)
