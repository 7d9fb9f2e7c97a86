"""Tests streamed state of parameters without a dimension, whose moments look like counters."""

from types import SimpleNamespace

import pytest
import torch
from support.jobs import WIDTH, Job, adamw, assert_equal, run_steps
from torch import nn

from nemo_offload_rl.mcore.optimizer.init_optimizer_state import init_optimizer_state
from nemo_offload_rl.memory.pinned import PinnedArena
from nemo_offload_rl.residency.attach import attach
from nemo_offload_rl.residency.streamed.init_state import has_no_memory, placeholder
from nemo_offload_rl.residency.table import STREAMED_TABLE

pytestmark = pytest.mark.usefixtures("no_leak")


class Scale(nn.Module):
    """Multiplies by a learnt number."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.1))

    def forward(self, data):
        return data * self.scale


def make_scaled_job() -> Job:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Scale())
    return Job(model, adamw(model.parameters()), {})


@pytest.mark.parametrize("start", ["no state", "state of zeros", "state of a step"])
def test_numbers_are_those_of_resident_state(streaming, start):
    plain, job = make_scaled_job(), make_scaled_job()
    for one in (plain, job):
        if start == "state of zeros":
            init_optimizer_state(one.optimizer)
        elif start == "state of a step":
            one.step(5)
    offloader = streaming(job)
    assert run_steps(job, 3) == run_steps(plain, 3)
    assert torch.equal(job.model[1].scale, plain.model[1].scale)
    assert job.model[1].scale.item() != pytest.approx(1.1, abs=1e-6)
    with offloader.streamed_state_on_host():
        assert_equal(job.everything(), plain.everything())
        for key, value in plain.optimizer.state[plain.model[1].scale].items():
            assert torch.equal(job.optimizer.state[job.model[1].scale][key].view(()), value), key


@pytest.mark.parametrize(("has_memory", "wanted"), [(True, 1.001), (False, 1.0)])
def test_a_master_keeps_its_bits_and_a_placeholder_gets_those_of_the_model(streaming, has_memory, wanted):
    """bf16 cannot tell 1.001 from 1."""
    job = make_scaled_job()
    shard = job.model.to(torch.bfloat16)[1].scale
    shard.data.fill_(1.001)
    master = torch.tensor(1.001) if has_memory else placeholder(shard, torch.float32)
    assert has_no_memory(master) is not has_memory
    job.optimizer = SimpleNamespace(
        optimizer=adamw([master]), fp32_from_float16_groups=[[master]], float16_groups=[[shard]]
    )
    offloader = streaming(job)
    with offloader.streamed_state_on_host():
        assert torch.equal(master, torch.tensor(wanted))


def test_a_parameter_whose_state_has_no_tensors_is_refused():
    job = make_scaled_job()
    job.optimizer.state[job.model[0].bias] = {"step": torch.zeros(())}
    with pytest.raises(ValueError, match=rf"AdamW has no state tensors for a parameter of shape \[{WIDTH}\]"):
        attach([job.model], job.optimizer, PinnedArena(), table=STREAMED_TABLE)
