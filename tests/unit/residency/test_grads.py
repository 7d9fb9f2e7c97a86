"""Tests the gradients and the guards of a real megatron-core model while its state moves."""

import gc

import pytest
import torch
from support.tiny_megatron import each_device, one_rank, tiny_megatron

from nemo_offload_rl.memory.pinned import HostMemoryError, PinnedArena
from nemo_offload_rl.residency.attach import attach
from nemo_offload_rl.residency.table import Phase, Placement, Target
from nemo_offload_rl.residency.target import NoRoomError


@pytest.fixture(autouse=True, params=each_device())
def rank():
    with one_rank():
        yield
    gc.collect()
    assert PinnedArena.live_bytes() == 0


def gradients(job) -> dict[str, torch.Tensor]:
    return {name: parameter.main_grad.clone() for name, parameter in job.model.named_parameters()}


def test_a_place_that_fails_leaves_gradients_as_they_are(monkeypatch):
    job, arena = tiny_megatron(), PinnedArena()
    offloader = attach([job.model], job.optimizer, arena)
    job.step(0)
    job.forward_backward(1)
    wanted = gradients(job)
    assert any(grad.any() for grad in wanted.values())

    def is_full(*_, **__):
        raise HostMemoryError("the host is full")

    monkeypatch.setattr(arena, "allocate", is_full)  # new moments find no host memory
    away = {Target.GRADS: Placement.DROPPED, Target.PARAMS: Placement.HOST, Target.OPTIMIZER_STATE: Placement.HOST}
    with pytest.raises(NoRoomError, match="the host is full"):
        offloader.residency.place(away)
    found = gradients(job)
    assert all(torch.equal(found[name], grad) for name, grad in wanted.items())
    assert {offloader.residency.where(target) for target in offloader.targets} == {Placement.GPU}
    offloader.close()
    arena.close()


def test_gradients_accumulated_in_fp32_are_dropped_too_and_change_no_number():
    patterns = {"param_name_patterns_for_fp32_local_accumulation": ("*.linear_fc1.weight",)}
    plain = tiny_megatron(**patterns)
    wanted = [plain.step(seed) for seed in range(3)]
    assert wanted != [tiny_megatron().step(seed) for seed in range(3)]
    job, arena = tiny_megatron(**patterns), PinnedArena()
    (buffer,) = job.model.buffers
    assert len(buffer.extra_main_grads) == 2
    nbytes = buffer.grad_data.nbytes + sum(grad.nbytes for grad in buffer.extra_main_grads)
    offloader = attach([job.model], job.optimizer, arena)
    grads = offloader.targets[Target.GRADS]
    assert nbytes <= grads.nbytes < nbytes + 3 * 512  # each begins at a multiple of 512
    assert all(grads.flat_buffer.holds(grad) for grad in buffer.extra_main_grads)
    found = []
    for seed in range(3):
        found.append(job.step(seed))
        offloader.residency.enter(Phase.GENERATE)
        assert offloader.mapped_bytes == 0
        offloader.residency.enter(Phase.TRAIN)
    assert found == wanted
    offloader.close()
    arena.close()
