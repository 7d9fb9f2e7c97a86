"""Tests creating optimizer state before the first step, for optimizers that contain others."""

from types import SimpleNamespace

import torch

from nemo_offload_rl.mcore.optimizer.init_optimizer_state import init_optimizer_state


def test_each_optimizer_inside_of_another_gets_its_state():
    parameters = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))]
    inside = [torch.optim.AdamW([parameters[0]]), torch.optim.AdamW([parameters[1]])]
    hybrid = SimpleNamespace(sub_optimizers=inside)  # as in megatron-core's HybridDeviceOptimizer
    init_optimizer_state(SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=hybrid)]))
    for parameter, adam in zip(parameters, inside, strict=True):
        assert set(adam.state[parameter]) == {"step", "exp_avg", "exp_avg_sq"}
        assert adam.state[parameter]["exp_avg"].dtype is parameter.dtype
