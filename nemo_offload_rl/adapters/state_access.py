"""Makes an optimizer's save and load methods wait until its state is on the GPU, and raise while it is on the host."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from nemo_offload_rl.residency.optimizer_state import stepped_optimizers, torch_optimizers
from nemo_offload_rl.residency.residency import Residency
from nemo_offload_rl.residency.table import Target

Undo = Callable[[], None]

_UNHOOKED_METHODS = (
    "save_parameter_state",
    "load_parameter_state",
    "get_parameter_state_dp_zero",
    "load_parameter_state_from_dp_zero",
    "reload_model_params",
)
"""Methods of megatron-core's optimizers that access masters and moments without running a torch optimizer's hooks."""


def guard_optimizer(residency: Residency, optimizer: Any | None) -> list[Undo]:
    """Make an optimizer's save and load methods require its state on the GPU, as its steps do.

    Trainers save and load right after the call that brings state back, which does not wait for the copies: they would
    overwrite values that were loaded before they end.

    Args:
        residency: knows where the state is.
        optimizer: a megatron-core or torch optimizer; None if nothing is trained.

    Returns:
        Functions that remove the guards again.
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
        for name in _UNHOOKED_METHODS:
            if hasattr(part, name):
                setattr(part, name, _requiring(residency, getattr(part, name)))
                yield functools.partial(delattr, part, name)


def _requiring(residency: Residency, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        residency.require(Target.PARAMS)  # an fp32 parameter is its own master
        residency.require(Target.OPTIMIZER_STATE)
        return method(*args, **kwargs)

    return guarded
