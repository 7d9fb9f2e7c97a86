"""Reuses the plan of a checkpoint, which tensor goes into which file, for the next one of the same structure."""

from typing import Any, Protocol

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

from nemo_offload_rl.mcore.distributed import gather

_CACHED = ("cached_central_plan", "cached_local_plan", "cached_global_metadata", "validated_cache_reuse")
"""Attributes in which megatron-core's strategy keeps plans from one save to the next; none of them has tensor data."""


class SavePlanning(Protocol):
    """Decides whether a checkpoint is written by the plan of the one before it, or by a new one."""

    def prepare(self, strategy: TorchDistSaveShardedStrategy, sharded: Any) -> None:
        """Prepare a strategy that is about to plan a save; collective."""

    def keep(self, strategy: TorchDistSaveShardedStrategy) -> None:
        """Keep the plan of a strategy that has planned."""


class PlanEverySave:
    """Has every checkpoint planned from the state that it saves."""

    def prepare(self, strategy: TorchDistSaveShardedStrategy, sharded: Any) -> None:
        """Does nothing: no plan is reused."""

    def keep(self, strategy: TorchDistSaveShardedStrategy) -> None:
        """Does nothing: no plan is kept."""


class ReusePlans:
    """Reuses the last checkpoint's plan, as long as names, dtypes, shapes and offsets are the same on every rank.

    megatron-core plans twice before it reuses a plan: the third checkpoint is the first that gathers no plans.
    """

    def __init__(self) -> None:
        self._structure: list[tuple[Any, ...]] | None = None
        self._kept: dict[str, Any] = {}

    def prepare(self, strategy: TorchDistSaveShardedStrategy, sharded: Any) -> None:
        """Gives a strategy the last plan, unless the structure has changed on some rank; collective."""
        structure = _structure_of(sharded)
        is_same = all(gather(structure == self._structure))
        self._structure = structure
        strategy.use_cached_ckpt_structure = True
        if is_same:
            for name, value in self._kept.items():
                setattr(strategy, name, value)

    def keep(self, strategy: TorchDistSaveShardedStrategy) -> None:
        """Keeps the strategy's plan for the next checkpoint."""
        self._kept = {name: getattr(strategy, name) for name in _CACHED}


def _structure_of(sharded: Any) -> list[tuple[Any, ...]]:
    return [
        (entry.key, entry.dtype, entry.local_shape, entry.global_shape, entry.global_offset, entry.replica_id)
        if isinstance(entry, ShardedTensor)
        else (entry.key, entry.global_shape, entry.global_offset, entry.replica_id)
        for entry in nested_values(sharded)
        if isinstance(entry, (ShardedTensor, ShardedObject))
    ]
