"""The benchmark of the switch between trainer and generator: its parts, without Ray."""

import dataclasses
import time
from contextlib import nullcontext
from types import SimpleNamespace

import colocated
import pytest
import torch
from colocated_ways import marks as marks_file
from colocated_ways.driver import watch_driver
from colocated_ways.engines import MarkedVllmActor, marked_llm
from colocated_ways.holdings import flatness
from colocated_ways.marks import Mark, Marks, read_marks
from colocated_ways.planned import planned_gib
from colocated_ways.policy import MarkedWorker
from colocated_ways.run import RECIPES, Measured, figures_of_marks, overrides
from colocated_ways.settings import OURS, UPSTREAM, built_as
from colocated_ways.switches import Switch, switches
from colocated_ways.timeline import TO_GENERATION, TO_TRAINING, Span, median_switch, spans_between, table, timelines
from colocated_ways.upstream_state import UpstreamEngine
from ports import free_port
from support.tiny_megatron import one_rank, tiny_megatron

from nemo_offload_rl import config
from nemo_offload_rl.algorithms.losses import NLLLoss
from nemo_offload_rl.data.sequences import response_batch
from nemo_offload_rl.placement.local_ray import handlers_kept
from nemo_offload_rl.plan.plan import settings
from nemo_offload_rl.residency.table import Phase
from nemo_offload_rl.run.setup import with_run_length

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
    found = {name: value for name, value, _ in figures_of_marks(marks, start_s=2, counted=[])}
    assert found == {
        "refit, by itself": 5.0,
        "sleep, by itself": 2.0,
        "wake_up weights, by itself": 1.0,
        "sleep and wake_up, by themselves": 3.0,
        "start-up: from the command to the end of first_token": 5.0,
    }


def test_a_timeline_has_what_was_under_way_in_its_switch_of_the_first_processes():
    marks = [
        Mark("generate", 10.1, 3.0, "driver-7"),
        Mark("last_token", 10.0, process="engine-0-8"),
        Mark("load_weights", 10.3, 0.1, "engine-0-8"),
        Mark("load_weights", 10.5, 0.1, "engine-0-8"),
        Mark("sleep", 10.6, 0.1, "engine-0-8"),
        Mark("load_weights", 10.9, 0.2, "engine-0-8"),
        Mark("load_weights", 10.5, 0.1, "engine-0-9"),  # of a second engine
        Mark("enter train", 10.45, 0.2, "policy-0-5"),
        Mark("enter train", 10.9, 0.7, "policy-1-6"),
        Mark("enter refit", 9.0, 0.1, "policy-0-5"),  # before
        Mark("generate", 12.5, 1.0, "driver-7"),  # behind
    ]
    found = spans_between(marks, 10.0, 11.0)
    rounded = [
        (span.process, span.name, round(span.start_ms), None if span.takes_ms is None else round(span.takes_ms))
        for span in found
    ]
    assert rounded == [
        ("driver", "generate", -2900, 3000),
        ("engine", "last_token", 0, None),
        ("engine", "load_weights, 2 times", 200, 300),
        ("policy", "enter train", 250, 200),
        ("engine", "sleep", 500, 100),
        ("engine", "load_weights (2)", 700, 200),
    ]
    assert table(found)[2].split() == ["0.0", "0.0", "engine:", "last_token"]
    assert table(found)[5].split() == ["500.0", "600.0", "100.0", "engine:", "sleep"]


def test_the_timeline_is_that_of_the_switch_with_the_median_total():
    found = [Switch(0, 5, 10, 11), Switch(20, 21, 30, 31), Switch(40, 43, 50, 51), Switch(60, 69, 70, 71)]
    assert median_switch(found) == found[2]
    marks = [Mark("refresh", 50.8, 0.5, "driver-1"), Mark("train", 42, 1.5, "driver-1")]
    found = timelines(marks, found[2])
    assert [(span.name, span.start_ms) for span in found[TO_TRAINING]] == [("train", pytest.approx(500))]
    assert [(span.name, span.start_ms) for span in found[TO_GENERATION]] == [("refresh", pytest.approx(300))]


def test_a_timeline_has_rows_of_beginnings_and_lengths():
    spans = [Span("driver", "refresh", 1.0, 2.5), Span("engine", "last_token", 3.0, None)]
    measured = Measured(timelines={TO_GENERATION: [dataclasses.asdict(span) for span in spans]})
    rows = colocated.timeline_rows({OURS: measured}, ARGUMENTS)
    assert [(row["metric"], row["value"]) for row in rows] == [
        ("timeline to generation: driver: refresh, starts", 1.0),
        ("timeline to generation: driver: refresh, takes", 2.5),
        ("timeline to generation: engine: last_token, starts", 3.0),
    ]
    assert {tuple(row) for row in rows} == {("setting", "gpus", "model", "metric", "value", "unit")}


def test_the_driver_notes_its_calls_and_passes_them_on(tmp_path, monkeypatch):
    monkeypatch.setenv(marks_file.FOLDER_VARIABLE, str(tmp_path))
    calls = []

    def toy(*verbs):
        def method(verb):
            return lambda *arguments, **named: calls.append((verb, arguments, named)) or verb

        return SimpleNamespace(**{verb: method(verb) for verb in verbs})

    algorithm = SimpleNamespace(
        _generation=toy("generate", "start_finish_generation", "finish_generation", "prepare_for_generation"),
        _policy=toy("start_return", "train", "offload_before_refit", "send_weights", "offload_after_refit"),
        _weights=toy("refresh"),
    )
    watch_driver(algorithm, Marks("driver"))
    assert algorithm._generation.prepare_for_generation(["kv_cache"]) == "prepare_for_generation"
    algorithm._policy.offload_after_refit(wait=False)
    algorithm._weights.refresh()
    assert calls == [
        ("prepare_for_generation", (["kv_cache"],), {}), ("offload_after_refit", (), {"wait": False}),
        ("refresh", (), {}),
    ]  # fmt: skip
    found = [mark.name for mark in read_marks(tmp_path)]
    assert found == ["prepare_for_generation kv_cache", "offload_after_refit", "refresh"]


