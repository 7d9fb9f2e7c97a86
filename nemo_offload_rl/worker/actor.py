"""The Ray actor around one rank of a policy worker."""

import contextlib
import gc
import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import ray
from ray import cloudpickle

from nemo_offload_rl.data.batch import BatchedData
from nemo_offload_rl.metrics.timer import Recording
from nemo_offload_rl.placement.network import LOOPBACK, reserve_port
from nemo_offload_rl.placement.relay import Part
from nemo_offload_rl.placement.signals import ignore_ending_signals
from nemo_offload_rl.worker.rank_log import RankLog, Record, take_records
from nemo_offload_rl.worker.wire import WireBatch


class WorkerActor:
    """Builds a worker in its own process and calls functions with it."""

    def __init__(self) -> None:
        ignore_ending_signals()
        self._worker: Any = None
        self._recording: Recording | None = None
        RankLog().listen()

    def process(self) -> tuple[str, int]:
        """Returns this node's address and this process's id."""
        return ray.util.get_node_ip_address(), os.getpid()

    def rendezvous(self, port_range: tuple[int, int] | None, *, on_one_node: bool) -> tuple[str, int]:
        """Returns the address at which all ranks reach this node, and a port there, which stays reserved.

        Args:
            port_range: See `reserve_port`.
            on_one_node: Whether all ranks are on this node, so that its loopback address suffices.
        """
        address = LOOPBACK if on_one_node else ray.util.get_node_ip_address()
        self._reserved = reserve_port(address, port_range)
        return address, self._reserved.getsockname()[1]

    def import_worker(self, worker_cls: str) -> None:
        """Import what `build` will need, which takes up to 25 s; errors are left for `build` to raise."""
        module, _, name = worker_cls.partition(":")
        with contextlib.suppress(Exception):
            worker_class = getattr(importlib.import_module(module), name)
            if hasattr(worker_class, "import_packages"):  # a user's own worker class may lack it
                worker_class.import_packages()

    def build(
        self,
        worker_cls: str,
        rendezvous: tuple[str, int],
        arguments: Mapping[str, Any],
        beside: Callable[[], AbstractContextManager[None]],
    ) -> dict[str, int]:
        """Import and construct the worker; the caller ends this process if that fails.

        Args:
            worker_cls: "package.module:Class".
            rendezvous: Address and port where the ranks meet.
            arguments: Further keyword arguments of the worker.
            beside: Returns a context in which the worker is constructed.

        Returns:
            The worker's `parallel_ranks()`.
        """
        address, port = rendezvous
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = address, str(port)
        module, _, name = worker_cls.partition(":")
        worker_class = getattr(importlib.import_module(module), name)
        with beside():
            self._worker = worker_class(**arguments, master_addr=address, master_port=port)
        exempt_from_gc()
        return self._worker.parallel_ranks()

    def take_log(self) -> list[Record]:
        """Returns the records that this rank has logged since the last call."""
        return take_records()

    def start_profile(self, prefix: str | None, *, trace: bool, memory: bool, nvtx: bool) -> None:
        """Record this process, with a range for each verb; see `metrics.timer.Recording`. None records nothing."""
        if prefix is not None:
            self._recording = Recording(Path(prefix), trace=trace, memory=memory, nvtx=nvtx)

    def stop_profile(self) -> None:
        """Write what was recorded since `start_profile`, if anything was."""
        recording, self._recording = self._recording, None
        if recording is not None:
            recording.stop()

    def _range_of(self, function: Callable[..., Any]) -> AbstractContextManager[None]:
        return nullcontext() if self._recording is None else self._recording.range(verb_of(function))

    def call(self, pickled: bytes, shards: Sequence[WireBatch] | None, part: Part, *_: Any) -> list[Any]:
        """Call a function with the worker, once Ray has resolved the further arguments; later calls wait for it.

        Args:
            pickled: The function, by cloudpickle.
            shards: The parts of a batch that the relay's ranks have; of another rank's nothing is read.
            part: What is for this rank.

        Returns:
            The result, a batch as a `WireBatch`, in a list; an empty one if it is not wanted.
        """
        function = cloudpickle.loads(pickled)
        with self._range_of(function):
            result = function(self._worker, None if shards is None else shards[part.shard].unpack())
        if not part.wants_result:
            return []
        return [WireBatch.pack(result) if isinstance(result, BatchedData) else result]


def verb_of(call: Callable[..., Any]) -> str:
    """Returns the name of the method that a lambda of worker/group.py calls: the first name in it."""
    return call.__code__.co_names[0]


def exempt_from_gc() -> None:
    """Exempts all objects that are alive from later garbage collections of this process.

    A rank's imports and its model are 570,000 objects; a full collection that looks at them stopped a training step or
    a checkpoint for 0.33 s, and without them takes 9 ms. Only for a process that ends with its worker: cycles among
    the exempt objects are never freed.
    """
    gc.collect()
    gc.freeze()
