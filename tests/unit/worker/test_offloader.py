"""Tests that the needs of a host's ranks are summed before anything is page-locked; and threads."""

import pytest
import torch

from nemo_offload_rl.memory.numa import Binding
from nemo_offload_rl.memory.units import GIB
from nemo_offload_rl.placement.machine import HostFacts
from nemo_offload_rl.plan.host_budget import HostBudgetError
from nemo_offload_rl.residency.table import Target
from nemo_offload_rl.worker.offloader import check_ranks, limit_threads

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
