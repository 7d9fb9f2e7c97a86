"""Tests which recipes fit the memory of a host, what the user is told if one does not, and what never moves."""

import pickle

import pytest

from benchmarks.model_shapes import QWEN2_1_5B
from nemo_offload_rl.config import load
from nemo_offload_rl.memory.units import GIB
from nemo_offload_rl.placement.host import HostFacts
from nemo_offload_rl.plan.host_budget import HostBudgetError, RankNeed, check_host_budget, margin_bytes, usable_bytes
from nemo_offload_rl.plan.planner import plan_run
from nemo_offload_rl.residency.table import Target
from tests.unit.plan.test_report import BENCHMARK, printed, row


def host(available=100, cgroup=None, memlock=None):
    limits = [None if gib is None else int(gib * GIB) for gib in (cgroup, memlock)]
    return HostFacts("node-a", "d3b0", 200 * GIB, int(available * GIB), *limits)


def need(rank=0, params=0.0, optimizer=0.0, reference=0.0, name="node-a"):
    sizes = {Target.PARAMS: params, Target.OPTIMIZER_STATE: optimizer, Target.REFERENCE_WEIGHTS: reference}
    return RankNeed(rank, name, {target: int(size * GIB) for target, size in sizes.items()})


def error_of(needs, facts=None, limit=None):
    hosts = {} if facts is None else {"node-a": facts}
    with pytest.raises(HostBudgetError) as caught:
        check_host_budget(needs, hosts, None if limit is None else int(limit * GIB))
    return str(caught.value)


def test_the_smaller_of_two_sources_counts_less_a_margin():
    assert margin_bytes(host(100)) == 5 * GIB
    assert usable_bytes(host(100)) == 95 * GIB
    assert usable_bytes(host(100, cgroup=10)) == 9 * GIB
    assert usable_bytes(host(100, cgroup=300)) == 95 * GIB
    assert usable_bytes(host(0.5)) == 0


def test_what_fills_the_memory_to_the_margin_fits_and_a_byte_more_does_not():
    facts = host(100)
    ranks = [need(rank, optimizer=47.5) for rank in range(2)]
    check_host_budget(ranks, {"node-a": facts}, None)
    one_more = RankNeed(2, "node-a", {Target.PARAMS: 1})
    with pytest.raises(HostBudgetError):
        check_host_budget([*ranks, one_more], {"node-a": facts}, None)


def test_ranks_of_other_hosts_do_not_count():
    needs = [need(0, optimizer=60), need(1, optimizer=60, name="node-b")]
    check_host_budget(needs, {"node-a": host(), "node-b": host()}, None)


def test_too_little_memory_says_what_is_needed_what_there_is_and_what_helps():
    ranks = [need(rank, params=3, optimizer=17.25, reference=3) for rank in range(8)]
    first, *lines = error_of(ranks, host(126, cgroup=100, memlock=0.0625)).splitlines()
    sizes = "need 186.00 GiB of host memory for offloading, but 95.00 GiB are available"
    assert first == f"The 8 ranks of node-a {sizes}; nothing was page-locked."
    assert [line.split() for line in lines[:18] if line] == [
        ["needed", "(GiB)", "params", "grads", "optimizer_state", "reference_weights", "total"],
        *(["rank", str(rank), "3.00", "0", "17.25", "3.00", "23.25"] for rank in range(8)),
        ["all", "24.00", "0", "138.00", "24.00", "186.00"],
        ["available", "(GiB)"],
        ["126.00", "MemAvailable"],
        ["100.00", "free", "under", "the", "cgroup's", "limit"],
        ["0.0625", "memlock", "of", "each", "process"],
        ["-5.00", "margin"],
        ["95.00", "usable", "for", "offloading"],
    ]
    assert [line.strip().partition(" (")[0] for line in lines[19:]] == [
        "91.00 GiB are missing; any of these helps",
        "frees 138.00 GiB, enough: policy.offload_optimizer_for_refit=false policy.offload_optimizer_for_logprob=false",
        "frees 48.00 GiB, not enough alone: ++policy.residency.table.generate.params=keep "
        "loss_fn.reference_policy_kl_penalty=0",
        "frees 24.00 GiB, not enough alone: loss_fn.reference_policy_kl_penalty=0",
        "policy.megatron_cfg.optimizer.use_distributed_optimizer=true with more ranks",
    ]


