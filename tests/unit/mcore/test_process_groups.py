"""Tests process groups: what they listen on, which of them exchanges objects, and that all is freed again."""

import gc
import weakref
from types import SimpleNamespace

import psutil
import pytest
import torch
from support.gloo import keep_devices_apart
from support.ranks import free_port, run_ranks, worker_of_rank
from support.tiny import random_batch, tiny_policy

from nemo_offload_rl.algorithms.losses import NLLLoss
from nemo_offload_rl.mcore import distributed
from nemo_offload_rl.mcore.distributed import ParallelSizes, gather
from nemo_offload_rl.mcore.patches.optimizers import add_gradients_on_this_stream
from nemo_offload_rl.mcore.patches.torch_distributed import make_group, objects_through, shut_down_groups_at_once
from nemo_offload_rl.mcore.step import ComputeStream
from nemo_offload_rl.refit.interface import RefitSender
from nemo_offload_rl.refit.loads import EngineLostError
from nemo_offload_rl.worker import worker


def join(rank, world_size, port, tensor=1):
    sizes = ParallelSizes(tensor=tensor, pipeline=1, virtual_pipeline=None, expert=1, expert_tensor=1)
    address = {"master_addr": "127.0.0.1", "master_port": port}
    ranks = {"rank": rank, "local_rank": rank, "world_size": world_size}
    distributed.initialize(sizes, **ranks, **address, seed=1, te_rng_tracker=False)


def listening():
    connections = psutil.Process().net_connections("inet")
    return {connection.laddr for connection in connections if connection.status == psutil.CONN_LISTEN}


def listen(rank, world_size, ports):
    """Returns a sum over both ranks and what each listens on with process groups, and with groups created again."""
    keep_devices_apart()  # a shared device keeps listening
    seen = []
    for port in ports:
        join(rank, world_size, port, tensor=2)
        total = torch.ones(1) * (rank + 1)
        torch.distributed.all_reduce(total)
        seen.append((total.item(), listening()))
        distributed.destroy()
        assert not listening(), "groups or their store are left"
    return seen


def test_all_that_listens_is_on_loopback():
    results = run_ranks(listen, 2, num_ports=2)
    for total, addresses in results[0] + results[1]:
        assert total == 3
        assert addresses, "gloo listens somewhere"
        assert {ip for ip, _ in addresses} == {"127.0.0.1"}


def end_twice(rank, world_size, ports):
    """Returns a sum in a group of its own, and whether groups remain after both ways to destroy them."""
    address = f"tcp://127.0.0.1:{ports[0]}"
    torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=world_size)
    total = torch.full((1,), 2.0)
    torch.distributed.all_reduce(total, group=torch.distributed.new_group([0]))
    shut_down_groups_at_once()
    torch.distributed.destroy_process_group()
    return [total.item(), torch.distributed.is_initialized()]


def test_groups_of_a_rank_alone_are_shut_down_beside_one_another():
    assert run_ranks(end_twice, 1, num_ports=1) == [[2.0, False]]


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


def fail_in_the_middle(group, another):
    with objects_through(group):
        torch.distributed.all_gather_object([None], 1)
        torch.distributed.all_gather_object([None], 1, group=another)
        raise OSError("the disk is full")


def test_a_group_that_is_named_is_used_and_all_is_as_before_behind_it(monkeypatch):
    seen = []

    def all_gather_object(objects, value, group=None):
        seen.append(group)

    join(0, 1, free_port())
    monkeypatch.setattr(torch.distributed, "all_gather_object", all_gather_object)
    group, another = make_group(), make_group()
    with pytest.raises(OSError, match="the disk is full"):
        fail_in_the_middle(group, another)
    assert torch.distributed.all_gather_object is all_gather_object
    assert seen == [group, another]
    distributed.destroy()


def test_a_worker_that_has_ended_leaves_no_model_behind():
    """Its parameters are fp32, and the optimizer's views of them hold autograd nodes that reference the model."""
    worker = worker_of_rank(tiny_policy(), 0, 1, free_port())
    worker.train(random_batch(8), NLLLoss(), gbs=8, mbs=2)
    held = [weakref.ref(worker.state.model[0]), weakref.ref(worker.state.optimizer)]
    worker.shutdown()
    del worker
    gc.collect()
    assert [reference() for reference in held] == [None, None]


