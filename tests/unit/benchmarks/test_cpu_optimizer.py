"""Tests benchmarks on a tiny model without a GPU: each gives its rows."""

import cpu_optimizer
import logits
import optimizer_offload
import torch
from activation_offload import CASES
from cpu_optimizer import WAYS
from optimizer_steps import measure


def test_streamed_state_is_measured_beside_resident_state_and_equals_it():
    case = cpu_optimizer.scaled(cpu_optimizer.CASES["1.5B, 12 bytes a parameter"], "tiny")
    saved = []
    for way in ("resident", "streamed"):
        measure(case, WAYS[way], saved.append)
    resident, streamed = cpu_optimizer.compared(saved)
    assert set(resident) == set(streamed)
    assert (resident["way"], resident["window_mib"], resident["host_mib"]) == ("resident", 0, 0)
    assert (streamed["way"], streamed["window_mib"], streamed["times_streamed"]) == ("streamed", 512, 1)
    assert (resident["bit_equal"], streamed["bit_equal"]) == (None, True)
    for row in (resident, streamed):
        assert min(row["optimizer_ms"], row["tokens_per_s"], row["logprob_ms"]) > 0


def test_validation_accepts_the_cases_of_activation_offloading():
    for case in CASES.values():
        assert case.policy(max(case.sizes))["megatron_cfg"]["offload_modules"] == list(case.modules)


def test_passes_with_and_without_chunks_of_logits_and_moves_are_measured():
    rows = logits.measure("tiny", [16], smallest=4, repeats=1, temperature=1.0)
    assert [(row["pass"], row["chunk_tokens"]) for row in rows] == [
        ("log-probs", None), ("log-probs", 16), ("training", None), ("training", 16),
    ]  # fmt: skip
    assert min(row["ms"] for row in rows) > 0
    moves = optimizer_offload.optimizer_state(0.01, torch.device("cpu"))
    assert [row["direction"] for row in moves] == ["d2h", "h2d"]
