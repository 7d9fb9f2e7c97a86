"""Makes the state that an optimizer's first step would make, for whole parameters or for pieces of them."""

from collections.abc import Mapping
from typing import Any

import torch


@torch.no_grad()
def make_state(optimizer: Any, group: Mapping[str, Any], parameter: torch.Tensor) -> bool:
    """Make the state of a parameter that has none.

    Of torch's Adam and AdamW, as their first step does, and of Transformer Engine's FusedAdam, by its own method.

    Args:
        optimizer: a torch optimizer.
        group: the parameter's.
        parameter: a key of its state.

    Returns:
        Whether this optimizer's state is known.
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
