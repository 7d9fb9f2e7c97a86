"""Tests the benchmark of ways to keep optimizer state off the GPU, on a tiny model without one."""

import json

import cpu_optimizer
import pytest
import torch
from optimizer_ways import measure as measuring
from optimizer_ways.measure import measure
from optimizer_ways.recipe import planned_run, policy_of
from optimizer_ways.ways import CASES, WAYS
from result_file import write_result

from nemo_offload_rl.algorithms.losses import NLLLoss
from nemo_offload_rl.plan import cpu_optimizer as planned_cpu_optimizer
from nemo_offload_rl.plan.model_facts import shard_facts
from nemo_offload_rl.plan.plan import settings
from nemo_offload_rl.plan.planner import make_plan

N = 1_543_714_304
FIELDS = {
    "case", "way", "fraction", "overlap", "step_ms", "optimizer_ms", "times_streamed", "exposed_ms", "peak_gpu_mib",
    "window_mib", "host_mib", "peak_host_mib", "share_of_link", "bit_equal", "tokens_per_s", "logprob_ms",
    "logprob_peak_gpu_mib", "largest_mbs",
}  # fmt: skip


def measured(case, way):
    """Returns every row that measuring a way saves, in order."""
    saved = []
    measure(case, WAYS[way], saved.append)
    return saved


def test_streamed_state_is_measured_beside_resident_state_and_equals_it():
    case = cpu_optimizer.scaled(CASES["1.5B, 12 bytes a parameter"], "tiny")
    found = [saved for way in ("resident", "streamed") for saved in measured(case, way)]
    resident, streamed = cpu_optimizer.compared(found)
    assert set(resident) == set(streamed) == FIELDS
    assert (resident["way"], resident["window_mib"], resident["host_mib"]) == ("resident", 0, 0)
    assert (streamed["way"], streamed["window_mib"]) == ("streamed", 512)
    assert streamed["host_mib"] > 0
    assert (resident["bit_equal"], streamed["bit_equal"]) == (None, True)
    assert (streamed["times_streamed"], resident["largest_mbs"]) == (1, None)
    for row in (resident, streamed):
        assert min(row["optimizer_ms"], row["tokens_per_s"], row["logprob_ms"]) > 0
        assert row["peak_host_mib"] > 100  # Python and torch take that much


def test_larger_micro_batches_are_tried_until_one_does_not_fit(monkeypatch):
    class LossOfFourRows(NLLLoss):
        def __call__(self, logprobs, *rest):
            if len(logprobs) > 4:
                raise torch.OutOfMemoryError
            return super().__call__(logprobs, *rest)

    monkeypatch.setattr(measuring, "NLLLoss", LossOfFourRows)
    case = cpu_optimizer.scaled(CASES["8B"], "tiny", steps=1)
    assert case.larger_mbs == (4, 8, 16, 32, 64, 128)
    first, second = measured(case, "streamed")
    assert (first[0]["largest_mbs"], second[0]["largest_mbs"]) == (None, 4)
    assert second[1] == first[1]
    [only] = measured(case, "resident")
    assert only[0]["largest_mbs"] is None


@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.name)
def test_every_case_is_a_recipe_in_each_of_its_ways(case):
    for way in case.ways:
        plan = settings(policy_of(case, WAYS[way], has_gpus=True))
        assert plan.streams_optimizer_state == (way == "streamed")


@pytest.mark.parametrize(("case", "size"), [("1.5B, 10 bytes a parameter", 10), ("1.5B, 12 bytes a parameter", 12)])
def test_host_memory_is_that_of_the_way_alone(case, size):
    expected = {"resident": 0, "streamed": size * N, "CPU 0.5": 8 * N, "CPU 0.5, overlap": 8 * N}
    expected |= {"CPU 1": 16 * N, "CPU 1, overlap": 16 * N}
    for way in CASES[case].ways:
        policy = policy_of(CASES[case], WAYS[way], has_gpus=True)
        facts = shard_facts(CASES[case].hf_config, policy, world_size=1, has_reference=False)
        [rank] = make_plan(policy, facts).ranks
        on_cpu = planned_cpu_optimizer.host_bytes(policy, rank.facts)
        assert sum(on_cpu.values()) + rank.total_host_bytes == expected[way]


