"""Tests the parts of the benchmark of the switch between trainer and generator, without Ray."""

import dataclasses
import json
import sys
from types import SimpleNamespace

import colocated
import pytest
import torch
from colocated_ways.figures import figures_of_policy
from colocated_ways.marks import Mark
from colocated_ways.measured import Measured
from colocated_ways.planned import planned_gib
from colocated_ways.policy import MarkedWorker, UpstreamWorker
from colocated_ways.refusals import RefusedError
from colocated_ways.run import RECIPES, check_engine_sleeps, overrides
from colocated_ways.settings import OURS, OURS_ASLEEP, SETTINGS, UPSTREAM, built_as
from colocated_ways.switches import switches
from colocated_ways.upstream_state import UpstreamEngine
from ports import free_port
from support.machine import planner_of, resolved_for
from support.tiny_megatron import one_rank, tiny_megatron

from nemo_offload_rl import config
from nemo_offload_rl.algorithms.losses import NLLLoss
from nemo_offload_rl.data.sequences import response_batch
from nemo_offload_rl.hf_config import hf_config
from nemo_offload_rl.plan.decisions import Resolved
from nemo_offload_rl.plan.plan import settings
from nemo_offload_rl.plan.planner import worker_plan
from nemo_offload_rl.residency.table import Phase
from nemo_offload_rl.run.setup import with_run_length

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


def test_upstreams_engine_does_not_begin_to_sleep_before_finish_generation(monkeypatch):
    generation = SimpleNamespace(start_finish_generation=lambda: ["under way"])
    monkeypatch.setattr("colocated_ways.settings.make_generation", lambda policy, cluster: generation)
    with built_as(UPSTREAM, "transformers"):
        from nemo_offload_rl.generation import make_generation

        built = make_generation({}, None)
    assert built.start_finish_generation() == []  # also after the context


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


OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.2 GiB"


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
