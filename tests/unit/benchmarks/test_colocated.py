"""The benchmark of the switch between trainer and generator: its parts, without Ray."""

from types import SimpleNamespace

import colocated
import pytest
import torch
from colocated_ways import marks as marks_file
from colocated_ways.engines import marked_llm
from colocated_ways.holdings import flatness
from colocated_ways.marks import Mark, Marks, read_marks
from colocated_ways.planned import planned_gib
from colocated_ways.run import RECIPES, Measured, figures_of_marks, overrides
from colocated_ways.settings import OURS, UPSTREAM
from colocated_ways.switches import switches
from colocated_ways.upstream_state import UpstreamEngine
from support.tiny_megatron import one_rank, tiny_megatron

from nemo_offload_rl import config
from nemo_offload_rl.plan.plan import settings
from nemo_offload_rl.residency.table import Phase

ARGUMENTS = SimpleNamespace(
    scale="full",
    config=None,
    model=None,
    backend="vllm",
    enforce_eager=False,
    overrides=[],
    cycles=0,
    deterministic=False,
)


def test_a_switch_is_from_the_last_token_to_training_and_from_the_optimizer_to_the_next_prefill():
    cycle = ("first_prefill_kernel", "last_token", "first_training_kernel", "last_optimizer_kernel")
    marks = [
        Mark(name, 100 * number + at) for number in range(3) for name, at in zip(cycle, (0, 10, 12, 60), strict=True)
    ]
    found = switches(marks, start_s=50)  # the first cycle's end does not belong to the others
    assert [(one.to_training_s, one.to_generation_s) for one in found] == [(2, 40)]
    assert found[0].both_s == 42


def test_of_several_ranks_and_engines_the_last_one_ends_a_part_of_the_switch():
    cycle = {"first_prefill_kernel": 0, "last_token": 10, "first_training_kernel": 12, "last_optimizer_kernel": 60}
    marks = [
        Mark(name, 100 * number + at + late, process=f"{name}-{late}")
        for number in range(2) for name, at in cycle.items() for late in (0, 1)
    ]  # fmt: skip
    found = switches(marks, start_s=-1)
    assert [(one.to_training_s, one.to_generation_s) for one in found] == [(2, 40)]


def test_spans_before_the_first_training_are_not_counted():
    marks = [
        Mark("sleep", 1, 9.0), Mark("first_token", 7), Mark("last_optimizer_kernel", 8), Mark("sleep", 10, 2.0),
        Mark("wake_up weights", 11, 1.0), Mark("refit", 12, 5.0),
    ]  # fmt: skip
    found = {name: value for name, value, _ in figures_of_marks(marks, start_s=2, switch_start_s=20)}
    assert found == {
        "refit, by itself": 5.0,
        "sleep, by itself": 2.0,
        "wake_up weights, by itself": 1.0,
        "sleep and wake_up, by themselves": 3.0,
        "start-up: from the command to the end of first_token": 5.0,
    }


class ToyLLM:
    """What the marked class calls of `vllm.LLM`."""

    def __init__(self):
        self.calls = []
        self.model = torch.nn.Linear(2, 2)
        worker = SimpleNamespace(get_model=lambda: self.model)
        executor = SimpleNamespace(driver_worker=SimpleNamespace(worker=worker))
        self.llm_engine = SimpleNamespace(model_executor=executor, step=lambda: self.model(torch.ones(2)))

    def generate(self):
        self.llm_engine.step()
        self.llm_engine.step()

    def reset_prefix_cache(self):
        self.calls.append("reset_prefix_cache")

    def sleep(self, level):
        self.calls.append(("sleep", level))

    def wake_up(self, tags):
        self.calls.append(("wake_up", tags))


