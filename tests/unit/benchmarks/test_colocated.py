"""Tests the parts of the benchmark of the switch between trainer and generator, without Ray."""

import dataclasses
import json
import sys
import time
from contextlib import nullcontext
from types import SimpleNamespace

import colocated
import psutil
import pytest
import torch
from colocated_ways import marks as marks_file
from colocated_ways.cycles import WARM_UP, Cycles
from colocated_ways.driver import watch_driver
from colocated_ways.engines import MarkedVllmActor, marked_llm
from colocated_ways.figures import figures_of_marks, figures_of_policy
from colocated_ways.holdings import flatness
from colocated_ways.marks import Mark, Marks, read_marks
from colocated_ways.measured import Measured
from colocated_ways.planned import planned_gib
from colocated_ways.policy import MarkedWorker, UpstreamWorker
from colocated_ways.refusals import RefusedError, read_measured, reason, write_measured
from colocated_ways.run import RECIPES, check_engine_sleeps, many_cycles, overrides
from colocated_ways.settings import OURS, OURS_ASLEEP, SETTINGS, UPSTREAM, built_as
from colocated_ways.steps import run_steps
from colocated_ways.switches import Switch, switches
from colocated_ways.timeline import TO_GENERATION, TO_TRAINING, Span, median_switch, spans_between, table, timelines
from colocated_ways.upstream_state import UpstreamEngine
from gpu_watch import GpuWatch
from ports import free_port
from ray.exceptions import ActorDiedError, RayTaskError
from support.machine import planner_of, resolved_for
from support.tiny_megatron import one_rank, tiny_megatron

from nemo_offload_rl import config
from nemo_offload_rl.algorithms.losses import NLLLoss
from nemo_offload_rl.data.sequences import response_batch
from nemo_offload_rl.generation.interface import GenerationError, GenerationOutput
from nemo_offload_rl.hf_config import hf_config
from nemo_offload_rl.placement.local_ray import handlers_kept
from nemo_offload_rl.plan.decisions import Resolved
from nemo_offload_rl.plan.plan import settings
from nemo_offload_rl.plan.planner import worker_plan
from nemo_offload_rl.residency.table import Phase
from nemo_offload_rl.run.setup import with_run_length
from nemo_offload_rl.worker.errors import WorkerError

COLUMNS = ("setting", "gpus", "model", "metric", "value", "unit")
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
    found = switches(marks, start_s=50)  # the end of the first cycle does not count
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


