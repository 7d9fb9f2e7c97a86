"""Loads optimizer state: keeps the recipe's hyperparameters, and converts masters that are saved in another format.

Loads masters that a checkpoint holds in another format than this run's optimizer. Of a bf16 parameter's float32 master,
Transformer Engine's precision-aware Adam keeps only the 16 bits that the parameter lacks, and megatron-core saves
those; every other optimizer keeps and saves whole masters.
"""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor
from torch.distributed.checkpoint.metadata import STORAGE_TYPES, TensorStorageMetadata

from nemo_offload_rl.mcore.distributed import gather
from nemo_offload_rl.memory.units import MIB

# Megatron-core also matches groups by their learning rates, so that it would find none after a change of the recipe.
_IDENTITY = ("wd_mult", "is_expert_parallel", "default_config")
_NOT_OF_RECIPE = ("params", "step", "lr", "weight_decay")  # the schedule sets the last two

_MEGATRON = "policy.megatron_cfg"
# Values of a saved schedule that megatron-core compares, and where the recipe has them.
_SCHEDULE = {
    "max_lr": f"{_MEGATRON}.optimizer.lr",
    "min_lr": f"{_MEGATRON}.optimizer.min_lr",
    "lr_warmup_steps": f"{_MEGATRON}.scheduler.lr_warmup_iters",
    "lr_decay_steps": f"{_MEGATRON}.scheduler.lr_decay_iters (null: the run's training steps)",
    "lr_decay_style": f"{_MEGATRON}.scheduler.lr_decay_style",
    "start_wd": f"{_MEGATRON}.scheduler.start_weight_decay",
    "end_wd": f"{_MEGATRON}.scheduler.end_weight_decay",
    "wd_incr_steps": "the run's number of training steps, over which weight decay changes,",
    "wd_incr_style": f"{_MEGATRON}.scheduler.weight_decay_incr_style",
}


def require_same_schedule(scheduler: OptimizerParamScheduler, saved: Mapping[str, Any], folder: Path) -> None:
    """Refuses a checkpoint of another schedule, which megatron-core does with an assertion that names no key.

    Args:
        scheduler: the schedule of the recipe.
        saved: that of the checkpoint.
        folder: the checkpoint's folder, for messages.

    Raises:
        ValueError: they differ, and the recipe does not override the checkpoint's.
    """
    current = scheduler.state_dict()
    others = [name for name in _SCHEDULE if name in saved and saved[name] != current[name]]
    if others and not scheduler.override_opt_param_scheduler:
        listed = ", ".join(f"{_SCHEDULE[name]} is {current[name]} (there {saved[name]})" for name in others)
        raise ValueError(
            f"Checkpoint {folder} cannot be resumed with another schedule, since "
            f"{_MEGATRON}.scheduler.override_opt_param_scheduler is false: {listed}; set that to true for the recipe's "
            "schedule, or the values as they were."
        )


def keep_hyperparameters(optimizer: MegatronOptimizer, loaded: dict[Any, Any], folder: Path) -> None:
    """Replaces the hyperparameters in an optimizer's loaded state by those of the optimizer, which are the recipe's.

    Args:
        optimizer: megatron-core's optimizer, before the state is loaded into it.
        loaded: its state as read from the checkpoint; changed in place.
        folder: the checkpoint's folder, for messages.

    Raises:
        ValueError: the recipe divides the parameters into other groups than the checkpoint's.
    """
    for current, saved in _groups_of_parts(optimizer, loaded):
        of_identity = {_identity(group): group for group in current}
        assert len(of_identity) == len(current), "two groups of parameters have the same identity"
        if of_identity.keys() != {_identity(group) for group in saved}:
            raise ValueError(
                f"Checkpoint {folder} cannot be resumed: its optimizer has other groups of parameters than this "
                "run's; set policy.megatron_cfg.optimizer.decoupled_lr (a number or null) as it was, or start a new "
                "run from an export (nemo-offload-rl export)."
            )
        for group in saved:
            values = of_identity[_identity(group)]
            group.update({name: value for name, value in values.items() if name not in _NOT_OF_RECIPE})


def _groups_of_parts(
    optimizer: MegatronOptimizer, loaded: dict[Any, Any]
) -> Iterator[tuple[list[dict[str, Any]], list[dict[str, Any]]]]:
    """Yields the current and the loaded parameter groups of each of megatron-core's chained optimizers."""
    parts = optimizer.chained_optimizers
    for index, part in enumerate(parts):
        if part.optimizer is not None:
            state = loaded if len(parts) == 1 else loaded[index]
            # FP32Optimizer saves torch's state itself; the others have it under "optimizer", beside their masters.
            yield part.optimizer.param_groups, state.get("optimizer", state)["param_groups"]


