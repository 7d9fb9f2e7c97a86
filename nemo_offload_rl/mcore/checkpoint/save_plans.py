"""Keeps the plan of a checkpoint, what goes into which file, for the next one of the same structure."""

from typing import Any, Protocol

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

from nemo_offload_rl.mcore.distributed.together import gather

_CACHED = ("cached_central_plan", "cached_local_plan", "cached_global_metadata", "validated_cache_reuse")
"""The attributes in which megatron-core's strategy keeps plans from one save to the next; none of them has data."""


class SavePlanning(Protocol):
    """Decides whether a checkpoint is written by the plan of the one before it, or by a new one."""

    def prepare(self, strategy: TorchDistSaveShardedStrategy, sharded: Any) -> None:
        """Called before a strategy plans what it saves; collective."""

    def keep(self, strategy: TorchDistSaveShardedStrategy) -> None:
        """Called once it has planned."""


class PlanEverySave:
    """Has every checkpoint planned from the state that it saves."""

    def prepare(self, strategy: TorchDistSaveShardedStrategy, sharded: Any) -> None:
        """Nothing is there to be reused."""

    def keep(self, strategy: TorchDistSaveShardedStrategy) -> None:
        """Keeps nothing."""


class ReusePlans:
    """Reuses the plan of the last checkpoint, as long as names, shapes, types and places are the same on every rank.

    megatron-core plans twice before it trusts a plan: the third checkpoint is the first that gathers none.
    """

    def __init__(self) -> None:
        self._structure: list[tuple[Any, ...]] | None = None
        self._kept: dict[str, Any] = {}

    def prepare(self, strategy: TorchDistSaveShardedStrategy, sharded: Any) -> None:
        """Gives a strategy the last plan, unless some rank has another structure now; collective."""
        structure = _structure_of(sharded)
        is_same = all(gather(structure == self._structure))
        self._structure = structure
        strategy.use_cached_ckpt_structure = True
        if is_same:
            for name, value in self._kept.items():
                setattr(strategy, name, value)

    def keep(self, strategy: TorchDistSaveShardedStrategy) -> None:
        """Keeps the plan of a strategy."""
        self._kept = {name: getattr(strategy, name) for name in _CACHED}


def _structure_of(sharded: Any) -> list[tuple[Any, ...]]:
    return [
        (entry.key, entry.dtype, entry.local_shape, entry.global_shape, entry.global_offset, entry.replica_id)
        if isinstance(entry, ShardedTensor)
        else (entry.key, entry.global_shape, entry.global_offset, entry.replica_id)
        for entry in nested_values(sharded)
        if isinstance(entry, (ShardedTensor, ShardedObject))
    ]
