"""Tests the residency table of a recipe, and bytes, host memory and time of a step that follow from it."""

import dataclasses

import pytest
from support.machine import resolved_for
from support.tiny import policy_without_model

from benchmarks.model_shapes import QWEN2_1_5B
from nemo_offload_rl.config import load
from nemo_offload_rl.config.algorithms import ALGORITHMS
from nemo_offload_rl.config.keys.tree import schema_keys
from nemo_offload_rl.config.rules.base import TABLE
from nemo_offload_rl.config.rules.residency import AUTO, FLAG_PHASES
from nemo_offload_rl.config.schema import GRPOMasterConfig
from nemo_offload_rl.memory.units import GIB
from nemo_offload_rl.placement.rates import H200_RATES
from nemo_offload_rl.plan.host_budget import HostBudgetError
from nemo_offload_rl.plan.plan import STAGED_BYTES_PER_S, settings
from nemo_offload_rl.plan.planner import PlannedRun, make_plan, plan_run, rank_needs
from nemo_offload_rl.residency.table import DEFAULT_TABLE, Phase, Placement, ShardFacts, Target
from tests.unit.config.conftest import CONFIGS


def policy_with(*overrides):
    return load(CONFIGS / "grpo_tiny_cpu.yaml", overrides).config["policy"]


def test_a_recipe_that_says_nothing_gets_the_default_table():
    plan = settings(policy_without_model())
    assert plan.table == DEFAULT_TABLE
    found = plan.pinned, plan.verify, plan.huge_pages, plan.host_memory_limit_bytes, plan.numa
    assert found == (True, False, True, None, "auto")
    assert not any(plan.sources[phase] for phase in Phase)


def test_the_exemplars_flags_write_what_the_default_table_has():
    plan = settings(policy_with())
    assert plan.table == DEFAULT_TABLE
    assert plan.sources[Phase.LOGPROB] == {Target.OPTIMIZER_STATE: "policy.offload_optimizer_for_logprob"}
    assert plan.sources[Phase.REFIT] == plan.sources[Phase.TRAIN] == {}
    moves = settings(policy_with("policy.offload_optimizer_for_refit=true"))
    assert moves.table == DEFAULT_TABLE
    assert moves.sources[Phase.REFIT] == {Target.OPTIMIZER_STATE: "policy.offload_optimizer_for_refit"}


def test_flags_write_cells_of_optimizer_state_and_nothing_else():
    table = settings(policy_without_model(offload_optimizer_for_refit=False, offload_optimizer_for_logprob=True)).table
    cells = [(phase, target) for phase in Phase for target in Target]
    changed = {(p, t): table[p][t] for p, t in cells if table[p][t] != DEFAULT_TABLE[p][t]}
    assert changed == {
        (Phase.LOGPROB, Target.OPTIMIZER_STATE): Placement.HOST,
        (Phase.REFIT, Target.OPTIMIZER_STATE): Placement.UNCHANGED,
        (Phase.GENERATE, Target.OPTIMIZER_STATE): Placement.UNCHANGED,
    }


def test_single_cells_go_over_the_defaults_and_say_who_wrote_them():
    cells = "policy.residency.table={generate: {params: keep, grads: gpu}, refit: {optimizer_state: gpu}}"
    plan = settings(policy_with(cells, "~policy.offload_optimizer_for_refit"))
    generate = {Target.PARAMS: Placement.UNCHANGED, Target.GRADS: Placement.GPU}
    assert plan.table[Phase.GENERATE].items() >= (generate | {Target.OPTIMIZER_STATE: Placement.HOST}).items()
    assert plan.table[Phase.REFIT][Target.OPTIMIZER_STATE] is Placement.GPU
    assert plan.sources[Phase.REFIT] == {Target.OPTIMIZER_STATE: f"{TABLE}.refit.optimizer_state"}
    assert set(plan.sources[Phase.GENERATE]) == {Target.PARAMS, Target.GRADS}
    assert DEFAULT_TABLE[Phase.GENERATE][Target.PARAMS] is Placement.HOST  # no recipe can change this


def test_every_setting_reaches_the_plan():
    residency = ("verify=true", "huge_pages=false", "host_memory_limit_gib=1.5")
    others = ("policy.use_pinned_optimizer_offload=true", "policy.numa=1")
    plan = settings(policy_with(*(f"policy.residency.{key}" for key in residency), *others))
    found = plan.pinned, plan.verify, plan.huge_pages, plan.host_memory_limit_bytes, plan.numa
    assert found == (True, True, False, int(1.5 * GIB), 1)


def test_the_schema_has_every_phase_and_target_and_only_cells_that_there_are():
    """The schema imports nothing from the engine, so their words are compared here."""
    keys = schema_keys(GRPOMasterConfig)
    below = {path.removeprefix(f"{TABLE}.") for path in keys if path.startswith(f"{TABLE}.")}
    assert {path for path in below if "." not in path} == set(Phase)
    assert {name for phases in FLAG_PHASES.values() for name in phases} <= set(Phase)
    for phase in Phase:
        assert {path.split(".")[1] for path in below if path.startswith(f"{phase}.")} == set(Target)
        for target in Target:
            decided_later = {AUTO} if target in (Target.PARAMS, Target.OPTIMIZER_STATE) else set()
            assert set(keys[f"{TABLE}.{phase}.{target}"].annotation.__args__) - decided_later <= set(Placement)