def test_random_weights_of_8b_are_made_on_an_h100():
    """mcore/build.py creates a model on the GPU only if it takes at most a quarter of the GPU."""
    [rank] = planned_run(CASES["8B"], []).plan.ranks
    assert rank.facts.num_params == 8_190_735_360
    assert CASES["8B"].hf_config["dtype"] == "bfloat16"
    assert 2 * rank.facts.num_params < 78 * 2**30 / 4


def test_the_cpu_optimizer_is_tried_with_both_fractions_and_overlap():
    found = set()
    case = CASES["1.5B, 10 bytes a parameter"]
    for way in case.ways:
        optimizer = policy_of(case, WAYS[way], has_gpus=True)["megatron_cfg"]["optimizer"]
        if optimizer["optimizer_cpu_offload"]:
            found.add((optimizer["optimizer_offload_fraction"], optimizer["overlap_cpu_optimizer_d2h_h2d"]))
    assert found == {(0.5, False), (0.5, True), (1.0, False), (1.0, True)}


def test_ways_are_compared_with_an_earlier_one_that_steps_as_much_on_the_cpu():
    made = [(0.0, []), (0.0, [1, 2]), (0.0, [1, 3]), (0.5, [1, 4]), (0.5, [1, 4])]
    rows = [({"way": str(index), "fraction": one[0], "optimizer_ms": 1.0}, one[1]) for index, one in enumerate(made)]
    found = cpu_optimizer.compared(rows)
    assert [row["bit_equal"] for row in found] == [None, None, False, None, True]
    assert {row["times_streamed"] for row in found} == {None}


def test_the_cpu_optimizers_ratio_to_streamed_state_is_in_rows_and_printed():
    def row(way, fraction, optimizer_ms, peak):
        return {"case": "A", "way": way, "fraction": fraction, "optimizer_ms": optimizer_ms, "peak_gpu_mib": peak}

    ways = [
        ("resident", 0, 20.0, 900),
        ("streamed", 0, 300.0, 500),
        ("CPU 0.5", 0.5, 330.0, 700),
        ("CPU 1", 1, 660.0, 400),
    ]
    refused = {"case": "A", "way": "CPU 1, overlap", "fraction": 1, "refused": "no memory"}
    found = cpu_optimizer.compared([*((row(*one), [1]) for one in ways), (refused, [])])
    assert [one["times_streamed"] for one in found] == [0.067, 1.0, 1.1, 2.2, None]
    [line] = cpu_optimizer.ratio_lines(found)
    assert line.startswith(
        "A: the optimizer's step of CPU 1 takes 2.2 times that of streamed state (660.0 and 300.0 ms)"
    )
    assert line.endswith("400 and 500 MiB")


def test_rows_of_other_cases_stay_in_a_result_with_where_they_are_from(tmp_path):
    path = tmp_path / "result.json"
    write_result(path, [{"case": "A", "way": "x", "ms": 1}, {"case": "A", "way": "y", "ms": 2}])
    before = json.loads(path.read_text()) | {"machine": "another", "commit": "1234567"}
    path.write_text(json.dumps(before))
    for _ in range(2):  # a run writes its rows after each case
        write_result(
            path, [{"case": "A", "way": "y", "ms": 3}, {"case": "B", "way": "x", "ms": 4}], append_by=["case", "way"]
        )
    after = json.loads(path.read_text())
    origin = {name: before[name] for name in ("machine", "commit", "command", "date")}
    assert after["rows"] == [
        origin | {"case": "A", "way": "x", "ms": 1},
        {"case": "A", "way": "y", "ms": 3},
        {"case": "B", "way": "x", "ms": 4},
    ]
    assert (after["machine"], after["commit"]) != ("another", "1234567")
    write_result(path, [{"case": "B", "way": "x", "ms": 5}])
    assert json.loads(path.read_text())["rows"] == [{"case": "B", "way": "x", "ms": 5}]
