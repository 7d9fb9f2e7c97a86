"""Tests the adapter in verl's real Megatron engine, one rank, tiny model: checks the results of `verl_scenarios`."""

import functools
import importlib.util
from typing import Any

import pytest
import torch
from support.ranks import run_ranks

pytestmark = pytest.mark.slow
HEADS = {"language": "LM", "value": "Value"}
WAYS = ["verl", "ours", "ours, optimizer alone"]
ON_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="is for machines without a GPU")
WITH_VERL = pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="tools/setup.sh --group adapters")


@pytest.fixture(
    params=[pytest.param("cpu", marks=ON_CPU), pytest.param("cuda", marks=[pytest.mark.gpu, WITH_VERL])], autouse=True
)
def device(request: pytest.FixtureRequest) -> str:
    """Returns where the scenarios ran: on the GPU if there is one."""
    return str(request.param)


@functools.cache
def results() -> dict[str, tuple[bool, Any]]:
    """Returns the results of all scenarios, run in one process, since importing verl takes seconds."""
    assert importlib.util.find_spec("verl") is not None, "verl is not installed: tools/setup.sh --group adapters"
    return run_ranks(_scenarios, 1, num_ports=1)[0]


def _scenarios(rank: int, world_size: int, ports: list[int]) -> dict[str, tuple[bool, Any]]:
    from support.verl_scenarios import run_scenarios

    return run_scenarios(rank, world_size, ports)


def result(scenario: str) -> Any:
    fine, value = results()[scenario]
    assert fine, value
    return value


def test_with_external_lib_the_registry_hands_out_our_engines():
    classes = result("registry")
    ours, verls = (f"{kind}With{{}}Head" for kind in ("RangeOffload", "MegatronEngine"))
    for time, head, fsdp in (("before", verls, "FSDPEngineWithLMHead"), ("after", ours, "RefusedEngine")):
        of_megatron = {f"{model}_model megatron": head.format(kind) for model, kind in HEADS.items()}
        assert classes[time] == of_megatron | {"language_model fsdp2": fsdp}


@pytest.mark.parametrize("way", WAYS)
def test_ten_steps_equal_those_without_any_moves(way):
    """Compares loss, gradient norm, exported weights and log-probs of each step, and the final parameters and state."""
    plain, moved = result("training")["resident"], result("training")[way]
    assert moved["reports"] == plain["reports"]
    assert moved["state"] == plain["state"]
    losses = [report["loss"] for report in plain["reports"]]
    assert len(set(losses)) == 10


def test_after_a_step_the_gpu_is_empty():
    left = {way: set(found["left"]) for way, found in result("training").items()}
    assert left["verl"] == left["ours"] == {0}
    assert min(left["resident"]) > 0
    assert min(left["ours, optimizer alone"]) > 0  # parameters and gradients


def test_ten_steps_without_the_distributed_optimizer_equal_those_without_any_moves():
    found = result("without_distributed_optimizer")
    assert found["ours"]["reports"] == found["resident"]["reports"]
    assert found["ours"]["state"] == found["resident"]["state"]
    assert set(found["ours"]["left"]) == {0}


def test_shards_are_exported_while_away():
    found = result("exported_shards")
    assert found["ours"] == found["resident"]
    assert len(found["ours"]) > 20
    assert found["left before"] == [0]
    assert found["in ranges"] == []  # which another process could not open


def test_a_reference_policy_has_its_parameters_moved():
    found = result("reference_policy")
    assert found["ours"] == found["resident"]
    assert found["left"] == 0


def test_a_checkpoint_made_while_away_has_the_same_bytes_and_leaves_everything_away():
    found = result("checkpoint")
    assert found["num entries"] > 20
    assert found["differing"] == []
    assert found["where"] == {"params": "host", "grads": "dropped", "optimizer_state": "host"}
    assert found["next steps equal"]
    assert found["loaded is away"]
    assert found["loaded"] == found["resident"]


def test_a_second_initialization_gives_the_memory_of_the_first_back():
    found = result("reset")
    assert found["equal"]
    assert len(set(found["bytes"])) == 1
    assert found["bytes at the end"] == 0


@pytest.mark.parametrize(("key", "kind"), [("param_offload", "params"), ("optimizer_offload", "optimizer_state")])
def test_state_without_host_memory_does_not_leave_and_its_key_is_named(key, kind):
    found = result("kept_state")
    assert f"verl moves {kind} to the CPU, but {key} of the engine is false" in found[key]
    assert f"set {key}: true" in found[key]
    assert found[f"{key}: where"] == ["gpu"]


def test_what_ranges_cannot_do_is_refused():
    refusals = result("refusals")
    assert len(refusals) == 6
    for words, message in refusals.items():
        assert words in message
        assert message.endswith("leave external_lib=nemo_offload_rl.adapters.verl out.")