# 2000 bytes of parameters, 4000 of gradients, 6000 of optimizer state.
SIZES = {"param_size": 2, "grad_size": 4, "optimizer_size": 12}
FACTS = ShardFacts(num_params=900, num_frozen_params=100, num_optimizer_params=500, has_reference=False, **SIZES)
WITH_REFERENCE = dataclasses.replace(FACTS, has_reference=True)
PARAMS, GRADS, OPTIMIZER, REFERENCE = Target
LOGPROB, TRAIN, REFIT, GENERATE = ALGORITHMS["grpo"].phases


def rank_of(policy, facts=FACTS, **arguments):
    [rank] = make_plan(policy_without_model(**policy), [facts], **arguments).ranks
    return rank


def traffic_of(rank):
    """Returns (phase, target) to (out, back), for everything that moves."""
    return {
        (transition.phase, traffic.target): (traffic.d2h_bytes, traffic.h2d_bytes)
        for transition in rank.transitions
        for traffic in transition.traffic
    }


def test_sizes_of_targets():
    assert rank_of({}).target_bytes == {PARAMS: 2000, GRADS: 3600, OPTIMIZER: 6000, REFERENCE: 0}
    assert rank_of({}, WITH_REFERENCE).target_bytes[REFERENCE] == 2000


def test_what_is_on_the_gpu_and_what_crosses_the_link_in_a_step_of_the_default_table():
    on_gpu = rank_of({}, WITH_REFERENCE).gpu_bytes
    assert {phase: sum(cells.values()) for phase, cells in on_gpu.items()} == {
        LOGPROB: 2000,  # optimizer state was offloaded for the refit before it
        TRAIN: 2000 + 3600 + 6000,
        REFIT: 2000,
        GENERATE: 0,
    }
    assert traffic_of(rank_of({})) == {
        (LOGPROB, PARAMS): (0, 2000),
        (TRAIN, OPTIMIZER): (0, 6000),
        (REFIT, OPTIMIZER): (6000, 0),
        (GENERATE, PARAMS): (2000, 0),
    }


def test_reference_weights_swap_with_the_policys_own():
    rank = rank_of({}, WITH_REFERENCE)
    assert traffic_of(rank)[LOGPROB, REFERENCE] == (2000, 4000)
    assert rank.host_bytes == {PARAMS: 2000, GRADS: 0, OPTIMIZER: 6000, REFERENCE: 2000}


def test_state_that_never_leaves_takes_no_host_memory_and_no_time():
    policy = {"offload_optimizer_for_refit": False, "residency": residency(generate={"params": "keep"})}
    rank = rank_of(policy)
    assert traffic_of(rank) == {}
    assert sum(rank.host_bytes.values()) == 0
    assert rank.gpu_bytes[GENERATE] == {PARAMS: 2000, GRADS: 0, OPTIMIZER: 6000, REFERENCE: 0}
    # But the swap with reference weights needs host memory for the parameters.
    assert rank_of(policy, WITH_REFERENCE).host_bytes[PARAMS] == 2000


def residency(**table):
    return {"verify": False, "huge_pages": False, "host_memory_limit_gib": None, "table": table}


def test_offload_for_logprob_moves_what_would_still_be_there():
    policy = {"offload_optimizer_for_refit": False, "offload_optimizer_for_logprob": True}
    assert traffic_of(rank_of(policy))[LOGPROB, OPTIMIZER] == (6000, 0)
    # With the other flag it was offloaded earlier, and stays on the host.
    both = {"offload_optimizer_for_refit": True, "offload_optimizer_for_logprob": True}
    assert (LOGPROB, OPTIMIZER) not in traffic_of(rank_of(both))


def test_grads_that_are_kept_stay_through_the_step():
    kept = {"logprob": {"grads": "keep"}, "refit": {"grads": "keep"}, "generate": {"grads": "gpu"}}
    on_gpu = rank_of({"residency": residency(**kept)}).gpu_bytes
    assert {phase: cells[GRADS] for phase, cells in on_gpu.items()} == dict.fromkeys(ALGORITHMS["grpo"].phases, 3600)


def test_seconds_follow_from_the_bytes_and_the_link():
    without_sizes = make_plan(policy_without_model())
    assert (without_sizes.ranks, without_sizes.link_bytes_per_s) == ((), H200_RATES.link_bytes_per_s)
    seconds = {transition.phase: transition.seconds for transition in rank_of({}, link_bytes_per_s=1e3).transitions}
    assert seconds == {LOGPROB: 2.0, TRAIN: 6.0, REFIT: 6.0, GENERATE: 2.0}