def test_only_what_would_free_something_is_advised():
    error = error_of([need(params=200)], host())
    assert error.startswith("The rank of node-a needs 200.00 GiB of host memory for offloading, but 95.00 GiB")
    assert "frees 200.00 GiB, enough: ++policy.residency.table.generate.params=keep (they stay on the GPU)" in error
    assert "optimizer" not in error.partition("any of these helps")[2]
    assert "kl_penalty" not in error
    assert error.count("  no limit  ") == 2  # of the cgroup, of memlock


def test_what_never_moves_counts_by_its_name_and_has_a_remedy_of_its_own():
    ranks = [RankNeed(rank, "node-a", {Target.PARAMS: 40 * GIB}, {"activations": 10 * GIB * rank}) for rank in range(2)]
    check_host_budget(ranks, {"node-a": host()}, 50 * GIB)
    assert error_of(ranks, limit=49).startswith("Rank 1 needs 50.00 GiB of host memory for offloading")
    lines = error_of(ranks, host(90)).splitlines()
    assert lines[2].split()[-2:] == ["activations", "total"]
    assert [line.split()[-2:] for line in lines[3:6]] == [["0", "40.00"], ["10.00", "50.00"], ["10.00", "90.00"]]
    remedy = "a lower policy.activation_offload.host_memory_limit_gib or fewer policy.megatron_cfg.offload_modules"
    assert lines[-1].startswith(f"    frees 10.00 GiB, enough: {remedy}")


def test_a_rank_may_not_exceed_the_recipes_limit_on_any_host():
    check_host_budget([need(optimizer=8)], {}, 8 * GIB)
    check_host_budget([need(optimizer=8)], {"node-a": host(memlock=0.0625)}, None)  # memlock does not count
    error = error_of([need(0, optimizer=8), need(3, optimizer=8.3)], limit=8)
    limit = "policy.residency.host_memory_limit_gib is 8."
    assert error.startswith(f"Rank 3 needs 8.30 GiB of host memory for offloading, but {limit}")
    assert "    policy.residency.host_memory_limit_gib=9, or null to use what the host has" in error
    assert "there is" not in error


def test_small_sizes_have_digits():
    error = error_of([need(optimizer=0.00125)], limit=0.001)
    assert error.startswith("Rank 0 needs 0.00125 GiB of host memory")
    assert "  0.00025 GiB are missing; any of these helps" in error
    assert "0.00 " not in error


def test_the_error_survives_the_way_to_the_driver():
    copy = pickle.loads(pickle.dumps(HostBudgetError("too little")))
    assert (type(copy), str(copy)) == (HostBudgetError, "too little")


N = 1_543_714_304
HALF = N // 2
OPTIMIZER = "policy.megatron_cfg.optimizer"
ON_CPU = [f"{OPTIMIZER}.optimizer_cpu_offload=true", f"{OPTIMIZER}.overlap_cpu_optimizer_d2h_h2d=true"]
SAVES = ["++policy.megatron_cfg.checkpoint.async_save=true", "checkpointing.enabled=true"]
STAYS = ["policy.offload_optimizer_for_refit=false", "policy.offload_optimizer_for_logprob=false"]
LIMIT = "policy.residency.host_memory_limit_gib=20"


def planned(*overrides):
    return plan_run(load(BENCHMARK, list(overrides)).config, QWEN2_1_5B, algorithm="grpo")


