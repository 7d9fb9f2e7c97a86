"""Makes uses of a model and its optimizer wait for moves that are under way, and raise while their state is away."""

import functools
from collections.abc import Callable, Iterator, Sequence
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


def guard(residency: Residency, model: Sequence[torch.nn.Module], optimizer: Any | None) -> list[Undo]:
    """Make forward passes, steps, `state_dict` and `load_state_dict` require the state that they use.

    A use in the wrong phase raises an error instead of an illegal memory access, zeros or NaN. Trainers save and load
    right after the call that brings state back, which does not wait for the copies: they would overwrite values that
    were loaded before they end.

    Args:
        residency: knows where the state is.
        model: the model's chunks.
        optimizer: a megatron-core or torch optimizer; None if nothing is trained.

    Returns:
        Functions that remove the guards again.
    """
    guards = list(_guard_model(residency, model))
    if optimizer is not None:
        guards += [*_guard_torch_optimizers(residency, optimizer), *_guard_methods(residency, optimizer)]
    return guards


def _guard_model(residency: Residency, model: Sequence[torch.nn.Module]) -> Iterator[Undo]:
    def before_forward(*_: object) -> None:
        residency.require(Target.PARAMS)

    def before_access(*_: object) -> None:
        residency.require_contents(Target.PARAMS)

    for chunk in model:
        yield chunk.register_forward_pre_hook(before_forward).remove
        for module in chunk.modules():  # megatron-core's wrappers call the `state_dict` of a module in them
            yield module.register_state_dict_pre_hook(before_access).remove
            yield module.register_load_state_dict_pre_hook(before_access).remove


def _guard_torch_optimizers(residency: Residency, optimizer: Any) -> Iterator[Undo]:
    def before_step(*_: object) -> None:
        residency.require(Target.OPTIMIZER_STATE)

    def before_access(*_: object) -> None:
        residency.require_contents(Target.OPTIMIZER_STATE)

    stepped = list(stepped_optimizers(optimizer))
    for one in stepped:
        yield one.register_step_pre_hook(before_step).remove
    for one in {id(one): one for one in [*stepped, *torch_optimizers(optimizer)]}.values():
        yield one.register_state_dict_pre_hook(before_access, prepend=True).remove
        yield one.register_load_state_dict_pre_hook(before_access, prepend=True).remove


def _guard_methods(residency: Residency, optimizer: Any) -> Iterator[Undo]:
    if isinstance(optimizer, torch.optim.Optimizer):
        return
    for part in [optimizer, *getattr(optimizer, "chained_optimizers", [])]:
        for name in _UNHOOKED_METHODS:
            if hasattr(part, name):
                setattr(part, name, _requiring(residency, getattr(part, name)))
                yield functools.partial(vars(part).pop, name, None)


def _requiring(residency: Residency, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        residency.require_contents(Target.PARAMS)  # an fp32 parameter is its own master
        residency.require_contents(Target.OPTIMIZER_STATE)
        return method(*args, **kwargs)

    return guarded
