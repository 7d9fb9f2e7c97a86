"""Writes a checkpoint while training goes on: its state is taken at once, a thread writes the files."""

import logging
import threading
import time
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing

from nemo_offload_rl.mcore.build import TrainingState
from nemo_offload_rl.mcore.checkpoint.checkpoint import METADATA, finish_files, readable_state, require_optimizer
from nemo_offload_rl.mcore.checkpoint.checkpoint_writer import HashingSaveStrategy
from nemo_offload_rl.mcore.checkpoint.host_snapshot import Bucket, HostSnapshot
from nemo_offload_rl.mcore.checkpoint.save_plans import SavePlanning
from nemo_offload_rl.mcore.distributed.parallel import ParallelSizes
from nemo_offload_rl.memory.pinned import HostMemoryError
from nemo_offload_rl.storage.checksum import FileSum

logger = logging.getLogger(__name__)


class BackgroundSave:
    """Writes this rank's checkpoint files in a thread while training goes on; made by `start_save`.

    Args:
        request: megatron-core's save request, with its plan made.
        buckets: of this rank's files, with tensors whose contents stay until `wait` has returned.
        finish: writes and hashes what is left once all ranks have written; collective.

    Attributes:
        wait: waits until this rank reads no state any more, and holds none; what has gone wrong is for `finish` to say.
    """

    def __init__(self, request: Any, buckets: Sequence[Bucket], finish: Callable[[Any], dict[str, FileSum]]) -> None:
        self._request = request
        self._buckets = buckets
        self._finish = finish
        self._seconds = 0.0
        self._thread = threading.Thread(target=self._write, name="checkpoint-writer", daemon=True)
        self._thread.start()
        self.wait: Callable[[], None] = self._thread.join

    @property
    def is_written(self) -> bool:
        """Whether this rank has written all of its files, or has given up."""
        return not self._thread.is_alive()

    def finish(self) -> dict[str, FileSum]:
        """Wait for the files and complete the checkpoint; collective.

        Returns:
            What all files of the folder are, by name, relative to it.

        Raises:
            DiskFullError, OSError: as `checkpoint.save`.
        """
        self.wait()
        request, self._request = self._request, None
        logger.info("the checkpoint's files were written in %.1f s beside the run", self._seconds)
        return self._finish(request)

    def _write(self) -> None:
        start = time.perf_counter()
        try:
            if self._request.async_fn is not None:
                rank, _, results = self._request.async_fn_args
                self._request.async_fn(rank, self._buckets, results)
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
) -> BackgroundSave:
    """Take the training state of now, and begin to write it; collective over all ranks.

    A rank whose host has no room for the snapshot writes its files before it returns, with a warning.

    Args:
        state: as the others, see `checkpoint.save`.
        folder: likewise.
        sizes: likewise.
        with_optimizer: likewise.
        read: likewise.
        plans: likewise.
        snapshot: has memory for what is copied.
        lent: addresses of what `read` gives that stays as it is until `BackgroundSave.wait` has returned; filled by
            `read`.

    Raises:
        ValueError, DiskFullError, OSError: as `checkpoint.save`; nothing is under way.
    """
    require_optimizer(state, folder, with_optimizer=with_optimizer)
    strategy = HashingSaveStrategy(folder, plans)
    strategy.make_folder()
    sharded = readable_state(state, with_optimizer=with_optimizer, read=read)
    request = dist_checkpointing.save(
        sharded, str(folder), strategy, async_sharded_save=True, async_strategy="mcore", content_metadata=METADATA
    )
    buckets = [] if request.async_fn is None else request.async_fn_args[1]
    is_copied = True
    try:
        buckets = snapshot.take(buckets, lent)
    except HostMemoryError as error:
        logger.warning("the checkpoint in %s is written before the run goes on: %s", folder, str(error))
        is_copied = False
        buckets = buckets if request.preload_fn is None else request.preload_fn()

    def finish(request: Any) -> dict[str, FileSum]:
        failure = strategy.run(lambda: strategy.finalize(request))
        return finish_files(state, strategy, folder, sizes, failure, with_optimizer=with_optimizer)

    save = BackgroundSave(request._replace(async_fn_args=_without_tensors(request)), buckets, finish)
    if not is_copied:
        save.wait()
    return save


def _without_tensors(request: Any) -> tuple[Any, ...]:
    """Return the arguments of a request's write function, without the tensors that it was planned with."""
    return () if request.async_fn is None else (request.async_fn_args[0], None, request.async_fn_args[2])
