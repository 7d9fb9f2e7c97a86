"""Tests which recipes fit a host's memory, and what the user is told if one does not."""

import pickle

import pytest

from nemo_offload_rl.memory.units import GIB
from nemo_offload_rl.placement.machine import HostFacts
from nemo_offload_rl.plan.host_budget import (
    HostBudgetError,
    RankNeed,
    check_host_budget,
    margin_bytes,
    usable_bytes,
)
from nemo_offload_rl.residency.table import Target


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
    assert error_of(ranks, host(126, cgroup=100, memlock=0.0625)).splitlines() == [
        "The 8 ranks of node-a need 186.00 GiB of host memory for offloading, but 95.00 GiB are available; "
        "nothing was page-locked.",
        "",
        "  needed (GiB)      params     grads  optimizer_state  reference_weights     total",
        *[
            f"  rank {rank}              3.00         0            17.25               3.00     23.25"
            for rank in range(8)
        ],
        "  all                24.00         0           138.00              24.00    186.00",
        "",
        "  available (GiB)",
        "        126.00  MemAvailable",
        "        100.00  free under the cgroup's limit",
        "        0.0625  memlock of each process",
        "         -5.00  margin",
        "         95.00  usable for offloading",
        "",
        "  91.00 GiB are missing; any of these helps",
        "    frees 138.00 GiB, enough: policy.offload_optimizer_for_refit=false "
        "policy.offload_optimizer_for_logprob=false (it stays on the GPU, unless it is streamed)",
        "    frees 48.00 GiB, not enough alone: ++policy.residency.table.generate.params=keep "
        "loss_fn.reference_policy_kl_penalty=0 (they stay on the GPU)",
        "    frees 24.00 GiB, not enough alone: loss_fn.reference_policy_kl_penalty=0 (no reference weights are kept)",
        "    policy.megatron_cfg.optimizer.use_distributed_optimizer=true with more ranks (cluster.num_nodes): it "
        "shards optimizer state over them",
    ]


def test_only_what_would_free_something_is_advised():
    error = error_of([need(params=200)], host())
    assert error.startswith("The rank of node-a needs 200.00 GiB of host memory for offloading, but 95.00 GiB")
    assert "frees 200.00 GiB, enough: ++policy.residency.table.generate.params=keep (they stay on the GPU)" in error
    assert "optimizer" not in error.partition("any of these helps")[2]
    assert "kl_penalty" not in error


def test_activations_count_and_have_a_remedy_of_their_own():
    ranks = [RankNeed(rank, "node-a", {Target.PARAMS: 40 * GIB}, {"activations": 10 * GIB * rank}) for rank in range(2)]
    check_host_budget(ranks, {"node-a": host()}, 50 * GIB)
    assert error_of(ranks, limit=49).startswith("Rank 1 needs 50.00 GiB of host memory for offloading")
    error = error_of(ranks, host(90)).splitlines()
    assert error[2:6] == [
        "  needed (GiB)      params     grads  optimizer_state  reference_weights  activations     total",
        "  rank 0             40.00         0                0                  0            0     40.00",
        "  rank 1             40.00         0                0                  0        10.00     50.00",
        "  all                80.00         0                0                  0        10.00     90.00",
    ]
    assert error[-1] == (
        "    frees 10.00 GiB, enough: a lower policy.activation_offload.host_memory_limit_gib or fewer "
        "policy.megatron_cfg.offload_modules (frees this much at most; activations that do not fit stay on the GPU)"
    )


def test_no_limit_is_called_so():
    error = error_of([need(params=200)], host())
    assert "  no limit  free under the cgroup's limit" in error
    assert "  no limit  memlock of each process" in error


def test_a_rank_may_not_exceed_the_recipes_limit_on_any_host():
    check_host_budget([need(optimizer=8)], {}, 8 * GIB)
    error = error_of([need(0, optimizer=8), need(3, optimizer=8.3)], limit=8)
    assert error.startswith(
        "Rank 3 needs 8.30 GiB of host memory for offloading, but policy.residency.host_memory_limit_gib is 8."
    )
    assert "    policy.residency.host_memory_limit_gib=9, or null to use what the host has" in error
    assert "there is" not in error


def test_small_sizes_have_digits():
    error = error_of([need(optimizer=0.00125)], limit=0.001)
    assert error.startswith("Rank 0 needs 0.00125 GiB of host memory")
    assert "  0.00025 GiB are missing; any of these helps" in error
    assert "    frees 0.00125 GiB, enough: policy.offload_optimizer_for_refit=false" in error
    assert "0.00 " not in error


def test_memlock_does_not_count():
    check_host_budget([need(optimizer=8)], {"node-a": host(memlock=0.0625)}, None)


def test_the_error_survives_the_way_to_the_driver():
    error = HostBudgetError("too little")
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy)) == (HostBudgetError, "too little")


def test_what_never_moves_counts_by_its_name():
    one = RankNeed(0, "node-a", {Target.PARAMS: 10 * GIB}, {"cpu_optimizer": 100 * GIB})
    assert one.total_bytes == 110 * GIB
    error = error_of([one], host()).splitlines()
    assert error[2:4] == [
        "  needed (GiB)      params     grads  optimizer_state  reference_weights  cpu_optimizer     total",
        "  rank 0             10.00         0                0                  0         100.00    110.00",
    ]
