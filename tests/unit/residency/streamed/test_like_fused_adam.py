"""Tests streamed state of an optimizer that works like Transformer Engine's precision-aware FusedAdam, without a GPU.

Masters are the model's bf16 parameters plus 16 bits each, gradients are `decoupled_grad`, and groups count steps.
"""

from typing import Any

import pytest
import torch
from support.jobs import visit
from support.ranges import small_chunks
from torch import nn

from nemo_offload_rl.memory.pinned import PinnedArena
from nemo_offload_rl.residency.attach import Offloader, attach
from nemo_offload_rl.residency.context import Options
from nemo_offload_rl.residency.table import STREAMED_TABLE, Phase, Target

pytestmark = pytest.mark.usefixtures("no_leak", "late_copies")


class RemainderAdam(torch.optim.Optimizer):
    """Implements AdamW for bf16 parameters."""

    def __init__(self, params, *, store_param_remainders, exp_avg_dtype=torch.float32, capturable=False) -> None:
        super().__init__(params, {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1})
        self.capturable = capturable
        if capturable:
            for group in self.param_groups:
                group["lr"] = torch.tensor(group["lr"])
        self.store_param_remainders = store_param_remainders
        self.name_to_dtype_map = {"exp_avg": exp_avg_dtype, "exp_avg_sq": torch.float32, "master_param": torch.float32}

    def initialize_state(self, param: torch.Tensor, store_param_remainders: bool) -> None:
        moments = {name: torch.zeros_like(param, dtype=torch.float32) for name in ("exp_avg", "exp_avg_sq")}
        master = torch.zeros_like(param, dtype=torch.int16) if store_param_remainders else param.detach().float()
        self.state[param] = {**moments, "master_param": master}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if not group["params"]:
                continue
            one = torch.tensor([1], dtype=torch.int) if self.capturable else 1
            if "step" in group:
                group["step"] += one  # in place, if capturable
            else:
                group["step"] = one
            for param in group["params"]:
                if not self.state[param]:
                    self.initialize_state(param, self.store_param_remainders)
                self._update(group, param, self.state[param])

    def _update(self, group: dict[str, Any], param: torch.Tensor, state: dict[str, torch.Tensor]) -> None:
        grad, (beta1, beta2) = param.decoupled_grad.float(), group["betas"]
        stored = state["master_param"]
        high = param.view(torch.int16).to(torch.int32) << 16
        master = (high + stored).view(torch.float32) if self.store_param_remainders else stored
        state["exp_avg"].mul_(beta1).add_(grad, alpha=1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        mean = state["exp_avg"] / (1 - beta1 ** group["step"])
        scale = (state["exp_avg_sq"] / (1 - beta2 ** group["step"])).sqrt() + group["eps"]
        master = master - group["lr"] * (mean / scale + group["weight_decay"] * master)
        if not self.store_param_remainders:
            stored.copy_(master)
            param.copy_(master)
            return
        bits = master.view(torch.int32)
        high = (bits + 0x8000) >> 16
        param.view(torch.int16).copy_(high)
        stored.copy_(bits - (high << 16))


def make(*, store_param_remainders: bool = True, **keys: Any) -> tuple[nn.Module, RemainderAdam]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 170), nn.GELU(), nn.Linear(170, 300)).to(torch.bfloat16)
    weights, biases = [model[0].weight, model[2].weight], [model[0].bias, model[2].bias]
    groups = [{"params": weights}, {"params": biases, "weight_decay": 0.0, "lr": 1e-3}, {"params": []}]
    return model, RemainderAdam(groups, store_param_remainders=store_param_remainders, **keys)


def train(model: nn.Module, optimizer: RemainderAdam, steps: range, offloader: Offloader | None = None) -> list[float]:
    losses = []
    for step in steps:
        data = torch.randn(8, 300, generator=torch.Generator().manual_seed(step)).to(torch.bfloat16)
        loss = (model(data) - data).float().pow(2).mean()
        loss.backward()
        for parameter in model.parameters():
            parameter.decoupled_grad, parameter.grad = parameter.grad, None
        optimizer.step()
        losses.append(loss.item())
        if offloader is not None:
            visit(offloader, Phase.REFIT, Phase.GENERATE, Phase.TRAIN)
    return losses


@pytest.mark.parametrize("capturable", [False, True], ids=["", "capturable"])
@pytest.mark.parametrize("store_param_remainders", [True, False], ids=["remainders", "whole masters"])
def test_numbers_are_those_of_resident_state(store_param_remainders, capturable):
    keys = {"store_param_remainders": store_param_remainders, "capturable": capturable}
    (plain, plain_optimizer), (model, optimizer) = make(**keys), make(**keys)
    wanted = train(plain, plain_optimizer, range(5))
    assert wanted[-1] < wanted[0]
    options = Options(stream_window_bytes=4 * 100_000, verify=True)
    offloader = attach([model], optimizer, PinnedArena(), table=STREAMED_TABLE, options=options, ranges=small_chunks)
    assert sum(step.num_chunks for step in offloader.targets[Target.OPTIMIZER_STATE].steps) > 8
    assert train(model, optimizer, range(1), offloader) == wanted[:1]
    counter = optimizer.param_groups[0]["step"]
    assert train(model, optimizer, range(1, 5), offloader) == wanted[1:]
    if capturable:
        assert optimizer.param_groups[0]["step"] is counter
    read = offloader.checkpoint_reader()
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        for key, value in plain_optimizer.state[one].items():
            assert torch.equal(read(optimizer.state[other][key]), value), key
    assert [group.get("step") for group in optimizer.param_groups] == [5, 5, None]
    offloader.close()


def test_moments_with_a_scale_for_the_whole_tensor_are_refused():
    model, optimizer = make(exp_avg_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"stores exp_avg in torch.bfloat16, with one scale for the whole tensor"):
        attach([model], optimizer, PinnedArena(), table=STREAMED_TABLE, ranges=small_chunks)
