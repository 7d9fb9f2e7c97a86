"""Tests that objects exchanged while a checkpoint is planned use a process group of their own."""

import pytest
import torch
from support.ranks import free_port, run_ranks

from nemo_offload_rl.mcore import distributed
from nemo_offload_rl.mcore.distributed import ParallelSizes, gather
from nemo_offload_rl.mcore.patches.torch_distributed import make_group, objects_through


def join(rank, world_size, port):
    distributed.initialize(
        ParallelSizes(tensor=1, pipeline=1, virtual_pipeline=None, expert=1, expert_tensor=1),
        rank=rank,
        world_size=world_size,
        local_rank=rank,
        master_addr="localhost",
        master_port=port,
        seed=1,
        te_rng_tracker=False,
    )


def exchange(rank, world_size, ports):
    join(rank, world_size, ports[0])
    with objects_through(make_group()):
        found = [gather(("from", rank))]
        got = [None] * world_size if rank == 0 else None
        torch.distributed.gather_object(rank, object_gather_list=got, dst=0, group=None)
        mine = [None]
        torch.distributed.scatter_object_list(mine, [10, 11] if rank == 0 else None, src=0, group=None)
        told = ["told"] if rank == 0 else [None]
        torch.distributed.broadcast_object_list(told, src=0)
        found += [got, mine, told]
    distributed.destroy()
    return found


def test_every_collective_of_objects_gives_what_it_gives_without():
    values = [("from", 0), ("from", 1)]
    assert run_ranks(exchange, 2, num_ports=1) == [[values, [0, 1], [10], ["told"]], [values, None, [11], ["told"]]]


@pytest.fixture
def alone():
    join(0, 1, free_port())
    yield
    distributed.destroy()


def fail_in_the_middle(group, another):
    with objects_through(group):
        torch.distributed.all_gather_object([None], 1)
        torch.distributed.all_gather_object([None], 1, group=another)
        raise OSError("the disk is full")


def test_a_group_that_is_named_is_used_and_all_is_as_before_behind_it(alone, monkeypatch):
    seen = []

    def all_gather_object(objects, value, group=None):
        seen.append(group)

    monkeypatch.setattr(torch.distributed, "all_gather_object", all_gather_object)
    group, another = make_group(), make_group()
    with pytest.raises(OSError, match="the disk is full"):
        fail_in_the_middle(group, another)
    assert torch.distributed.all_gather_object is all_gather_object
    assert seen == [group, another]
