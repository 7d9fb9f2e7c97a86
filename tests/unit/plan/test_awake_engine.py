"""Tests whether vLLM stays awake while the policy computes: its memory in the plan, the decision, the refusal."""

import copy

import pytest
from support.machine import planner_of, resolved_for

from nemo_offload_rl.config import load
from nemo_offload_rl.hf_config import hf_config
from nemo_offload_rl.memory.units import GIB
from nemo_offload_rl.plan.colocation import check_awake_engine_fits, with_awake_engine
from nemo_offload_rl.plan.generation import free_bytes_for_refit
from nemo_offload_rl.plan.plan import engine_table
from nemo_offload_rl.plan.shared_gpu import phase_bytes
from nemo_offload_rl.residency.table import Phase, Target

RECIPE = "benchmarks/recipes/grpo_1_5B_random.yaml"
KEY = "policy.residency.generation_weights"
CACHE = 7 * GIB
VLLM = ["policy.generation.backend=vllm", f"++policy.generation.vllm_kwargs.kv_cache_memory_bytes={CACHE}"]
RESIDENT = ["++policy.residency.table.generate={params: gpu, optimizer_state: keep}"]
RESIDENT += ["++policy.residency.table.refit.optimizer_state=keep"]
LONG_ROWS = [f"policy.sequence_packing.{key}=16384" for key in ("train_mb_tokens", "logprob_mb_tokens")]


def recipe(*overrides):
    return load(RECIPE, [*VLLM, *overrides]).config


def decided(gpu_gib, *overrides):
    config = recipe(*overrides)
    before = copy.deepcopy(config)
    found, lines = with_awake_engine(config, planner_of(config, gpu_gib))
    assert config == before
    return found["policy"]["residency"]["generation_weights"], lines


def planned(gpu_gib, *overrides):
    config = recipe(*overrides)
    planner = planner_of(config, gpu_gib)
    run = planner.plan(config)
    return run, phase_bytes(config, planner, run, planner.gpu_bytes)


def test_it_stays_awake_where_every_phase_has_room_beside_it():
    where, [line] = decided(140, *RESIDENT, *LONG_ROWS)
    assert where == "gpu"
    assert line.startswith(
        "vLLM stays awake with 14.39 GiB while the policy computes, since the GPU has room for both "
    )
    assert "in the train phase, which needs the most (" in line
    assert line.endswith(f" of 140.00 GiB); {KEY}=discard makes it sleep")


def test_it_sleeps_where_training_needs_the_room():
    _, of_phases = planned(72, *RESIDENT, *LONG_ROWS, f"++{KEY}=gpu")
    assert 72 * GIB < of_phases[Phase.TRAIN] < 90 * GIB
    assert max(of_phases[phase] for phase in Phase if phase is not Phase.TRAIN) < 72 * GIB
    assert decided(72, *RESIDENT, *LONG_ROWS) == (None, [])
    assert decided(of_phases[Phase.TRAIN] / GIB - 0.01, *RESIDENT, *LONG_ROWS)[0] is None
    assert decided(of_phases[Phase.TRAIN] / GIB + 0.01, *RESIDENT, *LONG_ROWS)[0] == "gpu"


@pytest.mark.parametrize(
    ("gpu_gib", "overrides"),
    [
        (None, []),  # several nodes
        (140, ["policy.generation.backend=transformers"]),
        (140, ["~policy.generation.vllm_kwargs.kv_cache_memory_bytes"]),  # vLLM uses all that it finds free
    ],
)
def test_it_is_left_open_where_the_room_is_not_known_or_has_another_use(gpu_gib, overrides):
    assert decided(gpu_gib, *RESIDENT, *overrides) == (None, [])


@pytest.mark.parametrize("where", ["discard", "host", "gpu"])
def test_what_the_recipe_says_is_left_as_it_is(where):
    assert decided(140, f"++{KEY}={where}") == (where, [])


def test_all_decisions_agree():
    config = load(RECIPE, [VLLM[0], *LONG_ROWS]).config
    resolved = resolved_for(config, 139)
    found = resolved.config
    assert found["policy"]["residency"]["generation_weights"] == "gpu"
    assert found["policy"]["generation"]["vllm_cfg"]["build_beside_policy"] is True
    assert sum("while the policy computes" in line for line in resolved.lines) == 1


