"""Writes a checkpoint while training goes on: copies the state to the host at once; a thread writes the files.

The state is copied while megatron-core plans, which takes 0.1 s with a model of 28 layers: planning reads no contents
of tensors. Training goes on once all copies have ended.
"""

import logging
import threading
import time
from collections.abc import Callable, Container, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import accumulate, batched
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedTensor,
    ShardedTensorFactory,
    apply_factories,
    is_main_replica,
)

from nemo_offload_rl.mcore.build import TrainingState
from nemo_offload_rl.mcore.checkpoint.checkpoint import (
    METADATA,
    finish_files,
    readable_state,
    require_optimizer,
    write_hf_config,
)
from nemo_offload_rl.mcore.checkpoint.checkpoint_writer import HashingSaveStrategy, SavePlanning
from nemo_offload_rl.mcore.distributed import ParallelSizes
from nemo_offload_rl.memory.pinned import HostMemoryError, HostSegment, PinnedArena, cut_at_locks
from nemo_offload_rl.memory.streams import CopyStream, Event, record_current_stream
from nemo_offload_rl.memory.units import round_up
from nemo_offload_rl.storage.manifest import FileSum

Copy = tuple[torch.Tensor, torch.Tensor]
"""Destination and source, uint8 tensors of equal length."""

_ALIGNMENT = 256
_TENSORS_AT_ONCE = 32
"""Tensors whose copies are queued together, while Python prepares the next: 20 ms for the 820 tensors of 28 layers."""


