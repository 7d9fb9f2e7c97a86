"""Tests the residency table of a recipe, and which key set each cell."""

from support.tiny import policy_without_model

from nemo_offload_rl.config import load
from nemo_offload_rl.config.keys.tree import schema_keys
from nemo_offload_rl.config.rules.base import TABLE
from nemo_offload_rl.config.rules.residency import AUTO, FLAG_PHASES
from nemo_offload_rl.config.schema import GRPOMasterConfig
from nemo_offload_rl.memory.units import GIB
from nemo_offload_rl.plan.plan import settings
from nemo_offload_rl.residency.table import DEFAULT_TABLE, Phase, Placement, Target
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
    changed = {
        (phase, target): table[phase][target]
        for phase in Phase
        for target in Target
        if table[phase][target] != DEFAULT_TABLE[phase][target]
    }
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