def _identity(group: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(group.get(key) for key in _IDENTITY)


_REMAINDERS = torch.int16
_PIECE = 16 * MIB  # elements that are converted at a time, which takes a few times their memory


def join_masters(params: Tensor, remainders: Tensor) -> Tensor:
    """Returns float32 [n] masters of bfloat16 [n] parameters and int16 [n] remainders, on the remainders' device."""
    masters = torch.empty(remainders.shape, dtype=torch.float32, device=remainders.device)
    for out, param, low in zip(*(one.split(_PIECE) for one in (masters, params, remainders)), strict=True):
        # A parameter is its master rounded to nearest: up, if the remainder is in its upper half (negative as int16).
        high = param.to(low.device).view(torch.int16).int() - (low < 0).int()
        out.view(torch.int32).copy_((high << 16) | (low.int() & 0xFFFF))
    return masters


def split_masters(masters: Tensor, params: Tensor) -> Tensor:
    """Returns int16 [n] remainders of float32 [n] masters, and rounds the masters to bfloat16 [n] `params`.

    Parameters are rounded as Transformer Engine does, with halves up, and remainders are relative to that; other
    optimizers round halves to even.
    """
    remainders = torch.empty(masters.shape, dtype=_REMAINDERS, device=params.device)
    for out, param, master in zip(*(one.split(_PIECE) for one in (remainders, params, masters)), strict=True):
        bits = master.to(out.device).view(torch.int32)
        out.copy_((bits << 16) >> 16)
        param.copy_(((bits >> 16) + (out < 0).int()).to(torch.int16).view(torch.bfloat16))
    return remainders


def read_as_saved(sharded: Any, saved: Mapping[str, STORAGE_TYPES]) -> bool:
    """Make masters in another format than this run's load as they were saved, into CPU memory.

    Args:
        sharded: the optimizer's sharded state to load into; entries of such masters get tensors of the saved dtype.
        saved: what the checkpoint holds, by name.

    Returns:
        Whether this rank has any.
    """
    has_other = False
    for entry in nested_values(sharded):
        if isinstance(entry, ShardedTensor) and entry.key.endswith(".param") and entry.data is not None:
            found = saved.get(entry.key)
            dtype = found.properties.dtype if isinstance(found, TensorStorageMetadata) else entry.dtype
            if {dtype, entry.dtype} == {_REMAINDERS, torch.float32}:
                entry.data, entry.dtype = torch.empty(entry.data.shape, dtype=dtype), dtype
                has_other = True
    return has_other


@contextlib.contextmanager
def converting(optimizer: MegatronOptimizer, has_other: bool) -> Iterator[None]:
    """Convert masters of another format while the optimizer's state is loaded inside; collective.

    The model's weights must have been loaded before.

    Args:
        optimizer: megatron-core's optimizer, whose state is loaded.
        has_other: what `read_as_saved` has returned on this rank.
    """
    parts = [part for part in optimizer.chained_optimizers if part.optimizer is not None] if has_other else []
    for part in parts:
        part._set_main_param_and_optimizer_states = _Converting(part)
    try:
        yield
    finally:
        for part in parts:
            del part._set_main_param_and_optimizer_states
    if any(gather(has_other)):
        chunks = {id(chunk): chunk for part in optimizer.chained_optimizers for chunk in part.model_chunks}
        with torch.no_grad():
            for chunk in chunks.values():  # conversion may have rounded parameters differently, on other ranks
                chunk.start_param_sync(force_sync=True)


class _Converting:
    """Replaces the distributed optimizer's method that sets a parameter's loaded state; converts the master first."""

    def __init__(self, part: Any) -> None:
        self._part = part
        self._take_over = part._set_main_param_and_optimizer_states

    @torch.no_grad()
    def __call__(self, model_param: Tensor, tensors: dict[str, Any]) -> None:
        loaded = tensors["param"]
        kept = self._part._get_main_param_and_optimizer_states(model_param)["param"].dtype
        if loaded.dtype is not kept:
            shard = self._part._get_model_param_range_map(model_param)["param"]
            param = model_param.detach().view(-1)[shard.start : shard.end]
            convert = join_masters(param, loaded) if kept is torch.float32 else split_masters(loaded, param)
            tensors = tensors | {"param": convert}
        self._take_over(model_param, tensors)
