"""Tests which addresses the ranks of one machine listen on."""

from typing import Any

from support.gloo import keep_devices_apart
from support.ranks import run_ranks


def listen(rank: int, world_size: int, ports: list[int]) -> list[Any]:
    """Returns what each rank listens on with process groups, and with groups created a second time."""
    import psutil
    import torch

    from nemo_offload_rl.mcore import distributed

    keep_devices_apart()  # a shared device keeps listening
    seen = []
    for port in ports:
        sizes = distributed.ParallelSizes(tensor=2, pipeline=1, virtual_pipeline=None, expert=1, expert_tensor=1)
        distributed.initialize(
            sizes,
            rank=rank,
            world_size=world_size,
            local_rank=rank,
            master_addr="127.0.0.1",
            master_port=port,
            seed=1,
            te_rng_tracker=False,
        )
        total = torch.ones(1) * (rank + 1)
        torch.distributed.all_reduce(total)
        connections = psutil.Process().net_connections("inet")
        seen.append((total.item(), {c.laddr for c in connections if c.status == psutil.CONN_LISTEN}))
        distributed.destroy()
        connections = psutil.Process().net_connections("inet")
        assert not [c.laddr for c in connections if c.status == psutil.CONN_LISTEN], "groups or their store are left"
    return seen


def test_all_that_listens_is_on_loopback():
    results = run_ranks(listen, 2, num_ports=2)
    for total, addresses in results[0] + results[1]:
        assert total == 3
        assert addresses, "gloo listens somewhere"
        assert {ip for ip, _ in addresses} == {"127.0.0.1"}


def test_groups_of_a_rank_alone_are_shut_down_beside_one_another():
    assert run_ranks(end_twice, 1, num_ports=1) == [[2.0, False]]


def end_twice(rank: int, world_size: int, ports: list[int]) -> list[float | bool]:
    """Returns a sum in a group of its own, and whether groups remain after both ways to destroy them."""
    import torch

    from nemo_offload_rl.mcore.patches.torch_distributed import shut_down_groups_at_once

    address = f"tcp://127.0.0.1:{ports[0]}"
    torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=world_size)
    total = torch.full((1,), 2.0)
    torch.distributed.all_reduce(total, group=torch.distributed.new_group([0]))
    shut_down_groups_at_once()
    torch.distributed.destroy_process_group()
    return [total.item(), torch.distributed.is_initialized()]