class HostSnapshot:
    """Copies tensors of a checkpoint into host memory, page-locked where there is a GPU; reuses it for the next one.

    Args:
        arena: allocates the memory, at the first snapshot and when one is larger than those before.
        device: the device of the state.
    """

    def __init__(self, arena: PinnedArena, device: torch.device) -> None:
        self._arena = arena
        self._device = device
        self._stream = CopyStream(device)
        self._segment: HostSegment | None = None
        self._helper = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint-snapshot")
        self._copying: list[Future[None]] = []

    def start(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Starts to copy tensors, after the work that is queued on the current stream.

        The tensors that the previous call returned must have been dropped, since their memory is used again.

        Args:
            tensors: tensors of the GPU or the host; nothing may change or free them before `wait` has returned.

        Returns:
            CPU tensors of the same dtypes and shapes, each the whole of its storage; `wait` waits for their contents.

        Raises:
            HostMemoryError: the host has no room for the copies.
        """
        assert not self._copying, "the copies before have not been waited for"
        sizes = [round_up(tensor.nbytes, _ALIGNMENT) for tensor in tensors]
        self._reserve(sum(sizes))
        ready = record_current_stream(self._device)
        offsets = list(accumulate(sizes, initial=0))[:-1]
        for some in batched(zip(tensors, offsets, strict=True), _TENSORS_AT_ONCE):
            pairs = [pair for tensor, offset in some for pair in self._pairs(tensor, offset)]
            if pairs:
                self._copying.append(self._helper.submit(copy_all, self._stream, pairs, ready))
        return [self._window(tensor, offset) for tensor, offset in zip(tensors, offsets, strict=True)]

    def wait(self) -> None:
        """Waits until all copies that `start` has queued have ended."""
        copying, self._copying = self._copying, []
        for queued in copying:
            queued.result()
        if copying:
            self._stream.mark().wait()

    def close(self) -> None:
        """Stops the helper thread, waits for its copies and releases the memory."""
        self._helper.shutdown(wait=True)
        self._stream.mark().wait()
        self._release()

    def _reserve(self, nbytes: int) -> None:
        if nbytes and (self._segment is None or self._segment.nbytes < nbytes):
            self._release()
            self._segment = self._arena.allocate("checkpoints", nbytes)

    def _release(self) -> None:
        if self._segment is not None:
            segment, self._segment = self._segment, None
            self._arena.release(segment)

    def _window(self, tensor: torch.Tensor, offset: int) -> torch.Tensor:
        if tensor.nbytes == 0:
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        assert self._segment is not None
        # With a storage of its own: torch.save writes the whole storage behind a view.
        return self._segment.window(offset, tensor.nbytes).view(tensor.dtype).view(tensor.shape)

    def _pairs(self, tensor: torch.Tensor, offset: int) -> list[Copy]:
        if tensor.nbytes == 0:
            return []
        assert self._segment is not None
        source = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        return [
            (self._segment.tensor[begin:end], source[begin - offset : end - offset])
            for begin, end in cut_at_locks(offset, tensor.nbytes)
        ]


def copy_all(stream: CopyStream, pairs: Sequence[Copy], ready: Event) -> None:
    """Queues copies on a stream, after an event.

    One call queues them all without the GIL: the planning thread would give the GIL back only every 5 ms, in which the
    link copies 250 MB.
    """
    stream.follow(ready)
    with torch.no_grad(), torch.cuda.stream(stream.stream):
        torch._foreach_copy_([to for to, _ in pairs], [source for _, source in pairs], non_blocking=True)


logger = logging.getLogger(__name__)

Bucket = tuple[Any, str, tuple[list[Any], list[tuple[Any, torch.Tensor]]]]
"""A file of a rank: its path, its name, and its contents: (item, bytes) and (item, tensor) pairs."""


class BackgroundSave:
    """Writes this rank's checkpoint files in a thread while training goes on; made by `start_save`.

    Args:
        request: megatron-core's save request, planned already.
        buckets: this rank's files, with tensors whose contents do not change until `wait` has returned.
        write_others: writes files that are not in the plan.
        finish: writes and hashes the remaining files once all ranks have written; collective.

    Attributes:
        wait: waits until this rank neither reads nor holds state any more; `finish` raises errors of the writing.
    """

    def __init__(
        self,
        request: Any,
        buckets: Sequence[Bucket],
        write_others: Callable[[], None],
        finish: Callable[[Any], dict[str, FileSum]],
    ) -> None:
        self._request = request
        self._buckets = buckets
        self._write_others = write_others
        self._finish = finish
        self._failure: Exception | None = None
        self._seconds = 0.0
        self._thread = threading.Thread(target=self._write, name="checkpoint-writer", daemon=True)
        self._thread.start()
        self.wait: Callable[[], None] = self._thread.join

    @property
    def is_written(self) -> bool:
        """Returns whether this rank has written all of its files, or has failed to."""
        return not self._thread.is_alive()

    def finish(self) -> dict[str, FileSum]:
        """Wait for the files and complete the checkpoint; collective.

        Returns:
            Size and checksum of every file of the folder, by path relative to it.

        Raises:
            DiskFullError, OSError: see `checkpoint.save`.
        """
        self.wait()
        if self._failure is not None:
            raise self._failure
        request, self._request = self._request, None
        logger.info("the checkpoint's files were written in %.1f s in the background", self._seconds)
        return self._finish(request)

    def _write(self) -> None:
        start = time.perf_counter()
        try:
            if self._request.async_fn is not None:
                rank, _, results = self._request.async_fn_args
                self._request.async_fn(rank, self._buckets, results)
            self._write_others()
        except Exception as error:  # noqa: BLE001  (`finish` raises it in the caller's thread)
            self._failure = error
        finally:
            self._buckets = ()
            self._seconds = time.perf_counter() - start


def start_save(
    state: TrainingState,
    folder: Path,
    sizes: ParallelSizes,
    *,
    with_optimizer: bool,
    read: Callable[[torch.Tensor], torch.Tensor],
    plans: SavePlanning,
    snapshot: HostSnapshot,
    lent: Container[int],
    wait_for_lent: Callable[[], None],
) -> BackgroundSave:
    """Snapshot the training state, and start to write it; collective over all ranks.

    A rank whose host has no room for the snapshot logs a warning and writes its files before it returns.

    Args:
        state: what to write.
        folder: made if missing; must hold nothing yet.
        sizes: written beside the state; see `checkpoint.save`.
        with_optimizer: also write optimizer, scheduler and random states.
        read: returns a readable tensor with the contents of one of the state's tensors.
        plans: decides whether the plan of the last save is reused.
        snapshot: allocates the memory for the copies.
        lent: addresses of tensors from `read` whose contents do not change until `BackgroundSave.wait` has returned;
            `read` adds them.
        wait_for_lent: waits until the contents of lent tensors, which may still be copied from the GPU, have arrived.

    Raises:
        ValueError, DiskFullError, OSError: see `checkpoint.save`; nothing is under way.
    """
    require_optimizer(state, folder, with_optimizer=with_optimizer)
    strategy = HashingSaveStrategy(folder, plans)
    strategy.make_folder()
    sharded = readable_state(state, with_optimizer=with_optimizer, read=read)
    if _is_read_by_planning(sharded, lent):
        wait_for_lent()
    apply_factories(sharded)
    try:
        stable = _start_copies(sharded, snapshot, lent, folder)
        request = dist_checkpointing.save(
            sharded, str(folder), strategy, async_sharded_save=True, async_strategy="mcore", content_metadata=METADATA
        )
    finally:
        snapshot.wait()
        wait_for_lent()
    buckets = _copy_buckets(request) if stable is None else _take_buckets(request, stable)

    def finish(request: Any) -> dict[str, FileSum]:
        failure = strategy.run(lambda: strategy.finalize(request))
        return finish_files(strategy, folder, sizes, failure, with_optimizer=with_optimizer)

    write_others = partial(write_hf_config, state, strategy, folder)
    save = BackgroundSave(request._replace(async_fn_args=_without_tensors(request)), buckets, write_others, finish)
    if stable is None:
        save.wait()
    return save


def _start_copies(sharded: Any, snapshot: HostSnapshot, lent: Container[int], folder: Path) -> Container[int] | None:
    """Replaces the tensors that this rank writes by copies of the snapshot, except those whose contents do not change.

    Returns:
        The addresses of the tensors in these entries now; None if the host has no room for the copies, and nothing was
        replaced.
    """
    written = [
        entry
        for entry in nested_values(sharded)
        if isinstance(entry, ShardedTensor) and entry.data is not None and is_main_replica(entry.replica_id)
    ]
    changing = [entry for entry in written if entry.data.data_ptr() not in lent or not _is_whole_storage(entry.data)]
    try:
        copies = snapshot.start([entry.data for entry in changing])
    except HostMemoryError as error:
        logger.warning(
            "the checkpoint in %s is written before training continues, not in the background: %s", folder, str(error)
        )
        return None
    for entry, copy in zip(changing, copies, strict=True):
        entry.data = copy
    return {entry.data.data_ptr() for entry in written}


def _is_read_by_planning(sharded: Any, lent: Container[int]) -> bool:
    """Returns whether planning reads contents of lent tensors: in a factory, or to copy a part of a storage."""
    return any(
        isinstance(entry, ShardedTensorFactory) or not _is_whole_storage(entry.data)
        for entry in nested_values(sharded)
        if isinstance(entry, (ShardedTensor, ShardedTensorFactory))
        and entry.data is not None
        and entry.data.data_ptr() in lent
    )


def _is_whole_storage(tensor: torch.Tensor) -> bool:
    """Returns whether megatron-core writes a CPU tensor as it is; it copies any other when it plans."""
    return tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes


def _take_buckets(request: Any, stable: Container[int]) -> list[Bucket]:
    """Take the buckets out of a request, whose tensors must all be at stable addresses."""
    buckets = _empty_buckets(request)
    tensors = (tensor for _, _, (_, pairs) in buckets for _, tensor in pairs if tensor.nbytes)
    assert all(tensor.data_ptr() in stable for tensor in tensors), (
        "megatron-core copied a tensor while it planned the save"
    )
    return buckets


def _copy_buckets(request: Any) -> list[Bucket]:
    """Take the buckets out of a request, with GPU tensors copied to host memory that torch allocates."""
    buckets = [] if request.preload_fn is None else request.preload_fn()
    _empty_buckets(request)
    return buckets


def _empty_buckets(request: Any) -> list[Bucket]:
    """Return a request's buckets and leave empty ones in it: megatron-core compares their number."""
    if request.async_fn is None:
        return []
    planned = request.async_fn_args[1]
    buckets = list(planned)
    planned[:] = [(path, name, ([], [])) for path, name, _ in buckets]
    return buckets


def _without_tensors(request: Any) -> tuple[Any, ...]:
    """Return the arguments of a request's write function, without the tensors that it was planned with."""
    return () if request.async_fn is None else (request.async_fn_args[0], None, request.async_fn_args[2])
