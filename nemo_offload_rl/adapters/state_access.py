"""Has whatever saves or loads optimizer state wait until it is on the GPU, and refuse while it is away."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from nemo_offload_rl.residency.optimizer_state import stepped_optimizers, torch_optimizers
from nemo_offload_rl.residency.residency import Residency
from nemo_offload_rl.residency.table import Target

Undo = Callable[[], None]

_PAST_TORCH = (
    "save_parameter_state",
    "load_parameter_state",
    "get_parameter_state_dp_zero",
    "load_parameter_state_from_dp_zero",
    "reload_model_params",
)
"""Methods of megatron-core's optimizers that read or write masters and moments past the torch optimizers inside."""


def guard_optimizer(residency: Residency, optimizer: Any | None) -> list[Undo]:
    """Have an optimizer's methods that save and load ask for its state, as its steps do.

    Trainers save and load right behind their call that brings state back, which does not wait; what is loaded before
    the state has come would be overwritten by it.

    Args:
        residency: knows where the state is.
        optimizer: megatron-core's, or a torch optimizer; None if nothing is trained.

    Returns:
        What takes the guards off again.
    """
    if optimizer is None:
        return []
    return [*_guard_state_dicts(residency, optimizer), *_guard_methods(residency, optimizer)]


def _guard_state_dicts(residency: Residency, optimizer: Any) -> Iterator[Undo]:
    def require(*_: object) -> None:
        residency.require(Target.OPTIMIZER_STATE)

    inner = [*stepped_optimizers(optimizer), *torch_optimizers(optimizer)]
    for one in {id(one): one for one in inner}.values():
        yield one.register_state_dict_pre_hook(require, prepend=True).remove
        yield one.register_load_state_dict_pre_hook(require, prepend=True).remove


def _guard_methods(residency: Residency, optimizer: Any) -> Iterator[Undo]:
    if isinstance(optimizer, torch.optim.Optimizer):
        return
    for part in [optimizer, *getattr(optimizer, "chained_optimizers", [])]:
        for name in _PAST_TORCH:
            if hasattr(part, name):
                setattr(part, name, _requiring(residency, getattr(part, name)))
                yield functools.partial(delattr, part, name)


def _requiring(residency: Residency, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        residency.require(Target.PARAMS)  # the masters of fp32 parameters are these themselves
        residency.require(Target.OPTIMIZER_STATE)
        return method(*args, **kwargs)

    return guarded
