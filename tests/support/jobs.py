"""Provides models in training for the offloader to move, without megatron-core."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from nemo_offload_rl.residency.attach import Offloader
from nemo_offload_rl.residency.optimizer_state import state_tensors
from nemo_offload_rl.residency.table import Phase, Target

CPU = torch.device("cpu")
CYCLE = (Phase.REFIT, Phase.GENERATE, Phase.LOGPROB, Phase.TRAIN)
WIDTH = 512  # a weight of 1 MiB: chunks of 2 MiB hold several tensors


@dataclass
class Job:
    model: nn.Module
    optimizer: torch.optim.Optimizer
    masters: dict[str, torch.Tensor]
    """fp32 copies of the model's parameters, by name; empty where the optimizer steps the parameters themselves."""

    def step(self, seed: int) -> float:
        """Runs forward, backward and step on a batch that the seed selects; returns the loss."""
        generator = torch.Generator().manual_seed(seed)
        dtype = next(self.model.parameters()).dtype
        data = torch.randn(8, WIDTH, generator=generator).to(dtype)
        loss = self.model(data).float().pow(2).mean()
        loss.backward()
        for name, parameter in self.model.named_parameters():
            if self.masters:
                self.masters[name].grad = parameter.grad.float()
        self.optimizer.step()
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if self.masters:
                    parameter.copy_(self.masters[name])
                parameter.grad = None
        return loss.item()

    def everything(self) -> dict[str, torch.Tensor]:
        tensors = dict(state_tensors(self.optimizer, CPU)) | self.model.state_dict()
        return {name: tensor.detach().clone() for name, tensor in tensors.items()}

    def places(self) -> dict[str, tuple[int, int]]:
        tensors = dict(state_tensors(self.optimizer, CPU)) | dict(self.model.named_parameters())
        return {name: (id(tensor), tensor.data_ptr()) for name, tensor in tensors.items()}


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)


def amsgrad(parameters):
    return torch.optim.Adam(parameters, lr=1e-3, amsgrad=True)


def make_job(make_optimizer: Callable = adamw, dtype: torch.dtype = torch.float32, num_layers: int = 3) -> Job:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(num_layers):
        layers += [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.GELU()]
    model = nn.Sequential(*layers).to(dtype)
    masters = {}
    if dtype is not torch.float32:
        masters = {name: parameter.detach().float() for name, parameter in model.named_parameters()}
    return Job(model, make_optimizer(masters.values() if masters else model.parameters()), masters)


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    different = [name for name, tensor in wanted.items() if not torch.equal(found[name], tensor)]
    assert not different, f"{len(different)} of {len(wanted)} differ: {different}"


def run_steps(job: Job, num_steps: int, offloader: Offloader | None = None) -> list[float]:
    losses = []
    for step in range(num_steps):
        losses.append(job.step(step))
        if offloader is not None:
            visit(offloader, *CYCLE)
    return losses


def visit(offloader: Offloader, *phases: Phase) -> None:
    for phase in phases:
        offloader.residency.enter(phase)


def enter_and_require(offloader: Offloader) -> None:
    offloader.residency.enter(Phase.TRAIN)
    offloader.residency.require(Target.OPTIMIZER_STATE)
