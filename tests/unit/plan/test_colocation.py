"""Tests decisions for a GPU that the policy shares with vLLM: KV cache, what stays there, what is built when."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.machine import planner_of, resolved_for
from support.shard_facts import FACTS
from support.tiny import policy_without_model

from nemo_offload_rl.config import RecipeError, load
from nemo_offload_rl.generation.vllm_arguments import engine_arguments
from nemo_offload_rl.generation.vllm_backend import explain_kv_cache_oom
from nemo_offload_rl.hf_config import hf_config
from nemo_offload_rl.memory.units import GIB
from nemo_offload_rl.plan import colocation
from nemo_offload_rl.plan.generation import EngineMemory, free_bytes_for_refit
from nemo_offload_rl.plan.plan import engine_table, settings
from nemo_offload_rl.plan.planner import PlannedRun, make_plan
from nemo_offload_rl.plan.shared_gpu import phase_bytes, policy_build_bytes, why_not_at_once
from nemo_offload_rl.residency.table import Phase, Placement, Target

RECIPE = "benchmarks/recipes/grpo_1_5B_random.yaml"  # 2.88 GiB of parameters
VLLM, TRANSFORMERS = "policy.generation.backend=vllm", "policy.generation.backend=transformers"
BYTES = "++policy.generation.vllm_kwargs.kv_cache_memory_bytes"
APART = ["++policy.generation.colocated.enabled=false", "cluster.gpus_per_node=2"]
APART += ["++policy.generation.colocated.resources.gpus_per_node=1"]


def decided(decide, gpu_gib, *overrides):
    """Returns the section of the policy that a decision gives, and its lines; the recipe stays as it was."""
    config = load(RECIPE, [VLLM, *overrides]).config
    before = copy.deepcopy(config)
    found, lines = decide(config, planner_of(config, gpu_gib))
    assert config == before
    return found["policy"], lines


def cache(gpu_gib, *overrides):
    policy, lines = decided(colocation.with_kv_cache_bytes, gpu_gib, f"++{BUILD}=false", *overrides)
    return engine_arguments(policy, Path("/folder")).get("kv_cache_memory_bytes"), lines


def test_an_engine_gets_its_kv_cache_in_bytes():
    long = ["policy.max_total_sequence_length=8192", "policy.sequence_packing.enabled=false"]
    nbytes, [line] = cache(80, *long)
    share = load(RECIPE, [VLLM]).config["policy"]["generation"]["vllm_cfg"]["gpu_memory_utilization"]
    assert 0 < nbytes < share * 80 * GIB - 2 * 1_543_714_304
    assert line.startswith(f"vLLM's KV cache has {nbytes / GIB:.2f} GiB of each GPU, ")
    assert "gpu_memory_utilization minus 2.88 GiB of weights" in line
    assert cache(90, *long)[0] - nbytes == pytest.approx(share * 10 * GIB, abs=1)


def test_a_kv_cache_is_no_larger_than_all_sequences_under_way_can_fill():
    nbytes, [line] = cache(80)
    # 512 tokens and one more block of 16; keys and values of 28 layers, 2 heads of 128, in bfloat16.
    assert nbytes == (512 * (512 + 16) + 16) * 2 * 28 * 2 * 128 * 2
    assert "room for all 512 that vLLM runs at once (max_num_seqs)" in line
    assert cache(80, "++policy.generation.vllm_kwargs.max_num_seqs=64")[0] == (64 * 528 + 16) * 28672


def test_a_kv_cache_is_the_recipes_or_left_to_vllm_and_never_tiny():
    assert cache(80, f"{BYTES}=5000000000") == (5_000_000_000, [])
    assert cache(None) == (None, [])
    policy, lines = decided(colocation.with_kv_cache_bytes, 80, TRANSFORMERS)
    assert ("kv_cache_memory_bytes" in policy["generation"].get("vllm_kwargs", {}), lines) == (False, [])
    with pytest.raises(ValueError, match="activations and graphs an estimated"):
        cache(8)


@pytest.mark.parametrize(("beside", "behind"), [(True, "set .*build_beside_policy to false, or "), (False, "")])
def test_memory_that_runs_out_while_an_engine_is_built_names_the_keys(beside, behind):
    message = rf"of 3\.00 GiB \(Tried to .*\); {behind}lower .*kv_cache_memory_bytes \(bytes of each"
    found = pytest.raises(torch.OutOfMemoryError, match=message)
    with found, explain_kv_cache_oom({"kv_cache_memory_bytes": 3 * GIB}, beside_policy=beside):
        raise torch.OutOfMemoryError("Tried to allocate 4 GiB. GPU 0 has less")


GENERATE = "policy.residency.table.generate"


def params(gpu_gib, *overrides):
    policy, lines = decided(colocation.with_resident_state, gpu_gib, *overrides)
    return settings(policy).table[Phase.GENERATE][Target.PARAMS], lines


def test_parameters_stay_where_they_fit_beside_vllm_and_the_process():
    placement, [line] = params(12.3)  # 40% of it is 4.92 GiB
    assert placement is Placement.GPU
    assert line.startswith("the policy's parameters, 2.88 GiB a rank, stay on the GPU during generation, ")
    auto, leave = f"++{GENERATE}.params=auto", (Placement.HOST, [])
    assert params(12.3, auto)[0] is Placement.GPU
    for otherwise in (
        *((12.1,), (12.1, auto), (80, auto, TRANSFORMERS), (80, TRANSFORMERS)),
        *((80, f"++{GENERATE}.params=host"), (None,)),  # the recipe says so; an unknown GPU
    ):
        assert params(*otherwise) == leave, otherwise


@pytest.mark.parametrize(("algorithm", "on_host"), [("sft", ()), ("dpo", (Target.PARAMS, Target.REFERENCE_WEIGHTS))])
@pytest.mark.parametrize("gpu_gib", [24, None])
def test_without_generation_only_what_reference_weights_need_takes_host_memory(algorithm, on_host, gpu_gib):
    path = f"examples/configs/{algorithm}_tiny_cpu.yaml"
    unset = ["policy.offload_optimizer_for_refit=null", "~policy.residency.table.generate"]

    def needed(*overrides):
        [rank] = resolved_for(load(path, [*unset, *overrides]).config, gpu_gib, algorithm).run.plan.ranks
        return {target for target, nbytes in rank.host_bytes.items() if nbytes}

    assert needed() == {*on_host}
    assert needed("policy.offload_optimizer_for_refit=true") == {*on_host, Target.OPTIMIZER_STATE}  # as it says
    assert needed(f"++{GENERATE}.params=host") == {*on_host, Target.PARAMS}


def test_optimizer_state_stays_where_it_fits_beside_vllm_too():
    def state(gpu_gib, *overrides):
        policy, lines = decided(colocation.with_resident_state, gpu_gib, *overrides)
        table = settings(policy).table
        return table[Phase.REFIT][Target.OPTIMIZER_STATE], table[Phase.GENERATE][Target.OPTIMIZER_STATE], lines[1:]

    auto, leaves = f"++{GENERATE}.optimizer_state=auto", (Placement.HOST, Placement.HOST, [])
    for written in ([auto], ["policy.residency=auto"], []):
        *placements, [line] = state(60, *written)
        assert placements == [Placement.UNCHANGED] * 2
        assert line.startswith("the policy's optimizer state, 14.38 GiB a rank, stays on the GPU during generation, ")
    assert state(30, auto) == state(30) == leaves  # vLLM has 14.6 GiB, and 19.3 would stay
    assert state(60, "policy.offload_optimizer_for_refit=true") == leaves
    assert state(60, "++policy.residency.table.refit.optimizer_state=host")[0] is Placement.HOST
    assert state(60, auto, "++policy.residency.table.train.optimizer_state=streamed") == leaves
    # A refit must find room beside what stays.
    small = "policy.generation.vllm_cfg.gpu_memory_utilization=0.05"
    assert state(22.5, auto, small, "policy.refit_buffer_size_gb=40")[0] is Placement.HOST


PLAN = make_plan(policy_without_model(), [FACTS])


def test_what_building_a_policy_takes():
    # All state counts, and the largest target twice.
    assert policy_build_bytes(PLAN) == (2 + 4 + 2 * 10 + 3) * GIB
    policy = policy_without_model()
    policy["residency"] |= {"table": {"train": {"optimizer_state": "streamed"}}, "stream_window_mib": 1024}
    streamed = make_plan(policy, [FACTS])
    assert policy_build_bytes(streamed) == (2 + 2 * 4 + 1 + 3) * GIB


ENGINE = EngineMemory(
    weights_bytes=2 * GIB, kv_bytes_per_token=1, max_model_len=1, max_num_seqs=1, block_tokens=16, share=0.5,
    reserve_bytes=4 * GIB, refit_bytes=GIB, refit_graph_bytes=0, own_kv_cache_bytes=27 * GIB,
)  # fmt: skip


REFITS = [
    (1, 62, None),  # 29 of the policy, 33 of vLLM
    (1, 61, "both would take up to 62.00 of the GPU's 61.00"),
    (25, 62, None),  # in a refit the policy has 2 of parameters and 2 of its process
    (26, 62, "the first refit, which runs before vLLM first sleeps, would take up to 63.00 of the GPU's 62.00"),
]


@pytest.mark.parametrize(("bucket_gib", "gpu_gib", "reason"), REFITS)
def test_both_have_to_fit_while_they_are_built_and_in_the_first_refit(bucket_gib, gpu_gib, reason):
    run = PlannedRun(PLAN, [], replace(ENGINE, refit_bytes=bucket_gib * GIB))
    found = why_not_at_once(run, gpu_gib * GIB)
    assert found == (reason and f"{reason} GiB")


BUILD = "policy.generation.vllm_cfg.build_beside_policy"


def test_both_are_built_at_once_where_they_fit():
    def beside(gpu_gib, *overrides):
        policy, lines = decided(colocation.with_engine_build, gpu_gib, *overrides)
        return policy["generation"]["vllm_cfg"]["build_beside_policy"], lines

    small = f"{BYTES}={60 * GIB}"
    at_once, [line] = beside(140, small)
    assert at_once is True
    assert line.startswith("the policy and vLLM are built at the same time, since the GPU has room for both; ")
    at_once, [line] = beside(140, f"{BYTES}={100 * GIB}")
    assert at_once is False
    assert line.startswith("the policy is built after vLLM, not at the same time: both would take up to ")
    # vLLM measures; several nodes; GPUs of their own; the recipe.
    for otherwise in ((140,), (None, small), (140, small, *APART), (140, small, f"++{BUILD}=false")):
        assert beside(*otherwise) == (False, []), otherwise
    with pytest.raises(RecipeError, match="build_beside_policy: must be 'auto' or False; found true"):
        beside(140, f"++{BUILD}=true")
    config = load(RECIPE, [TRANSFORMERS]).config
    assert colocation.with_engine_build(config, planner_of(config, 140)) == (config, [])


KEY = "policy.residency.generation_weights"
CACHE = 7 * GIB
OWN_CACHE = f"{BYTES}={CACHE}"
RESIDENT = [f"++{GENERATE}={{params: gpu, optimizer_state: keep}}"]
RESIDENT += ["++policy.residency.table.refit.optimizer_state=keep"]
LONG_ROWS = [f"policy.sequence_packing.{key}=16384" for key in ("train_mb_tokens", "logprob_mb_tokens")]
OPEN_ROWS = "policy.sequence_packing.train_mb_tokens=auto"


def weights(gpu_gib, *overrides):
    policy, lines = decided(colocation.with_awake_engine, gpu_gib, OWN_CACHE, *overrides)
    return policy["residency"]["generation_weights"], lines


def planned(gpu_gib, *overrides):
    config = load(RECIPE, [VLLM, OWN_CACHE, *overrides]).config
    planner = planner_of(config, gpu_gib)
    run = planner.plan(config)
    return run, phase_bytes(config, planner, run, planner.gpu_bytes)


def test_vllm_stays_awake_where_every_phase_has_room_beside_it():
    where, [line] = weights(140, *RESIDENT, *LONG_ROWS)
    assert where == "gpu"
    assert line.startswith("vLLM stays awake with 14.39 GiB while the policy computes, since the GPU has room for both")
    assert "in the train phase, which needs the most (" in line
    assert line.endswith(f" of 140.00 GiB); {KEY}=discard makes it sleep")


def test_vllm_sleeps_where_training_needs_the_room():
    _, of_phases = planned(72, *RESIDENT, *LONG_ROWS, f"++{KEY}=gpu")
    assert 72 * GIB < of_phases[Phase.TRAIN] < 90 * GIB
    assert max(of_phases[phase] for phase in Phase if phase is not Phase.TRAIN) < 72 * GIB
    assert weights(72, *RESIDENT, *LONG_ROWS) == (None, [])
    assert weights(of_phases[Phase.TRAIN] / GIB - 0.01, *RESIDENT, *LONG_ROWS)[0] is None
    assert weights(of_phases[Phase.TRAIN] / GIB + 0.01, *RESIDENT, *LONG_ROWS)[0] == "gpu"


def test_sleep_is_left_open_where_the_room_is_not_known_or_has_another_use_and_the_recipe_wins():
    # Several nodes; another engine; vLLM uses all that it finds free.
    for gpu_gib, *overrides in ((None,), (140, TRANSFORMERS), (140, f"~{BYTES.lstrip('+')}")):
        assert weights(gpu_gib, *RESIDENT, *overrides) == (None, []), overrides
    for where in ("discard", "host", "gpu"):
        assert weights(140, f"++{KEY}={where}") == (where, [])


def test_all_decisions_agree():
    resolved = resolved_for(load(RECIPE, [VLLM, *LONG_ROWS]).config, 139)
    found = resolved.config  # whose build follows from the KV cache that the plan gives
    assert found["policy"]["residency"]["generation_weights"] == "gpu"
    assert found["policy"]["generation"]["vllm_cfg"]["build_beside_policy"] is True
    for said in ("while the policy computes", "are built at the same time"):
        assert sum(said in line for line in resolved.lines) == 1


def test_an_awake_engine_is_in_every_phase_of_table_and_plan():
    asleep, beside_sleeping = planned(140, *RESIDENT, *LONG_ROWS)
    run, beside_awake = planned(140, *RESIDENT, *LONG_ROWS, f"++{KEY}=gpu")
    table = engine_table(load(RECIPE, [VLLM, OWN_CACHE, f"++{KEY}=gpu"]).config["policy"])
    assert {cell for cells in table.values() for cell in cells.values()} == {"gpu"}
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


def test_rows_that_are_left_open_are_no_shorter_for_an_awake_engine_unless_the_recipe_wants_it():
    assert weights(140, *RESIDENT, OPEN_ROWS)[0] == "gpu"  # the longest rows that gain anything
    assert weights(80, *RESIDENT, OPEN_ROWS) == (None, [])
    assert weights(20, *RESIDENT, OPEN_ROWS) == (None, [])  # not even the longest sequence fits

    def tokens(gpu_gib, *where):
        config = load(RECIPE, [VLLM, OWN_CACHE, *RESIDENT, OPEN_ROWS, *where]).config
        policy = resolved_for(config, gpu_gib).config["policy"]
        return policy["sequence_packing"]["train_mb_tokens"], policy["residency"]["generation_weights"]

    assert tokens(140) == (32768, "gpu")
    assert 8192 < tokens(80, f"++{KEY}=gpu")[0] < tokens(80, f"++{KEY}=discard")[0]


def test_what_torch_keeps_of_training_counts_beside_a_refit_where_it_stays():
    run, of_phases = planned(140, *RESIDENT, *LONG_ROWS, f"++{KEY}=gpu")
    _, without_room = planned(40, *RESIDENT, *LONG_ROWS, f"++{KEY}=gpu")
    held = sum(run.plan.ranks[0].gpu_bytes[Phase.TRAIN].values())
    awake = run.engine.awake_bytes(140 * GIB)
    training = of_phases[Phase.TRAIN] - held - 2 * GIB - run.engine.refit_graph_bytes - awake
    grads = run.plan.ranks[0].gpu_bytes[Phase.TRAIN][Target.GRADS]
    assert of_phases[Phase.REFIT] == of_phases[Phase.TRAIN] - grads + run.engine.refit_bytes
    assert of_phases[Phase.GENERATE] == of_phases[Phase.LOGPROB] == of_phases[Phase.TRAIN] - grads
    assert 35 * GIB < training < 50 * GIB
    assert without_room[Phase.GENERATE] == pytest.approx(of_phases[Phase.GENERATE] - training, abs=2)


def test_an_engine_that_is_to_stay_awake_where_it_cannot_is_refused():
    run, _ = planned(80, *RESIDENT, *LONG_ROWS, f"++{KEY}=gpu")
    colocation.check_awake_engine_fits(run.plan, run.engine, 90 * GIB)
    with pytest.raises(ValueError, match=rf"^{KEY} is gpu, so vLLM keeps 14\.39 GiB .* the GPU has 40\.00 GiB; set"):
        colocation.check_awake_engine_fits(run.plan, run.engine, 40 * GIB)
    asleep, _ = planned(80, *RESIDENT, *LONG_ROWS)
    colocation.check_awake_engine_fits(asleep.plan, asleep.engine, 40 * GIB)  # it need not stay awake


def test_how_much_memory_has_to_be_free_for_a_refit_that_needs_nothing_of_torchs_cache():
    def free(*overrides):
        policy = load(RECIPE, [VLLM, *overrides]).config["policy"]
        return free_bytes_for_refit(policy, hf_config(policy).to_dict())

    engine = planned(140)[0].engine
    beside = engine.refit_bytes + 2 * engine.reserve_bytes + 2 * GIB
    assert free(OWN_CACHE, f"++{KEY}=gpu") == beside
    assert free(OWN_CACHE) == beside + engine.weights_bytes + CACHE
    assert free() is None  # vLLM uses what it finds free
    assert free(OWN_CACHE, TRANSFORMERS) is None
    assert free(OWN_CACHE, *APART) == 0
