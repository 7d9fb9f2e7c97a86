"""Gives a resumed run the hyperparameters of its recipe while optimizer state is loaded, or refuses the checkpoint."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

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
