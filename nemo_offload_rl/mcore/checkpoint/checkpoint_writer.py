"""Writes a rank's part of a checkpoint by a plan that the next one reuses; all ranks fail together if one does.

megatron-core's strategy writes through torch's `FileSystemWriter`, whose hook (`transforms`) sees each byte.
"""

import gc
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedWriter
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint.api import CheckpointException

from nemo_offload_rl.mcore.distributed import gather, raise_together
from nemo_offload_rl.mcore.patches.torch_distributed import (
    leave_garbage_collector_alone,
    pass_results_in_process,
    wrap_finish,
)
from nemo_offload_rl.storage.disk import free_bytes, require_free
from nemo_offload_rl.storage.manifest import FileSum, HashingFile, RawFile, file_sum

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


# Besides the tensors' bytes, each entry has a header, and the folder has metadata and configs.
_ENTRY_HEADER_BYTES = 4096
_SMALL_FILES_BYTES = 1 << 20


@dataclass
class _Bucket:
    """Describes a file that this rank writes, one entry after the other."""

    num_entries: int
    num_bytes: int
    file: HashingFile | None = None


class _Entry:
    """Gives torch a stream to write one entry into; closing it leaves the file open."""

    def __init__(self, file: HashingFile, *, is_last: bool) -> None:
        self.write = file.write
        self.flush = file.flush
        self._file = file
        self._is_last = is_last

    def close(self) -> None:
        if self._is_last:
            self._file.sync()


class HashingSaveStrategy(TorchDistSaveShardedStrategy):
    """Saves as megatron-core's strategy does, and records each written file's checksum and the first disk error.

    Disk errors are not raised where they occur: `settle` raises them on every rank.

    Args:
        folder: the checkpoint's folder.
        plans: decides whether plans are reused.
    """

    def __init__(self, folder: Path, plans: SavePlanning) -> None:
        super().__init__()
        self._folder = folder
        self._plans = plans
        self._buckets: dict[str, _Bucket] = {}
        self._error: OSError | None = None
        self._has_saved = False

    # ---- called by megatron-core and torch

    def save(self, sharded_state_dict: Any, checkpoint_dir: Path) -> None:
        """Write this rank's part; collective."""
        super().save(sharded_state_dict, checkpoint_dir)
        self._has_saved = True

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Path, async_strategy: str = "mcore") -> Any:
        """Plan this rank's part without writing anything; collective."""
        pass_results_in_process()
        leave_garbage_collector_alone()
        self._plans.prepare(self, sharded_state_dict)
        request = super().async_save(sharded_state_dict, checkpoint_dir, async_strategy)
        self._plans.keep(self)
        return request

    def _get_save_and_finalize_callbacks(self, writer: Any, planned: Any, async_strategy: str) -> Any:
        """Check the free space and install the hashing; called after planning, before anything is written."""
        for path, _, (raw, tensors) in writer.write_buckets:
            num_bytes = sum(data.getbuffer().nbytes for _, data in raw) + sum(data.nbytes for _, data in tensors)
            self._buckets[str(path)] = _Bucket(len(raw) + len(tensors), num_bytes)
        self._require_space()
        writer.transforms = self
        wrap_finish(writer, self.keeping_errors)
        return super()._get_save_and_finalize_callbacks(writer, planned, async_strategy)

    def _require_space(self) -> None:
        needed = sum(bucket.num_bytes + bucket.num_entries * _ENTRY_HEADER_BYTES for bucket in self._buckets.values())
        every_rank = gather((needed, free_bytes(self._folder)))
        known = [free for _, free in every_rank if free is not None]
        total = sum(needed for needed, _ in every_rank) + _SMALL_FILES_BYTES
        require_free(self._folder, total, min(known, default=None))

    def transform_save_stream(self, write_item: Any, stream: BufferedWriter) -> tuple[_Entry, list[str]]:
        """Return the stream that an entry is written into, and the transforms to undo when it is read: none."""
        bucket = self._buckets[str(stream.name)]
        if bucket.file is None:
            bucket.file = HashingFile(cast(RawFile, stream.raw))
        bucket.num_entries -= 1
        return _Entry(bucket.file, is_last=bucket.num_entries == 0), []

    # ---- called by us

    def finalize(self, request: Any) -> None:
        """Complete a save after the request's write function has written this rank's part; collective."""
        gather_results, *others = request.finalize_fns
        gather_results()
        self._has_saved = True
        for finalize in others:
            finalize()

    def keeping_errors(self, write: Callable[[], None]) -> None:
        """Run a function that writes files on this rank only; `settle` raises a disk error of it."""
        try:
            write()
        except OSError as error:
            self._error = self._error or error

    def make_folder(self) -> None:
        """Make the folder on rank 0; collective.

        Raises:
            OSError, DiskFullError: see `settle`.
        """
        if torch.distributed.get_rank() == 0:
            self.keeping_errors(lambda: self._folder.mkdir(parents=True, exist_ok=True))
        self.settle([], None)

    def run(self, save: Callable[[], None]) -> CheckpointException | None:
        """Run megatron-core's save with this strategy.

        Returns:
            The exception that torch has raised on every rank after an error on some; None if torch saw no error.
        """
        try:
            save()
        except CheckpointException as error:
            return error
        except OSError as error:
            if not self._has_saved:
                raise
            # Only rank 0 has one more file to write, metadata.json; the others wait for it in this barrier.
            self._error = self._error or error
            torch.distributed.barrier()
        return None

    def settle(self, small_files: Sequence[Path], failure: CheckpointException | None) -> dict[str, FileSum]:
        """Exchange all ranks' errors and checksums, and raise one rank's error on all of them; collective.

        Args:
            small_files: other files that this rank has written, which are read to hash them.
            failure: what `run` has returned.

        Returns:
            Size and checksum of every file of the folder, by path relative to it.

        Raises:
            DiskFullError: on every rank, if one had no space.
            OSError: on every rank, if one had another disk error.
            CheckpointException: `failure`, if no rank had a disk error.
        """
        rank = torch.distributed.get_rank()
        files = {path: bucket.file for path, bucket in self._buckets.items() if bucket.file is not None}
        errors = [self._error, *(file.error for file in files.values())]
        error = next((error for error in errors if error is not None), None)
        if error is not None or failure is not None:
            _forget_tensors(errors)
        sums: dict[str, FileSum] = {}
        if error is None and failure is None:
            sums = {_name(Path(path), self._folder): file.sum(rank) for path, file in files.items()}
            sums |= {_name(path, self._folder): file_sum(path, rank) for path in small_files}
        needed = sum(bucket.num_bytes for bucket in self._buckets.values())
        every_rank = gather(_Outcome(sums, error, needed))
        raise_together(
            [outcome.error for outcome in every_rank], self._folder, sum(outcome.needed for outcome in every_rank)
        )
        if failure is not None:
            raise failure
        return {name: found for outcome in every_rank for name, found in outcome.sums.items()}


@dataclass(frozen=True)
class _Outcome:
    """Holds a rank's result, as the other ranks receive it."""

    sums: Mapping[str, FileSum]
    error: OSError | None
    needed: int


def _forget_tensors(errors: Sequence[BaseException | None]) -> None:
    """Frees the tensors that were being written: tracebacks of errors, also megatron-core's, hold them in cycles."""
    for error in errors:
        if error is not None:
            error.__traceback__ = None
    gc.collect()


def _name(path: Path, folder: Path) -> str:
    return Path(os.path.relpath(path, folder)).as_posix()