def test_groups_that_cannot_all_be_made_are_left_again(make_worker, monkeypatch):
    """Fails to make the last group, as a GPU without memory does; with more memory the process may try again."""

    def no_memory(*_, **__):
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(distributed, "model_parallel_cuda_manual_seed", no_memory)
        with pytest.raises(torch.OutOfMemoryError):
            make_worker()
    make_worker().train(random_batch(8), NLLLoss(), gbs=8, mbs=2)


def test_a_schedule_whose_length_only_a_run_knows_is_refused(make_worker):
    with pytest.raises(ValueError, match=r"lr_decay_iters is null, which a run replaces by its number of steps"):
        make_worker(tiny_policy(scheduler={"lr_decay_iters": None}))


GRAPHS = {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["attn"]}


@pytest.mark.parametrize(("megatron", "captures"), [({}, False), (GRAPHS, True)], ids=["eager", "graphs"])
def test_a_worker_asks_for_another_stream_only_for_graphs(make_worker, monkeypatch, megatron, captures):
    def asked(_, **arguments):
        raise ZeroDivisionError(arguments)  # ends the worker once it has requested its stream

    monkeypatch.setattr(worker, "ComputeStream", asked)
    with pytest.raises(ZeroDivisionError) as found:
        make_worker(tiny_policy(**megatron))
    assert found.value.args == ({"captures": captures},)


def test_each_gradient_is_added_up_by_the_node_that_tells_the_model(make_worker):
    """Each parameter must have one node: a second one, without the hook, would not report its gradient."""
    worker = make_worker()
    [ddp] = worker.state.model
    parameters = list(ddp.module.parameters())
    nodes = [parameter.expand_as(parameter).grad_fn.next_functions[0][0] for parameter in parameters]
    assert nodes == ddp.grad_accs != []
    told, make_hook = [], ddp._make_backward_post_hook
    ddp._make_backward_post_hook = lambda parameter: told.append(parameter) or make_hook(parameter)
    add_gradients_on_this_stream([ddp])
    assert [id(parameter) for parameter in told] == [id(parameter) for parameter in parameters]


GPU = torch.device("cuda", 0)


class FakeStream:
    def __init__(self) -> None:
        self.device, self.waited_for = GPU, []

    def wait_stream(self, other: "FakeStream") -> None:
        self.waited_for.append(other)


@pytest.fixture
def cuda(monkeypatch):
    """Replaces torch.cuda's streams for one thread."""
    fake = SimpleNamespace(default=FakeStream())
    fake.current = fake.default
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_: FakeStream())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: fake.current)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda *_: fake.default)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: setattr(fake, "current", stream))
    return fake


def test_each_stream_follows_the_one_before_it(cuda):
    stream = ComputeStream(GPU, captures=True)
    own = cuda.current
    assert own is not cuda.default
    assert own.waited_for == [cuda.default]
    assert cuda.default.waited_for == []
    stream.close()
    assert cuda.current is cuda.default
    assert cuda.default.waited_for == [own]
    stream.close()
    assert cuda.default.waited_for == [own]


@pytest.mark.parametrize(("captures", "is_default"), [(False, False), (True, False), (False, True)])
def test_a_stream_that_the_caller_chose_stays_and_so_does_the_default_without_graphs(cuda, captures, is_default):
    cuda.current = chosen = cuda.default if is_default else FakeStream()
    stream = ComputeStream(GPU, captures=captures)
    assert cuda.current is chosen
    stream.close()
    assert cuda.current is chosen
    assert cuda.default.waited_for == chosen.waited_for == []


def test_graphs_of_refits_go_before_process_groups(make_worker, monkeypatch):
    """NCCL waits for graphs that hold its collectives, without end: a policy with TP 2 took 20 s to end."""
    order = []

    class Sender(RefitSender):
        def send(self, weights):
            return {}

        def close(self):
            order.append("sender")
            raise EngineLostError("engines end before the policy")

    class Transport:
        def connect(self, plan, *, rank, bucket_bytes):
            return Sender()

    worker = make_worker()
    worker.prepare_refit_info(Transport())
    destroy = distributed.destroy
    monkeypatch.setattr(distributed, "destroy", lambda: (order.append("groups"), destroy()))
    worker.shutdown()
    assert order == ["sender", "groups"]
