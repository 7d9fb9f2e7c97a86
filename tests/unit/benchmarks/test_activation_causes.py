"""Tests the ways in benchmarks/activation_offload.py's table of causes: all train alike, with the stated requests."""

import contextlib

import pytest
import torch
from activation_cases import causes
from activation_cases.host_time import seconds_inside
from activation_cases.table import ResultFile, Setting
from activation_cases.worker import offloader
from support.late_copies import LateCopies
from support.ranks import free_port, worker_of_rank
from support.tiny import offloading_activations, random_batch, tiny_policy

from nemo_offload_rl.algorithms.losses import NLLLoss
from nemo_offload_rl.mcore.patches import activation_offload

ROWS, LENGTH = 4, 16
SHORT_BYTES = 64


class Counting(LateCopies):
    """Records the bytes of each request."""

    def __init__(self) -> None:
        super().__init__(eager_share=0.1)
        self.out_bytes: list[int] = []
        self.back_bytes: list[int] = []

    def out(self, spans, after):
        self.out_bytes.append(sum(span.nbytes for span in spans))
        return super().out(spans, after)

    def back(self, spans, after):
        self.back_bytes.append(sum(span.nbytes for span in spans))
        return super().back(spans, after)


@pytest.fixture
def train(monkeypatch):
    """Builds a worker and returns a function that trains a step and returns its loss and gradient norm."""
    monkeypatch.setattr(activation_offload, "CudaCopies", lambda device, graphs: Counting())
    monkeypatch.setattr(causes, "SHORT_BYTES", SHORT_BYTES)
    built = []

    def build(policy):
        worker = worker_of_rank(policy, 0, 1, free_port())
        built.append(worker)
        return worker

    yield build
    for worker in built[-1:]:
        worker.shutdown()


def step(worker):
    report = worker.train(random_batch(ROWS, LENGTH), NLLLoss(), gbs=ROWS, mbs=2)
    return report["loss"], report["grad_norm"]


@pytest.mark.parametrize("modules", [["qkv_linear"], ["qkv_linear", "core_attn"]], ids="+".join)
def test_every_way_trains_as_plain_steps_do_and_asks_for_what_it_says(train, modules):
    plain = train(tiny_policy())
    want = [step(plain) for _ in range(7)]
    plain.shutdown()
    worker = train(offloading_activations(tiny_policy(), modules))
    active = offloader(worker)
    attributes = set(vars(active)), set(vars(active.copies))
    found, asked = [step(worker)], {}  # the first step does not know the last layer yet, and moves it, too
    for name, way in causes.ways(active, worker.device).items():
        active.copies.out_bytes.clear()
        active.copies.back_bytes.clear()
        with way():
            found.append(step(worker))
        asked[name] = list(active.copies.out_bytes), list(active.copies.back_bytes)
    found.append(step(worker))
    assert found == want
    assert asked["plain"] == asked["hooks"] == ([], [])
    out, back = asked["offloaded"]
    assert sum(out) == active.report.total().moved_bytes > 0
    # On a CPU the layer keeps some of it alive, which need not come back where steps are offloaded.
    half = len(out) // (ROWS // 2)
    assert asked["beside"] == (out, [*reversed(out[:half]), *reversed(out[half:])])
    assert half > len(modules)
    short_out, short_back = asked["requests"]
    assert (len(short_out), short_back) == (len(out), [SHORT_BYTES] * len(back))
    assert sum(short_out) < sum(out) / 4
    assert (set(vars(active)), set(vars(active.copies))) == attributes


def test_causes_are_measured_in_a_worker_that_has_not_trained_yet(train, monkeypatch, tmp_path):
    @contextlib.contextmanager
    def training(combination, size):
        worker = train(offloading_activations(tiny_policy(), ["qkv_linear", "core_attn"]))
        yield worker, lambda: step(worker)

    monkeypatch.setattr(causes, "training", training)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    setting = Setting(ResultFile(tmp_path / "result.json"), steps=2)
    causes.parts(setting)["dense/attention"]()
    assert [row["way"] for row in setting.file.rows] == ["plain", "hooks", "requests", "beside", "offloaded"]
    assert all(row["step_ms"] > 0 and row["steps"] == 2 for row in setting.file.rows)


def test_time_inside_of_the_manager_is_that_of_its_calls_and_changes_no_step(train):
    plain = train(tiny_policy())
    want = [step(plain) for _ in range(8)]
    plain.shutdown()
    worker = train(offloading_activations(tiny_policy(), ["qkv_linear", "core_attn"]))
    active = offloader(worker)
    attributes = set(vars(active)), set(vars(active.copies))
    found = []
    times = seconds_inside(active, lambda: found.append(step(worker)), 2)
    found.append(step(worker))
    assert found == want  # three to warm up, two of each kind in turn, one more
    assert (set(vars(active)), set(vars(active.copies))) == attributes
    active.copies.out_bytes.clear()
    active.copies.back_bytes.clear()
    step(worker)
    asked = {"out": len(active.copies.out_bytes), "back": len(active.copies.back_bytes)}
    assert {kind: times[kind]["calls"] for kind in asked} == asked
    num_micro_batches = ROWS // 2
    assert times["forward plain"]["calls"] == times["forward offloaded"]["calls"] == num_micro_batches
    groups = num_micro_batches * 2 * worker.state.config.num_layers
    assert times["commit"]["calls"] == times["begin_backward"]["calls"] == groups
    assert times["unpack"]["ms"] > times["begin_backward"]["ms"] > times["back"]["ms"] > 0
    assert times["forward offloaded"]["ms"] > times["commit"]["ms"] > times["out"]["ms"] > 0