SHARES = [
    ("optimizer_offload_fraction=0.5", 12 * HALF, 16 * HALF),
    ("optimizer_offload_fraction=0.5 use_precision_aware_optimizer=false", 16 * HALF, 16 * HALF),
    ("optimizer_offload_fraction=1.0", 0, 32 * HALF),
    ("optimizer_offload_fraction=1.0 optimizer=sgd use_precision_aware_optimizer=false", 8 * HALF, 24 * HALF),
    ("optimizer_cpu_offload=false overlap_cpu_optimizer_d2h_h2d=false", 20 * HALF, None),
]


@pytest.mark.parametrize(("overrides", "on_gpu", "on_host"), SHARES)
def test_optimizer_state_of_both_places(overrides, on_gpu, on_host):
    run = planned(*ON_CPU, *(f"{OPTIMIZER}.{override}" for override in overrides.split()))
    (rank,) = run.plan.ranks
    assert rank.target_bytes[Target.OPTIMIZER_STATE] == on_gpu
    assert rank.fixed_bytes == ({} if on_host is None else {"cpu_optimizer": on_host})
    assert rank.total_host_bytes == sum(rank.host_bytes.values()) + (on_host or 0) == run.needs[0].total_bytes


KEPT = [
    ([], 2 * N),  # offloaded optimizer state is read in place
    (["++policy.residency.table.train.optimizer_state=streamed"], 2 * N),
    (STAYS, (2 + 10) * N),
    ([*STAYS, "checkpointing.save_optimizer=false"], 2 * N),
    ([ON_CPU[0], f"{OPTIMIZER}.optimizer_offload_fraction=0.5"], 2 * N + 12 * N // 2),
    ([f"++{OPTIMIZER}.exp_avg_dtype=bfloat16"], (2 + 12) * N),  # converted for the file
]


@pytest.mark.parametrize(("overrides", "nbytes"), KEPT)
def test_a_checkpoint_beside_the_run_keeps_what_the_arena_does_not_hold(overrides, nbytes):
    with_it, without = planned(*SAVES, *overrides), planned("checkpointing.enabled=true", *overrides)
    assert with_it.plan.ranks[0].fixed_bytes["checkpoint"] == nbytes
    assert with_it.needs[0].total_bytes - without.needs[0].total_bytes == nbytes
    assert "checkpoint" not in planned(SAVES[0], "checkpointing.enabled=false", *overrides).plan.ranks[0].fixed_bytes


def test_one_data_parallel_rank_keeps_the_weights():
    sizes = [f"policy.megatron_cfg.{name}_model_parallel_size=2" for name in ("tensor", "pipeline")]
    needs = planned(*SAVES, *sizes, "cluster.gpus_per_node=8", "policy.megatron_cfg.sequence_parallel=false").needs
    kept = [need.fixed_bytes["checkpoint"] for need in needs]
    assert [nbytes > 0 for nbytes in kept] == 2 * [True, True, False, False]


@pytest.mark.parametrize(
    ("overrides", "name", "remedy"),
    [
        ([*ON_CPU, f"{OPTIMIZER}.optimizer_offload_fraction=1.0"], "cpu_optimizer", "a lower policy.megatron_cfg.opti"),
        ([*SAVES, *STAYS], "checkpoint", "policy.megatron_cfg.checkpoint.async_save=false"),
    ],
)
def test_a_limit_of_host_memory_counts_it_and_the_report_shows_it(overrides, name, remedy, capsys):
    with pytest.raises(HostBudgetError, match=r"Rank 0 needs .* GiB") as caught:
        planned(*overrides, LIMIT)
    assert name in str(caught.value)
    assert f"enough: {remedy}" in str(caught.value)
    text = printed(capsys, BENCHMARK, *overrides)
    nbytes = planned(*overrides).plan.ranks[0].fixed_bytes[name]
    assert row(text, name)[-1] == f"{nbytes / GIB:.2f}"
    copies = "the CPU optimizer steps 1,543,714,304 parameters of the rank; each of its steps copies 5.75 GiB out"
    assert (copies in text) is (name == "cpu_optimizer")
