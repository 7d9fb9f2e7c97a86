"""Makes the state that an optimizer's first step would make, for whole parameters or for pieces of them."""

from collections.abc import Mapping
from typing import Any

import torch


@torch.no_grad()
def make_state(optimizer: Any, group: Mapping[str, Any], parameter: torch.Tensor) -> bool:
    """Make the optimizer state of a parameter that has none.

    For torch's Adam and AdamW it makes what their first step makes; for Transformer Engine's FusedAdam it calls that
    optimizer's own method.

    Args:
        optimizer: a torch optimizer.
        group: the parameter's group.
        parameter: its key in `optimizer.state`.

    Returns:
        Whether the optimizer is one of these; if not, nothing is made.
    """
    if isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
        on_device = group["capturable"] or group["fused"]
        names = ["exp_avg", "exp_avg_sq"] + (["max_exp_avg_sq"] if group["amsgrad"] else [])
        optimizer.state[parameter] = {
            "step": torch.zeros((), device=parameter.device if on_device else "cpu"),
            **{name: torch.zeros_like(parameter.detach()) for name in names},
        }
        return True
    if hasattr(optimizer, "initialize_state"):  # FusedAdam, with the argument that its own step gives
        remainders = optimizer.store_param_remainders and parameter.dtype == torch.bfloat16
        optimizer.initialize_state(parameter, remainders)
        return True
    return False