def test_only_optimizer_state_is_slower_where_it_is_not_page_locked():
    rank = rank_of({"use_pinned_optimizer_offload": False}, WITH_REFERENCE)
    link, staged = H200_RATES.link_bytes_per_s, STAGED_BYTES_PER_S
    assert [(moved.target, moved.seconds) for transition in rank.transitions for moved in transition.traffic] == [
        (PARAMS, 2000 / link),
        (REFERENCE, 6000 / link),
        (OPTIMIZER, 6000 / staged),
        (OPTIMIZER, 6000 / staged),
        (PARAMS, 2000 / link),
    ]


def test_sft_sends_nothing_over_the_link():
    rank = rank_of({}, cycle=ALGORITHMS["sft"].phases)
    assert set(rank.gpu_bytes) == {Phase.TRAIN, Phase.LOGPROB}
    assert traffic_of(rank) == {}
    assert rank.gpu_bytes[LOGPROB][OPTIMIZER] == 6000


def test_ranks_of_a_stage_fill_one_host_after_another():
    first, last = FACTS, dataclasses.replace(FACTS, num_params=400, num_optimizer_params=250)
    plan = make_plan(policy_without_model(), [first, last])
    needs = rank_needs(plan, ranks_per_host=3, num_hosts=2)
    hosts = [(rank, f"host {rank // 3}", (8000, 4000)[rank // 3]) for rank in range(6)]
    assert [(need.rank, need.host, need.total_bytes) for need in needs] == hosts
    assert plan.largest_rank.stage == 0
    assert PlannedRun(plan, needs).first_host_state_bytes == 3 * 11600  # frozen parameters have no gradients
    assert PlannedRun(plan, rank_needs(plan, ranks_per_host=2, num_hosts=1)).first_host_state_bytes == 11600 + 5600


def test_the_plan_of_a_whole_recipe():
    config = load(CONFIGS / "grpo_math_1B_megatron.yaml", ["cluster.gpus_per_node=8"]).config
    run = plan_run(config, QWEN2_1_5B, algorithm="grpo")
    [rank] = run.plan.ranks
    assert rank.facts.num_params == 1_543_714_304
    assert rank.facts.has_reference
    assert rank.target_bytes[PARAMS] == rank.target_bytes[REFERENCE] == 2 * 1_543_714_304
    assert rank.target_bytes[OPTIMIZER] == pytest.approx(10 * 1_543_714_304 / 8, rel=1e-4)
    assert len(run.needs) == 8
    without = load(CONFIGS / "grpo_math_1B_megatron.yaml", ["loss_fn.reference_policy_kl_penalty=0.0"]).config
    assert not plan_run(without, QWEN2_1_5B, algorithm="grpo").plan.largest_rank.facts.has_reference


def test_the_recipes_own_limit_is_held_wherever_the_plan_is_made():
    config = load(CONFIGS / "grpo_math_1B_megatron.yaml", ["policy.residency.host_memory_limit_gib=20"]).config
    with pytest.raises(HostBudgetError, match=r"Rank 0 needs 20\.13 GiB .*host_memory_limit_gib is 20\."):
        plan_run(config, QWEN2_1_5B, algorithm="grpo")


def test_streamed_optimizer_state_is_on_the_host_and_crosses_the_link_both_ways_in_each_step():
    window = 2**20
    streamed = residency(train={"optimizer_state": "streamed"}) | {"stream_window_mib": 1}
    rank = rank_of({"residency": streamed})
    assert rank.gpu_bytes[TRAIN] == {PARAMS: 2000, GRADS: 3600, OPTIMIZER: window, REFERENCE: 0}
    assert rank.gpu_bytes[REFIT][OPTIMIZER] == rank.gpu_bytes[GENERATE][OPTIMIZER] == 0
    assert rank.host_bytes[OPTIMIZER] == 6000
    assert OPTIMIZER not in {target for _, target in traffic_of(rank)}  # only its window moves
    [traffic] = rank.step_traffic
    assert (traffic.target, traffic.d2h_bytes, traffic.h2d_bytes) == (OPTIMIZER, 6000, 6000)
    # Both directions at once, each at 92% of its speed alone.
    assert traffic.seconds == pytest.approx(6000 / (0.92 * H200_RATES.link_bytes_per_s))
    [staged] = rank_of({"residency": streamed, "use_pinned_optimizer_offload": False}).step_traffic
    assert staged.seconds == pytest.approx(12000 / STAGED_BYTES_PER_S)  # one after the other
    assert rank_of({}).step_traffic == ()


def test_float32_is_refused_where_gpus_share_rows():
    apart = ["policy.megatron_cfg.context_parallel_size=2", "cluster.gpus_per_node=2", "~warm_start"]
    config = load(CONFIGS / "grpo_tiny_cpu.yaml", apart).config
    with pytest.raises(ValueError, match=r"^policy\.precision is float32 .*megatron_cfg\.context_parallel_size 2"):
        resolved_for(config, 24)
    config["policy"]["precision"] = "bfloat16"
    assert resolved_for(config, 24).run
