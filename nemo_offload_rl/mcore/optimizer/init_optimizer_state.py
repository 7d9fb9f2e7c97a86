"""Makes the optimizer's state before its first step, so that its size is known when memory is planned and pinned.

Optimizers otherwise make it inside the first step, and the memory that a run needs shows at its second step, too late.
"""

from collections.abc import Iterator

import torch
from megatron.core.optimizer import MegatronOptimizer

from nemo_offload_rl.residency.optimizer_state import make_state, torch_optimizers


def torch_adams(optimizer: MegatronOptimizer) -> Iterator[torch.optim.Optimizer]:
    """Yield torch's Adam optimizers inside, which megatron-core uses without Transformer Engine and Apex."""
    return (inner for inner in torch_optimizers(optimizer) if isinstance(inner, (torch.optim.Adam, torch.optim.AdamW)))


@torch.no_grad()
def init_optimizer_state(optimizer: MegatronOptimizer) -> None:
    """Make the state that Adam or SGD would make in its first step, for every parameter that has none.

    This covers torch's and Transformer Engine's; zeros are what the momentum of SGD starts from, but with dampening.
    That, and the state of other optimizers, is still made when they step.
    megatron-core's own `init_state_fn` makes Adam's state without `step`, with which torch's Adam fails, calls
    FusedAdam in a way that Transformer Engine 2.20 does not support, and is None for SGD.
    """
    for inner in torch_optimizers(optimizer):
        for group in inner.param_groups:
            for parameter in group["params"]:
                if inner.state[parameter] or make_state(inner, group, parameter):
                    continue
                if group.get("momentum") and group.get("dampening") == 0:  # RMSprop has no dampening
                    inner.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
