"""Tests that the needs of a host's ranks are summed before anything is page-locked; and threads."""

from types import SimpleNamespace

import pytest
import torch

from nemo_offload_rl.memory.numa import Binding
from nemo_offload_rl.memory.units import GIB
from nemo_offload_rl.metrics.memory import GpuAllocated
from nemo_offload_rl.placement.host import HostFacts
from nemo_offload_rl.plan.host_budget import HostBudgetError
from nemo_offload_rl.residency.table import DEFAULT_TABLE, Phase, Placement, Target
from nemo_offload_rl.worker import offloader
from nemo_offload_rl.worker.offloader import EarlyMoves, GpuPeaks, check_ranks, limit_threads

NEED = {Target.OPTIMIZER_STATE: 60 * GIB}


def host(boot_id, available=100):
    return HostFacts("node", boot_id, 200 * GIB, available * GIB, None, None)


def test_ranks_of_one_machine_are_added_up_and_machines_of_one_name_are_not():
    check_ranks([(NEED, {}, host("a")), (NEED, {}, host("b"))], None)
    with pytest.raises(HostBudgetError, match=r"^The 2 ranks of node need 120\.00 GiB"):
        check_ranks([(NEED, {}, host("a")), (NEED, {}, host("b")), (NEED, {}, host("a"))], None)


def test_the_least_that_a_rank_sees_of_its_machine_counts():
    half = {Target.OPTIMIZER_STATE: 30 * GIB}
    check_ranks([(half, {}, host("a", 80)), (half, {}, host("a", 100))], None)
    for seen in ((50, 100), (100, 50)):
        with pytest.raises(HostBudgetError, match=r"but 47\.50 GiB are available"):
            check_ranks([(half, {}, host("a", available)) for available in seen], None)


def test_torch_computes_with_no_more_threads_than_the_nodes_cpus():
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        limit_threads(Binding(None, (0, 1), False, "not bound"))
        assert torch.get_num_threads() == 4
        limit_threads(Binding(1, (4, 5), True, "bound"))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_verbs_peak_counts_the_most_that_was_mapped_and_without_a_gpu_there_is_none(monkeypatch):
    peak, given = 2.0, []

    def memory_stats(*beside_torch):
        given.append(beside_torch)
        return {"host_rss_gib": 1.0}

    monkeypatch.setattr(offloader, "memory_stats", memory_stats)
    monkeypatch.setattr(offloader, "gpu_allocated", lambda: GpuAllocated(2 * GIB, int(peak * GIB)))
    mapped = 3 * GIB
    peaks = GpuPeaks(lambda: mapped)
    assert peaks.taken_gib("train") is None
    with peaks.of("train"):
        peak = 7.0
        mapped = 4 * GIB
    mapped = 1 * GIB
    assert peaks.taken_gib("train") == 5.0
    assert peaks.memory_stats() == {"host_rss_gib": 1.0, "gpu_peak_train_gib": 11.0}
    assert given == [(1 * GIB, 4 * GIB)]
    with peaks.of("logprobs"):
        peak = 2.5
    assert peaks.taken_gib("logprobs") == 0.5
    assert {"gpu_peak_train_gib": 11.0, "gpu_peak_logprobs_gib": 3.5}.items() <= peaks.memory_stats().items()
    monkeypatch.setattr(offloader, "gpu_allocated", lambda: None)
    without_gpu = GpuPeaks(lambda: 0)
    with without_gpu.of("train"):
        pass
    assert (without_gpu.taken_gib("train"), without_gpu.memory_stats()) == (None, {"host_rss_gib": 1.0})


class Asked:
    def __init__(self):
        self.calls = []

    def prefetch(self, phase, reserve_bytes=0, *, with_dropped=False):
        self.calls.append((phase, "with gradients" if with_dropped else reserve_bytes / GIB))

    def start_leaving(self, phase):
        self.calls.append(f"leave for {phase}")


def early(tokens=128, logprob=Placement.UNCHANGED, *, refit_follows=True):
    asked = Asked()
    plan = SimpleNamespace(table={**DEFAULT_TABLE, Phase.LOGPROB: {Target.OPTIMIZER_STATE: logprob}})
    return EarlyMoves(asked, plan, most_tokens=tokens, refit_follows=refit_follows), asked.calls


def test_params_return_first_and_the_state_leaves_room_for_the_largest_pass():
    moves, calls = early(tokens=512)
    moves.after_generation(logprobs=True)
    assert calls == [(Phase.LOGPROB, 0)]  # no pass has been measured yet
    calls.clear()
    moves.note_logprobs(64, 0.5)
    moves.note_logprobs(64, 0.25)
    moves.after_generation(logprobs=True)
    assert calls == [(Phase.LOGPROB, 0), (Phase.TRAIN, pytest.approx(1.1 * 512 * 0.5 / 64))]


def test_state_that_is_to_be_on_the_host_in_log_prob_passes_does_not_return_beside_them():
    moves, calls = early(logprob=Placement.HOST)
    moves.note_logprobs(64, 0.5)
    moves.after_generation(logprobs=True)
    moves.after_generation(logprobs=False)  # without passes in between all of training returns
    assert calls == [(Phase.LOGPROB, 0), (Phase.TRAIN, "with gradients")]


def test_state_leaves_with_the_end_of_training_only_where_a_refit_follows():
    for refit_follows, wanted in ((True, ["leave for refit"]), (False, [])):
        moves, calls = early(refit_follows=refit_follows)
        moves.after_training()
        assert calls == wanted
