"""Tests trainers that move each kind of state alone, on plain torch models, between two places of host memory."""

import copy
import subprocess
import sys
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from support.jobs import WIDTH, Job, assert_equal, make_job
from support.phases import delay_moves
from support.shared_memory import process_that_answers
from support.tiny_megatron import one_rank
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.multiprocessing.reductions import reduce_tensor

from nemo_offload_rl.adapters.adopt import AdoptedState, adopt
from nemo_offload_rl.memory.pinned import LeakError, PinnedArena
from nemo_offload_rl.residency.optimizer_state import state_tensors
from nemo_offload_rl.residency.table import Placement, Target
from nemo_offload_rl.residency.target import ResidencyError

ALL = [Target.PARAMS, Target.GRADS, Target.OPTIMIZER_STATE]


@pytest.fixture
def adopted():
    """Makes and adopts jobs; closes them when the test ends and checks that they freed everything."""
    made: list[AdoptedState] = []
    torch.set_num_threads(1)

    def make(**options: Any) -> tuple[Job, AdoptedState]:
        job = make_job(**options)
        made.append(adopt(job.model, job.optimizer, PinnedArena()))
        return job, made[-1]

    yield make
    for state in made:
        state.close()
    made.clear()
    assert PinnedArena.live_bytes() == 0


def placements(state: AdoptedState) -> dict[Target, Placement]:
    return {target: state.offloader.residency.where(target) for target in state.offloader.targets}


def moments(job: Job) -> dict[str, torch.Tensor]:
    tensors = state_tensors(job.optimizer, torch.device("cpu"))
    return {name: tensor.detach().clone() for name, tensor in tensors if not name.startswith("master")}


def test_steps_between_moves_of_single_targets_are_bit_equal_to_none(adopted, monkeypatch):
    plain, (job, state) = make_job(dtype=torch.bfloat16), adopted(dtype=torch.bfloat16)
    delay_moves(monkeypatch, seconds=0.003)
    for step in range(10):
        wanted = plain.step(step)
        assert job.step(step) == wanted
        state.move_optimizer("cpu")
        state.move_params("cpu")
        assert state.offloader.mapped_bytes == 0
        state.move_params(torch.device("cuda"))
        state.move_optimizer("cuda")
    state.offloader.residency.require(Target.OPTIMIZER_STATE)
    assert_equal(job.everything(), plain.everything())


def test_each_call_moves_its_kind_alone_twice_is_once_and_what_is_away_is_refused(adopted):
    job, state = adopted()
    job.step(0)
    for _ in range(2):
        state.move_optimizer("cpu")
    state.move_grads("cpu")  # in plain torch, gradients are not in buffers
    assert placements(state) == {Target.PARAMS: Placement.GPU, Target.OPTIMIZER_STATE: Placement.HOST}
    with pytest.raises(ResidencyError, match="optimizer_state is needed on the GPU"):
        job.step(1)
    state.move_params("cpu")
    with pytest.raises(ResidencyError, match="params is needed on the GPU"):
        job.step(1)
    state.move_optimizer("cuda:0")
    assert placements(state) == {Target.PARAMS: Placement.HOST, Target.OPTIMIZER_STATE: Placement.GPU}


def test_what_saves_or_loads_optimizer_state_waits_for_it_and_refuses_while_it_is_away(adopted, monkeypatch):
    job, state = adopted()
    job.step(0)
    saved, wanted = copy.deepcopy(job.optimizer.state_dict()), moments(job)
    job.step(1)
    delay_moves(monkeypatch, seconds=0.05)
    state.move_optimizer("cpu")
    for call in (job.optimizer.state_dict, lambda: job.optimizer.load_state_dict(saved)):
        with pytest.raises(ResidencyError, match="optimizer_state is needed on the GPU"):
            call()
    state.move_optimizer("cuda")
    job.optimizer.load_state_dict(saved)
    for _ in range(2):
        assert_equal(moments(job), wanted)
        state.move_optimizer("cpu")
        state.move_optimizer("cuda")
        found = job.optimizer.state_dict()["state"]
        for number, tensors in saved["state"].items():
            assert all(torch.equal(found[number][key], tensor) for key, tensor in tensors.items())