def test_the_start_says_where_the_drivers_time_goes_and_how_long_the_engines_process_takes_to_begin():
    marks = [
        Mark("imports", 9, 7.0), Mark("recipe", 10, 1.0), Mark("preparation", 12, 2.0), Mark("ray", 15, 3.0),
        Mark("sizes", 15.5, 0.5), Mark("build", 16), Mark("vllm_import", 30, 6.0, "engine-0-8"),
        Mark("vllm_import", 31, 6.0, "engine-1-9"), Mark("vllm_build", 60, 20.0), Mark("last_optimizer_kernel", 70),
    ]  # fmt: skip
    found = {name: value for name, value, _ in figures_of_marks(marks, start_s=2, counted=[]) if "start-up" in name}
    assert found == {
        "start-up: imports takes": 7.0,
        "start-up: recipe takes": 1.0,
        "start-up: preparation takes": 2.0,
        "start-up: ray takes": 3.0,
        "start-up: sizes takes": 0.5,
        "start-up: vllm_import takes": 6.0,
        "start-up: vllm_build takes": 20.0,
        "start-up: from the engine's creation to vllm_import takes": 8.0,  # 16 to 30 - 6
        "start-up: from the command to the end of ray": 13.0,
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
        Mark("generate", 12.5, 1.0, "driver-7"),  # after
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
    assert {tuple(row) for row in rows} == {COLUMNS}


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
    with built_as(UPSTREAM, "transformers"):
        from nemo_offload_rl.generation import make_generation

        built = make_generation({}, None)
    assert built.start_finish_generation() == []  # also after the context


def test_a_worker_notes_the_end_of_the_update_before_state_leaves_and_when_its_copies_ran(tmp_path, monkeypatch):
    monkeypatch.setenv(marks_file.FOLDER_VARIABLE, str(tmp_path))
    recipe, _ = config.for_machine(config.load(RECIPES["tiny"], []).config, has_gpus=False)
    policy = with_run_length(recipe["policy"], 4)
    worker = MarkedWorker(
        policy, plan=worker_plan(policy, hf_config(policy).to_dict(), world_size=1),
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
    of_name = {mark.name: mark for mark in marks}  # the last mark of each name
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


def test_a_worker_that_moves_its_state_as_nemo_rl_does_trains_as_ours():
    recipe, _ = config.for_machine(config.load(RECIPES["tiny"], []).config, has_gpus=False)
    policy = with_run_length(recipe["policy"], 4)
    rows = [list(range(8))] * 4
    batch = response_batch([row[:4] for row in rows], [row[4:] for row in rows], 0)

    def losses(worker_cls):
        worker = worker_cls(
            policy, plan=worker_plan(policy, hf_config(policy).to_dict(), world_size=1),
            rank=0, world_size=1, local_rank=0, master_addr="localhost", master_port=free_port(), seed=0,
            init_reference_model=False,
        )  # fmt: skip
        found = []
        try:
            for _ in range(2):
                worker.offload_before_refit()
                worker.offload_after_refit()
                worker.start_return(logprobs=False)
                found.append(worker.train(batch, NLLLoss(), gbs=4, mbs=2)["loss"])
                assert worker.residency.phase is Phase.TRAIN
        finally:
            worker.shutdown()
        return found

    first, second = losses(UpstreamWorker)
    assert first > second
    assert losses(MarkedWorker) == [first, second]


class ToyLLM:
    """Has the methods of `vllm.LLM` that the marked class calls."""

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
        engine = UpstreamEngine(state, plan, node=None, with_reference=True, fixed_bytes={}, generator_bytes=None)
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


def switched(seconds, *, sleep_s=0.0, losses=(1.0,), greedy_ids=((1, 2),)):
    names = ("refit, by itself", "switch to training", "switch to generation", "switch both ways")
    figures = [(name, seconds, "s") for name in names] + [("sleep and wake_up, by themselves", sleep_s, "s")]
    return Measured(figures, list(losses), [1.0] * len(losses), [list(ids) for ids in greedy_ids])


def test_settings_that_compute_something_else_show():
    upstream = switched(6.0, losses=[1.5], greedy_ids=[[1, 3]])
    rows = colocated.rows_of({OURS: switched(2.0), UPSTREAM: upstream}, {}, ARGUMENTS)
    both = {row["metric"]: row["value"] for row in rows if row["setting"] == "both"}
    assert both["losses of all steps are equal"] is False and both["greedy tokens are equal"] is False
    assert both["largest difference of losses"] == 0.5
    assert both["switch both ways: upstream_way over ours"] == 3.0
    assert {row["setting"] for row in rows} == {OURS, UPSTREAM, "both"}
    assert {tuple(row) for row in rows} == {COLUMNS}


def test_ours_asleep_is_compared_with_upstream_under_a_name_of_its_own_and_its_sleep_is_the_bar_of_ours():
    found = {OURS: switched(0.25), OURS_ASLEEP: switched(0.5, sleep_s=0.2), UPSTREAM: switched(6.0, sleep_s=0.4)}
    rows = {(row["setting"], row["metric"]): row["value"] for row in colocated.rows_of(found, {}, ARGUMENTS)}
    assert rows["both", "switch both ways: upstream_way over ours"] == 24.0
    assert rows["ours_asleep and upstream_way", "switch both ways: upstream_way over ours_asleep"] == 12.0
    assert rows["ours_asleep and upstream_way", "losses of all steps are equal"] is True
    assert rows[OURS, "switch both ways, less the sleep and wake_up of ours_asleep"] == 0.05


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting_by_itself_and_cycles_are_compared_with_nothing(setting):
    assert {row["setting"] for row in colocated.rows_of({setting: switched(2.0)}, {}, ARGUMENTS)} == {setting}
    of_cycles = {name: Measured([("x, flat", True, "")]) for name in SETTINGS}
    rows = colocated.rows_of(of_cycles, {}, SimpleNamespace(**vars(ARGUMENTS) | {"cycles": 20}))
    assert [(row["setting"], row["metric"]) for row in rows] == [(name, "x, flat") for name in SETTINGS]


def test_runs_without_switches_are_compared_by_what_they_computed():
    found = {name: Measured([("sleep and wake_up, by themselves", 0.1, "s")], [1.0], [1.0]) for name in SETTINGS}
    rows = colocated.rows_of(found, {}, ARGUMENTS)
    assert [row["metric"] for row in rows if row["setting"] == "both"] == [
        "losses of all steps are equal", "largest difference of losses", "greedy tokens are equal",
    ]  # fmt: skip


def resolved_policy(setting, gpu_gib, *added, **changed):
    arguments = SimpleNamespace(**vars(ARGUMENTS) | changed)
    recipe = config.load(RECIPES["full"], [*overrides(setting, arguments), *added]).config
    return resolved_for(recipe, gpu_gib).config["policy"]


def test_the_engine_of_ours_stays_awake_where_there_is_room_and_sleeps_in_all_else():
    def stays_awake(*arguments, **changed):
        return dict(figure[:2] for figure in figures_of_policy(resolved_policy(*arguments, **changed)))[
            "the engine stays awake"
        ]

    assert [stays_awake(setting, 140) for setting in SETTINGS] == [True, False, False]
    assert [stays_awake(setting, 140, cycles=200) for setting in SETTINGS] == [False] * 3
    assert stays_awake(OURS, 72) is False


def test_what_is_left_to_the_gpus_size_is_in_the_result():
    found = {name: (value, unit) for name, value, unit in figures_of_policy(resolved_policy(OURS, 140))}
    assert found["train_mb_tokens"] == found["logprob_mb_tokens"] == (16384, "tokens")
    nbytes, unit = found["kv_cache_memory_bytes"]
    assert unit == "bytes" and 5 * 2**30 < nbytes < 10 * 2**30  # 512 sequences of 512 tokens, 28 KiB each
    tiny = config.load(RECIPES["tiny"], []).config["policy"]  # rows are not packed, and there is no vLLM
    assert list(figures_of_policy(tiny)) == [("the engine stays awake", False, "")]


def test_an_override_that_keeps_the_engine_awake_is_refused_where_it_has_to_sleep():
    awake = "++policy.residency.generation_weights=gpu"
    policy = resolved_policy(OURS_ASLEEP, 140, awake)
    check_engine_sleeps(policy, OURS, ARGUMENTS)
    with pytest.raises(ValueError, match=r"generation_weights is gpu, but the setting ours_asleep is a run"):
        check_engine_sleeps(policy, OURS_ASLEEP, ARGUMENTS)
    with pytest.raises(ValueError, match=r"generation_weights is gpu, but --cycles asks for a run"):
        check_engine_sleeps(policy, OURS, SimpleNamespace(**vars(ARGUMENTS) | {"cycles": 20}))


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_setting_is_a_recipe_without_a_gpu_too(setting):
    arguments = SimpleNamespace(**vars(ARGUMENTS) | {"scale": "tiny", "backend": "transformers", "cycles": 20})
    assert config.load(RECIPES["tiny"], overrides(setting, arguments)).config["policy"]["generation"]["backend"] == (
        "transformers"
    )


def test_steps_count_from_the_second_on_in_tokens_per_second_and_in_the_longest_response():
    lengths = {1: ([9, 9], [1]), 2: ([3, 5], [4, 2])}  # of the generations of a step, one answer each

    def generate(of_answers):
        return GenerationOutput([[0] * length for length in of_answers], [], [])

    generation = SimpleNamespace(generate=generate)

    def step(number, timer):
        with timer.phase("sampling"):
            for of_answers in lengths[number]:
                generation.generate(of_answers)
        return {
            "train/loss": 1.0 / number, "train/grad_norm": 1.0, "train/num_tokens": 100.0 * number,
            "train/token_mult_prob_error": 1.0, "performance/tflops_per_gpu/training": 5.0 * number,
        }  # fmt: skip

    measured = Measured()
    with GpuWatch() as watch:
        run_steps(SimpleNamespace(_generation=generation, step=step), 2, watch, measured, OURS)
    found = measured.value_of
    assert measured.losses == [1.0, 0.5]
    assert found["longest response"] == 5
    assert found["tflops_per_gpu/training"] == 10
    assert found["tokens per second of a whole step"] == 200 / found["whole step"]


class LocalCycles(Cycles):
    """Runs cycles whose processes are all this one."""

    def processes(self):
        return {"policy": psutil.Process(), "engine": psutil.Process()}


def toy_cycles(calls):
    def verb(name, result=None):
        return lambda *_, **__: calls.append(name) or result

    memory = {"host_rss_gib": 1.0}
    return LocalCycles(
        SimpleNamespace(
            _weights=SimpleNamespace(mark_stale=lambda: None, refresh=verb("refresh")),
            _loss_fn=None,
            _batch_sizes=SimpleNamespace(train_global=4, train_micro=2),
            _generation=SimpleNamespace(
                generate=verb("generate"),
                start_finish_generation=verb("start_finish_generation", []),
                finish_generation=verb("finish_generation"),
                memory_stats=verb("read", memory),
            ),
            _policy=SimpleNamespace(
                start_return=verb("start_return"),
                train=verb("train", {}),
                memory_stats=lambda: memory,
                residency_metrics=dict,
            ),
        ),
        vocab_size=8,
        max_tokens=16,
    )


@pytest.mark.parametrize("num", [1, 5, 20])
def test_every_other_of_many_cycles_goes_the_way_of_a_grpo_step_and_what_is_held_is_read_in_the_others(num):
    calls = []
    found = dict(figure[:2] for figure in many_cycles(toy_cycles(calls), num))
    read = ["refresh", "generate", "finish_generation", "read", "train"]
    overlapped = ["refresh", "generate", "start_finish_generation", "start_return", "finish_generation", "train"]
    num_cycles = WARM_UP + num
    assert calls == [name for number in range(num_cycles) for name in (overlapped if number % 2 else read)]
    assert found["engine: host memory GiB, growth"] == 0 and found["policy: threads, flat"] is True


def test_only_cycles_behind_the_warm_up_count(monkeypatch):
    values = iter(range(100))
    monkeypatch.setattr("colocated_ways.run.Holdings", lambda _: SimpleNamespace(read=lambda: {"x": next(values)}))
    found = dict(figure[:2] for figure in many_cycles(toy_cycles([]), 20))
    assert (found["x, first"], found["x, last"]) == (5, 14)  # 5 are read in the warm-up of 10 cycles, 10 in 20 more


OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.2 GiB"


def test_the_reason_is_a_line_of_what_failed_first():
    memory = torch.OutOfMemoryError(OUT_OF_MEMORY)
    line = f"OutOfMemoryError: {OUT_OF_MEMORY}"
    detail = f"ray::WorkerActor.call()\n  File x\n{line}"
    assert reason(memory) == line
    assert reason(WorkerError(0, "train", memory, detail)) == line
    task = RayTaskError("load_weights", f"Traceback (most recent call last):\n  File y\n{line}\n", memory, ip="::1")
    assert reason(WorkerError(1, "send_weights", task.as_instanceof_cause(), detail)) == line
    assert reason(GenerationError("its construction", ValueError("max_num_seqs is 0; raise it."), detail)) == (
        "ValueError: max_num_seqs is 0; raise it."
    )
    assert reason(
        RuntimeError("CUDA error: out of memory\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n")
    ) == ("RuntimeError: CUDA error: out of memory")
    assert reason(AssertionError()) == "AssertionError"


def test_the_reason_of_a_dead_process_is_rays_last_line():
    task = RayTaskError(
        "__init__", "Traceback (most recent call last):\n  File y\nOSError: gone\n", OSError(), ip="::1"
    )
    assert reason(WorkerError(0, "train", ActorDiedError(task), "")) == "ActorDiedError: OSError: gone"


def test_a_setting_whose_recipe_is_refused_says_why_in_its_process(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("COLOCATED_START", str(time.monotonic()))
    wrong = SimpleNamespace(**vars(ARGUMENTS) | {"overrides": ["policy.train_micro_batch_size=0"]})
    result = tmp_path / "result.json"
    assert colocated.measure_here(OURS, result, wrong) == 1
    with pytest.raises(RefusedError, match=r"^[^\n]*policy\.train_micro_batch_size[^\n]*$"):
        read_measured(result, 1)
    assert capfd.readouterr().err.splitlines()[-1].startswith("ours is refused: ")


def test_what_a_process_measured_is_read_and_its_death_is_a_reason(tmp_path):
    measured = Measured([("x", 1.0, "s")], [1.0], [2.0], [[1]], 2)
    write_measured(tmp_path / "result.json", measured)
    assert [tuple(figure) for figure in read_measured(tmp_path / "result.json", 0).figures] == [("x", 1.0, "s")]
    assert read_measured(tmp_path / "result.json", 0).num_gpus == 2
    with pytest.raises(RefusedError, match="its process ended with status -9"):
        read_measured(tmp_path / "none.json", -9)


@pytest.mark.parametrize("refused", [[OURS], [UPSTREAM], list(SETTINGS)])
def test_a_refused_setting_has_a_row_and_the_others_are_measured(tmp_path, monkeypatch, refused):
    asked = []

    def in_own_process(setting, *, deterministic):
        asked.append(setting)
        if setting in refused:
            raise RefusedError(OUT_OF_MEMORY)
        return dataclasses.replace(switched(2.0), num_gpus=2)

    monkeypatch.setattr(colocated, "in_own_process", in_own_process)
    monkeypatch.setattr(sys, "argv", ["colocated.py", "--out", str(tmp_path / "out.json")])
    assert colocated.main() == 1
    assert asked == list(SETTINGS)
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [row for row in rows if row["metric"] == "refused"] == [
        {
            "setting": setting, "gpus": None if refused == list(SETTINGS) else 2, "model": "1.5B",
            "metric": "refused", "value": OUT_OF_MEMORY, "unit": "",
        }
        for setting in refused
    ]  # fmt: skip
    assert set(SETTINGS) - set(refused) <= {row["setting"] for row in rows if row["metric"] == "switch both ways"}


def test_a_process_measures_its_own_setting_whatever_settings_the_command_has(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(colocated, "run_setting", lambda setting, _: asked.append(setting) or Measured())
    own = ["--child", UPSTREAM, str(tmp_path / "result.json")]
    monkeypatch.setattr(sys, "argv", ["colocated.py", "--settings", OURS, UPSTREAM, "--steps", "3", *own])
    assert colocated.main() == 0
    assert asked == [UPSTREAM]
    assert read_measured(tmp_path / "result.json", 0) == Measured()


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
    resolved = Resolved(recipe, planner_of(recipe, None).plan(recipe))
    planned = planned_gib(resolved, 140 * 2**30)
    assert set(planned) == {"refit", "sampling", "logprobs", "reference_logprobs", "training"}
    assert 30 < planned["sampling"] < 0.6 * 140  # a KV cache for 1024 sequences of 512 tokens, 20 GiB of state
    assert planned["sampling"] < planned["refit"] < 140
    assert planned_gib(resolved, 24 * 2**30)["refit"] < 24  # not enough for both at once
    assert 140 > planned["training"] > planned["logprobs"] > 25  # rows of 16,384 tokens beside 20 GiB of state