def test_an_awake_engine_is_in_every_phase_of_table_and_plan():
    asleep, beside_sleeping = planned(140, *RESIDENT, *LONG_ROWS)
    run, beside_awake = planned(140, *RESIDENT, *LONG_ROWS, f"++{KEY}=gpu")
    assert set().union(*(cells.values() for cells in engine_table(recipe(f"++{KEY}=gpu")["policy"]).values())) == {
        "gpu"
    }
    rows = run.engine.gpu_rows(140 * GIB)
    assert rows["vLLM's KV cache"] == dict.fromkeys(Phase, CACHE)
    assert rows["vLLM's weights"] == dict.fromkeys(Phase, run.engine.weights_bytes)
    assert asleep.engine.gpu_rows(140 * GIB)["vLLM's KV cache"] == {Phase.GENERATE: CACHE}
    awake = run.engine.weights_bytes + CACHE + run.engine.reserve_bytes
    assert run.engine.awake_bytes(140 * GIB) == awake
    asleep_bytes = 2 * GIB  # its context and its graphs
    for phase in (Phase.TRAIN, Phase.LOGPROB):
        assert beside_awake[phase] - beside_sleeping[phase] == awake - asleep_bytes
    assert beside_awake[Phase.GENERATE] == beside_sleeping[Phase.GENERATE]


def test_it_stays_awake_beside_rows_that_are_left_open_if_they_are_no_shorter_for_it():
    rows = "policy.sequence_packing.train_mb_tokens=auto"
    assert decided(140, *RESIDENT, rows)[0] == "gpu"  # the longest rows that gain anything
    assert decided(80, *RESIDENT, rows) == (None, [])
    assert decided(20, *RESIDENT, rows) == (None, [])  # not even the longest sequence fits
    config = load(RECIPE, [*VLLM, *RESIDENT, rows]).config
    found = resolved_for(config, 140).config
    assert found["policy"]["residency"]["generation_weights"] == "gpu"
    assert found["policy"]["sequence_packing"]["train_mb_tokens"] == 32768


def test_what_torch_keeps_of_training_counts_beside_a_refit_where_it_stays():
    run, of_phases = planned(140, *RESIDENT, *LONG_ROWS, f"++{KEY}=gpu")
    _, without_room = planned(40, *RESIDENT, *LONG_ROWS, f"++{KEY}=gpu")
    held = sum(run.plan.ranks[0].gpu_bytes[Phase.TRAIN].values())
    awake = run.engine.awake_bytes(140 * GIB)
    training = of_phases[Phase.TRAIN] - held - 2 * GIB - run.engine.refit_graph_bytes - awake
    grads = run.plan.ranks[0].gpu_bytes[Phase.TRAIN][Target.GRADS]
    assert of_phases[Phase.REFIT] == of_phases[Phase.TRAIN] - grads + run.engine.refit_bytes
    assert of_phases[Phase.GENERATE] == of_phases[Phase.TRAIN] - grads
    assert of_phases[Phase.LOGPROB] == of_phases[Phase.TRAIN] - grads
    assert 35 * GIB < training < 50 * GIB
    assert without_room[Phase.GENERATE] == pytest.approx(of_phases[Phase.GENERATE] - training, abs=2)


def test_rows_that_are_left_open_are_shorter_beside_an_engine_that_is_to_stay_awake():
    def tokens(where):
        config = load(RECIPE, [*VLLM, *RESIDENT, f"++{KEY}={where}", "policy.sequence_packing.train_mb_tokens=auto"])
        return resolved_for(config.config, 80).config["policy"]["sequence_packing"]["train_mb_tokens"]

    assert 8192 < tokens("gpu") < tokens("discard")


def test_an_engine_that_is_to_stay_awake_where_it_cannot_is_refused():
    run, _ = planned(80, *RESIDENT, *LONG_ROWS, f"++{KEY}=gpu")
    check_awake_engine_fits(run.plan, run.engine, 90 * GIB)
    with pytest.raises(ValueError, match=rf"^{KEY} is gpu, so vLLM keeps 14\.39 GiB .* the GPU has 40\.00 GiB; set"):
        check_awake_engine_fits(run.plan, run.engine, 40 * GIB)
    asleep, _ = planned(80, *RESIDENT, *LONG_ROWS)
    check_awake_engine_fits(asleep.plan, asleep.engine, 40 * GIB)  # it need not stay awake


def test_how_much_memory_has_to_be_free_for_a_refit_that_needs_nothing_of_torchs_cache():
    def free(*overrides, config=None):
        policy = (config or recipe(*overrides))["policy"]
        return free_bytes_for_refit(policy, hf_config(policy).to_dict())

    run, _ = planned(140)
    engine = run.engine
    beside = engine.refit_bytes + 2 * engine.reserve_bytes + 2 * GIB
    assert free(f"++{KEY}=gpu") == beside
    assert free() == beside + engine.weights_bytes + CACHE
    assert free(config=load(RECIPE, [VLLM[0]]).config) is None  # vLLM uses what it finds free
    assert free("policy.generation.backend=transformers") is None
    apart = ["++policy.generation.colocated.enabled=false", "++policy.generation.colocated.resources.gpus_per_node=1"]
    assert free(*apart, "cluster.gpus_per_node=2") == 0