def test_upstreams_engine_does_not_begin_to_sleep_before_finish_generation(monkeypatch):
    generation = SimpleNamespace(start_finish_generation=lambda: ["under way"])
    monkeypatch.setattr("colocated_ways.settings.make_generation", lambda policy, cluster: generation)
    with built_as(UPSTREAM):
        from nemo_offload_rl.generation import make_generation

        built = make_generation({}, None)
    assert built.start_finish_generation() == []  # behind the context, too


def test_a_worker_notes_the_end_of_the_update_before_state_leaves_and_when_its_copies_ran(tmp_path, monkeypatch):
    monkeypatch.setenv(marks_file.FOLDER_VARIABLE, str(tmp_path))
    recipe, _ = config.for_machine(config.load(RECIPES["tiny"], []).config, has_gpus=False)
    policy = with_run_length(recipe["policy"], 4)
    worker = MarkedWorker(
        policy,
        rank=0, world_size=1, local_rank=0, master_addr="localhost", master_port=free_port(), seed=0,
        init_reference_model=False,
    )  # fmt: skip
    rows = [list(range(8))] * 4
    batch = response_batch([row[:4] for row in rows], [row[4:] for row in rows], 0)
    before = time.monotonic()
    try:
        for _ in range(2):
            worker.offload_after_refit()
            worker.start_return(logprobs=False)
            worker.train(batch, NLLLoss(), gbs=4, mbs=2)
        worker.residency.wait_until_released()  # else the last copy may not have been queued yet
    finally:
        worker.shutdown()
    marks = [mark for mark in read_marks(tmp_path) if mark.at_s > before]
    of_name = {mark.name: mark for mark in marks}  # the last of each
    assert [mark.name for mark in marks].count("first_training_kernel") == 2
    assert [mark.name for mark in marks].count("last_optimizer_kernel") == 2
    starts = [
        "start_return", "prefetch train", "train", "enter train", "cut the batch", "first_training_kernel",
        "last_optimizer_kernel", "start leaving for refit",
    ]  # fmt: skip
    moments = [of_name[name].at_s - of_name[name].seconds for name in starts]
    assert moments == sorted(moments)
    leaving, copied = of_name["start leaving for refit"], of_name["copy optimizer_state to host"]
    assert copied.at_s - copied.seconds >= leaving.at_s - leaving.seconds
    assert of_name["copy params to gpu"].at_s < of_name["first_training_kernel"].at_s


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

    def collective_rpc(self, method, *arguments):
        self.calls.append(method)

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
    reset = ["reset_prefix_cache"] * like_upstream
    assert found == ["vllm_build", "wake_up weights", *generation, *generation, *reset, "sleep"]


def test_what_vllm_saves_before_it_sleeps_is_noted_apart_from_its_sleep(tmp_path, monkeypatch):
    monkeypatch.setenv(marks_file.FOLDER_VARIABLE, str(tmp_path))
    llm = marked_llm(ToyLLM, Marks("engine"), like_upstream=False)()
    with handlers_kept():
        actor = MarkedVllmActor()
    actor._marks = Marks("engine")
    actor._generator = SimpleNamespace(
        prepare_for_generation=llm.wake_up,
        finish_generation=lambda: (llm.collective_rpc("refit_save"), llm.sleep(level=2)),
        load_weights=lambda tensors: llm.collective_rpc("refit_load", tensors),
    )
    actor.call("prepare_for_generation", ["kv_cache"])
    actor.load_weights(SimpleNamespace(opened=nullcontext))
    actor.call("finish_generation")
    found = {mark.name: mark for mark in read_marks(tmp_path)}
    assert list(found) == [
        "vllm_build", "wake_up kv_cache", "prepare_for_generation kv_cache", "load_weights", "refit_save", "sleep",
        "finish_generation",
    ]  # fmt: skip
    assert found["finish_generation"].seconds >= found["refit_save"].seconds + found["sleep"].seconds


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


def test_deterministic_kernels_take_short_packed_rows_in_training():
    def row_tokens(**changed):
        arguments = SimpleNamespace(**vars(ARGUMENTS) | changed)
        return config.load(RECIPES["full"], overrides(OURS, arguments)).config["policy"]["sequence_packing"][
            "train_mb_tokens"
        ]

    assert (row_tokens(), row_tokens(deterministic=True)) == (16384, 2048)


def test_the_plan_of_the_full_recipe_names_every_phase():
    recipe = config.load(RECIPES["full"], overrides(OURS, ARGUMENTS)).config
    planned = planned_gib(recipe, 140 * 2**30)
    assert set(planned) == {"refit", "generation", "logprobs", "reference_logprobs", "training"}
    assert 30 < planned["generation"] < 0.6 * 140  # a KV cache for 1024 sequences of 512 tokens, 20 GiB of state
    assert planned["generation"] < planned["refit"] < 140
    assert planned_gib(recipe, 24 * 2**30)["refit"] < 24  # too little for both at once
    assert 140 > planned["training"] > planned["logprobs"] > 25  # rows of 16,384 tokens beside 20 GiB of state
