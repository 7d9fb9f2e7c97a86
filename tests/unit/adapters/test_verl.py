"""Tests the adapter in verl's real Megatron engine, one rank, tiny model: each of `verl_scenarios` is a test."""

import functools
import importlib.util

import pytest
import torch
from support.ranks import run_ranks

pytestmark = pytest.mark.slow
ON_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="is for machines without a GPU")
WITH_VERL = pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="tools/setup.sh --group adapters")
SCENARIOS = [
    "with_external_lib_the_registry_hands_out_our_engines",
    "ten_steps_equal_those_without_any_moves",
    "ten_steps_without_the_distributed_optimizer_equal_those_without_any_moves",
    "shards_are_exported_while_away",
    "a_reference_policy_has_its_parameters_moved",
    "a_checkpoint_made_while_away_has_the_same_bytes_and_leaves_everything_away",
    "a_second_initialization_gives_the_memory_of_the_first_back",
    "state_without_host_memory_does_not_leave_and_its_key_is_named",
    "what_ranges_cannot_do_is_refused",
]


@functools.cache
def results() -> dict[str, str]:
    """Returns the results of all scenarios, run in one process, since importing verl takes seconds."""
    assert importlib.util.find_spec("verl") is not None, "verl is not installed: tools/setup.sh --group adapters"
    return run_ranks(_scenarios, 1, num_ports=1)[0]


def _scenarios(rank: int, world_size: int, ports: list[int]) -> dict[str, str]:
    from support.verl_scenarios import run_scenarios

    return run_scenarios(rank, world_size, ports)


@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=ON_CPU), pytest.param("cuda", marks=[pytest.mark.gpu, WITH_VERL])]
)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_in_verls_engine(scenario: str, device: str) -> None:
    assert list(results()) == SCENARIOS
    assert not results()[scenario], results()[scenario]
