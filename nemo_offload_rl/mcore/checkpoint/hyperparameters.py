"""Keeps a resumed run's own hyperparameters while its optimizer state is loaded."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron.core.optimizer import MegatronOptimizer

# Megatron-core also matches groups by their learning rates, so that it would find none after a change of the recipe.
_IDENTITY = ("wd_mult", "is_expert_parallel", "default_config")
_NOT_OF_RECIPE = ("params", "step", "lr", "weight_decay")  # the schedule sets the last two


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
