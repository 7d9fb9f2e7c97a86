"""Tests memory curves of benchmarks/activation_offload.py: a step's points on a CPU, and pictures of made-up points."""

import itertools
import json

import pytest
from activation_cases.memory_curve import Memory, Point, Sample, cells, curve_file, record
from activation_cases.memory_picture import draw
from activation_cases.worker import MIB, Feed, policy, running
from matplotlib.image import imread

NUM_LAYERS = 2
SMALL = (
    f"policy.hf_config.num_hidden_layers={NUM_LAYERS}",
    "policy.hf_config.hidden_size=64",
    "policy.hf_config.intermediate_size=64",
    "policy.max_total_sequence_length=16",
)


def expected_points(num_micro_batches):
    yield Point("forward", 1, "nothing")
    for number in range(1, num_micro_batches + 1):
        for behind in ("embedding", "layer 1", "layer 2", "output layer", "log-probs"):
            yield Point("forward", number, behind)
        for behind in ("loss", "output layer", "layer 2", "layer 1"):
            yield Point("backward", number, behind)
    yield Point("optimizer", None, "optimizer")


def num_hooks(worker):
    modules = list(worker.state.model[0].modules())
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in modules)


def two_steps(first):
    """Returns loss and gradient norm of a new worker's first two steps; the first is `first(worker, step)`."""
    section = policy("tiny_dense", SMALL)
    with running(section) as worker:
        feed = Feed(worker, section, "2", 2)
        reports = []
        first(worker, lambda: reports.append(feed.train(feed.batch(0))))
        reports.append(feed.train(feed.batch(1)))
    return [(report["loss"], report["grad_norm"]) for report in reports]


def test_points_come_in_the_order_of_the_step_and_change_none_of_its_numbers():
    calls, clock = itertools.count(), itertools.count(100)
    samples = []

    def in_use():
        call = next(calls)
        return Memory(call * MIB, (call + 1) * MIB)

    def watched(worker, step):
        hooks_before = num_hooks(worker)
        samples.extend(record(worker, step, in_use, lambda: next(clock)))
        assert num_hooks(worker) == hooks_before

    numbers = two_steps(watched)
    assert next(calls) == len(samples)  # the second step did not query it
    assert [sample.point for sample in samples] == list(expected_points(2))
    rows = cells(samples, lambda begin, end: end - begin)
    assert [row["ms"] for row in rows] == [row["allocated_mib"] for row in rows] == list(range(len(samples)))
    assert rows[3] == {
        "doing": "forward",
        "number": 1,
        "behind": "layer 2",
        "ms": 3,
        "allocated_mib": 3.0,
        "peak_mib": 4.0,
    }
    assert numbers == two_steps(lambda _worker, step: step())


def test_hooks_go_when_the_step_fails():
    with running(policy("tiny_dense", SMALL)) as worker:
        hooks_before = num_hooks(worker)

        def fail():
            assert num_hooks(worker) > hooks_before
            raise KeyError("step")

        with pytest.raises(KeyError, match="step"):
            record(worker, fail, lambda: Memory(0, 0), lambda: 0)
        assert num_hooks(worker) == hooks_before


def a_step(way, slower=1.0, top=8.0):
    """Returns rows of a step that takes 100 ms times `slower` and peaks at `top` GiB."""
    places = [
        ("forward", 1, 0, 1.0),
        ("forward", 1, 20, 4.0),
        ("forward", 1, 30, 6.0),
        ("backward", 1, 50, top),
        ("backward", 1, 90, 3.0),
        ("optimizer", None, 100, 2.0),
    ]
    samples = [
        Sample(Point(doing, number, "a layer"), at * slower, Memory(MIB, int(gib * 1024 * MIB)))
        for doing, number, at, gib in places
    ]
    rows = cells(samples, lambda begin, end: end - begin)
    return [{"part": "dense/attention", "way": way, **row} for row in rows]


def has_colour(picture, hexadecimal):
    wanted = [int(hexadecimal[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return bool((abs(picture[..., :3] - wanted).max(axis=-1) < 0.02).sum() > 100)


def test_both_steps_are_in_the_picture(tmp_path):
    file, picture = tmp_path / "memory.json", tmp_path / "pictures" / "memory.png"
    file.write_text(json.dumps({"rows": [*a_step("plain"), *a_step("offloaded", slower=1.1, top=6.5)]}))
    draw(file, picture)
    drawn = imread(picture)
    assert drawn.shape[1] == 1200
    assert has_colour(drawn, "#0072B2")
    assert has_colour(drawn, "#C0461B")


def test_points_go_beside_the_result(tmp_path):
    assert curve_file(tmp_path / "activation_offload.json") == tmp_path / "activation_offload_memory.json"