@pytest.mark.parametrize(
    ("like_upstream", "slept"), [(False, [("sleep", 2)]), (True, ["reset_prefix_cache", ("sleep", 1)])]
)
def test_vllm_notes_its_moments_and_sleeps_at_level_1_like_upstream(tmp_path, monkeypatch, like_upstream, slept):
    monkeypatch.setenv(marks_file.FOLDER_VARIABLE, str(tmp_path))
    llm = marked_llm(ToyLLM, Marks("engine"), like_upstream=like_upstream)()
    llm.wake_up(["weights"])
    llm.generate()
    llm.generate()
    llm.sleep(level=2)
    assert llm.calls == [("wake_up", ["weights"]), *slept]
    generation = ["first_prefill_kernel", "first_token", "last_token"]
    found = [mark.name for mark in read_marks(tmp_path)]
    assert found == ["vllm_build", "wake_up weights", *generation, *generation, "sleep"]


def weights(tiny):
    return torch.cat([parameter.detach().flatten() for parameter in tiny.model.parameters()])


def test_upstreams_moves_leave_training_as_it_is_and_reference_weights_are_swapped_in_and_out():
    plan = settings(config.load(RECIPES["tiny"], []).config["policy"])
    with one_rank():
        resident = tiny_megatron()
        expected = [resident.step(seed) for seed in range(3)]
        tiny = tiny_megatron()
        state = SimpleNamespace(model=[tiny.model], optimizer=tiny.optimizer)
        engine = UpstreamEngine(state, plan, node=None, with_reference=True, fixed_bytes={})
        at_start = weights(tiny)
        found = []
        for seed in range(3):
            engine.residency.enter(Phase.REFIT)
            assert [buffer.grad_data.untyped_storage().nbytes() for buffer in tiny.model.buffers] == [0]
            engine.residency.enter(Phase.GENERATE)
            engine.residency.enter(Phase.LOGPROB)
            own = weights(tiny)
            with engine.reference.swapped_in():
                assert torch.equal(weights(tiny), at_start)
            assert torch.equal(weights(tiny), own)
            engine.residency.enter(Phase.TRAIN)
            found.append(tiny.step(seed))
        assert not torch.equal(own, at_start)
        assert found == expected
        engine.close()


def test_settings_that_compute_something_else_show():
    figures = [
        (name, 2.0, "s")
        for name in ("refit, by itself", "switch to training", "switch to generation", "switch both ways")
    ]
    ours = Measured(figures, losses=[1.0], grad_norms=[1.0], greedy_ids=[[1, 2]])
    upstream = Measured([(name, 3 * value, unit) for name, value, unit in figures], [1.5], [1.0], [[1, 3]])
    rows = colocated.rows_of({OURS: ours, UPSTREAM: upstream}, ARGUMENTS)
    both = {row["metric"]: row["value"] for row in rows if row["setting"] == "both"}
    assert both["losses of all steps are equal"] is False and both["greedy tokens are equal"] is False
    assert both["largest difference of losses"] == 0.5
    assert both["switch both ways: upstream_way over ours"] == 3.0
    assert {tuple(row) for row in rows} == {("setting", "gpus", "model", "metric", "value", "unit")}


def test_what_grows_over_many_cycles_is_named():
    readings = [
        {"engine: file descriptors": 40 + (number == 7), "GPU: used GiB, by the driver": 3 + 0.002 * number, "x": 1.0}
        for number in range(200)
    ]
    found = {name: value for name, value, _ in flatness(readings)}
    assert found["engine: file descriptors, largest"] == 41 and found["engine: file descriptors, flat"] is True
    assert found["GPU: used GiB, by the driver, growth"] == pytest.approx(0.36)
    assert found["GPU: used GiB, by the driver, flat"] is False
    assert found["x, flat"] is True


def test_the_plan_of_the_full_recipe_names_every_phase():
    recipe = config.load(RECIPES["full"], overrides(ARGUMENTS)).config
    planned = planned_gib(recipe, 140 * 2**30)
    assert set(planned) == {"refit", "generation", "logprobs", "reference_logprobs", "training"}
    assert 0.6 * 140 < planned["generation"] < 140
    assert planned["generation"] < planned["refit"] < 140
    assert planned_gib(recipe, 24 * 2**30)["refit"] < 24  # too little for both at once
    assert 140 > planned["training"] > planned["logprobs"] > 25  # rows of 16,384 tokens beside 20 GiB of state