def test_state_that_is_away_is_on_the_gpu_for_a_checkpoint_and_away_again_after_it(adopted):
    job, state = adopted()
    job.step(0)
    wanted = job.everything()
    state.move("cpu", ALL)
    with state.on_gpu([Target.PARAMS, Target.OPTIMIZER_STATE]):
        assert_equal(job.everything(), wanted)
    assert set(placements(state).values()) == {Placement.HOST}
    with pytest.raises(OSError, match="disk"), state.on_gpu(ALL):
        raise OSError("the disk is full")
    assert set(placements(state).values()) == {Placement.HOST}
    with state.on_gpu(Target.PARAMS):  # one, whose name is a text, and so iterable
        assert placements(state)[Target.PARAMS] is Placement.GPU
    state.move("cuda", Target.PARAMS)
    with state.on_gpu(ALL):
        pass
    assert placements(state) == {Target.PARAMS: Placement.GPU, Target.OPTIMIZER_STATE: Placement.HOST}


def test_what_leaves_for_another_process_is_not_in_a_range(adopted):
    job, state = adopted()
    weight = next(job.model.parameters())
    copy, other = state.outside_ranges(weight[1:]), torch.ones(3)
    assert torch.equal(copy, weight[1:])
    assert copy.untyped_storage().data_ptr() != weight.untyped_storage().data_ptr()
    assert state.outside_ranges(other) is other


def sum_of_opened(pipe: Connection) -> None:
    """Opens a tensor by CUDA IPC and sends its sum; runs in the second process."""
    while (question := pipe.recv()) is not None:
        rebuild, arguments = question
        tensor = rebuild(*arguments)
        pipe.send(float(tensor.sum()))
        del tensor


@pytest.mark.gpu
def test_another_process_opens_what_is_outside_of_ranges_and_torch_refuses_to_send_a_view_of_one():
    model = torch.nn.Linear(WIDTH, WIDTH, device="cuda")
    state = adopt(model, None)
    with pytest.raises(RuntimeError):
        reduce_tensor(model.weight.detach()[1:])
    sent = state.outside_ranges(model.weight.detach()[1:])
    with process_that_answers(sum_of_opened) as ask:
        found = ask(reduce_tensor(sent))
    assert torch.equal(sent, model.weight[1:])
    assert found == float(sent.sum())
    state.close()


@pytest.mark.gpu
def test_plain_torch_steps_on_a_gpu_between_moves_are_bit_equal_to_none(monkeypatch):
    def losses(*, moves: bool) -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, device="cuda") for _ in range(3)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        state, found = adopt(model, optimizer) if moves else None, []
        for step in range(10):
            loss = model(torch.full((8, WIDTH), 0.1 * step, device="cuda")).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
            for device in ("cpu", "cuda") if state is not None else ():
                state.move_params(device)
                state.move_optimizer(device)
        if state is not None:
            state.close()
        return found

    wanted = losses(moves=False)
    delay_moves(monkeypatch, seconds=0.005)
    assert losses(moves=True) == wanted
    assert len(set(wanted)) == 10


def test_closing_leaves_others_in_a_given_arena_alone_and_finds_leaks_in_its_own():
    state = adopt(make_job().model, None)
    state.offloader.context.arena.allocate("forgotten", 100)
    with pytest.raises(LeakError, match=r"forgotten \(100 bytes\)"):
        state.close()
    assert PinnedArena.live_bytes() == 0
    first, second, plain = make_job(), make_job(), make_job()
    with PinnedArena() as arena:
        states = [adopt(job.model, job.optimizer, arena) for job in (first, second)]
        second.step(0)
        states[1].move("cpu", ALL)
        states[0].close()
        states[1].move("cuda", ALL)
        second.step(1)
        states[1].offloader.residency.require(Target.OPTIMIZER_STATE)
        plain.step(0)
        plain.step(1)
        assert_equal(second.everything(), plain.everything())
        states[1].close()
        assert arena.allocated_bytes == 0


def test_sharded_parameters_are_refused():
    with one_rank():
        mesh = init_device_mesh("cpu", (1,))
        model = torch.nn.Linear(4, 4)
        model.weight = torch.nn.Parameter(distribute_tensor(model.weight.detach(), mesh))
        with pytest.raises(ValueError, match="weight and 0 more parameters are DTensors"):
            adopt(model, None)


@pytest.mark.parametrize("device", ["meta", torch.device("xpu", 0)])
def test_an_unknown_place_is_refused(adopted, device):
    with pytest.raises(ValueError, match='it moves to "cpu" and back to "cuda"'):
        adopted()[1].move_params(device)


def test_adopting_needs_neither_ray_nor_megatron_nor_transformers_nor_recipes():
    check = (
        "import sys, nemo_offload_rl.adapters.adopt, nemo_offload_rl.adapters.megatron_core; "
        "print([name for name in sys.modules if name in ('ray', 'megatron', 'transformers', 'verl', 'nemo_rl') "
        "or name.startswith(('nemo_offload_rl.config', 'nemo_offload_rl.worker', 'nemo_offload_rl.mcore'))])"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
