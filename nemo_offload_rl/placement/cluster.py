"""The Ray cluster of a run, and which part of it each rank gets."""

import contextlib
import itertools
import logging
import os
import shlex
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil
import ray
import torch
from ray._common.utils import get_default_ray_temp_dir
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from nemo_offload_rl.memory.units import GIB
from nemo_offload_rl.placement.reaper import Reaper
from nemo_offload_rl.placement.signals import ENDING_SIGNALS, ending_signals_blocked

logger = logging.getLogger(__name__)


# The shares of a rank's bundle that its policy worker and an actor of the colocated generation engine take.
WORKER_SHARE = ENGINE_SHARE = 0.5

# What a rank's bundle asks of Ray's books where there is no GPU, so that any number of ranks fits on a small machine.
_CPUS_PER_RANK_WITHOUT_GPU = 0.02
_OBJECT_STORE_BYTES_WITHOUT_GPU = 1 * GIB
_MIN_SHARED_MEMORY_BYTES = 256 << 20
_PLACEMENT_TIMEOUT_S = 60
_EXIT_TIMEOUT_S = 15


class Cluster:
    """A running Ray cluster with one bundle of resources a rank; a context manager that leaves no process behind.

    Joins the cluster that RAY_ADDRESS names, or one that this process has already started; otherwise starts Ray on this
    machine, listening on the loopback address.

    Attributes:
        world_size: Number of ranks, `num_nodes` x `gpus_per_node`.
        has_gpus: Whether each rank has a GPU of its own; without, ranks are processes on the CPU.
        ranks_per_node: Ranks of each node.
        master_port_range: First and last port that ranks may meet at; None for any free one.
        threads_per_rank: CPU threads that each rank may use when all ranks compute at once.
        threads_per_node: CPU threads that one process may use while the others of its node wait.
        logs_folder: Where Ray's processes write what they print; None where Ray was not started here.
        keep_logs: Whether that folder stays when Ray ends here; it does after an error in the `with` block, too.
    """

    def __init__(
        self,
        *,
        num_nodes: int,
        gpus_per_node: int,
        master_port_range: tuple[int, int] | None = None,
        log_to_driver: bool = False,
    ) -> None:
        """Start or join Ray and reserve the bundles.

        Args:
            num_nodes: Nodes to spread the ranks over.
            gpus_per_node: Ranks of each node; each gets a GPU where the cluster has any.
            master_port_range: First and last port that ranks may meet at; None for any free one.
            log_to_driver: Whether what the ranks print appears in this process, too.

        Raises:
            ValueError: If the cluster has fewer GPUs or nodes than asked for. Where Ray is not running yet, this
                machine's GPUs are counted before anything starts.
        """
        self.world_size = num_nodes * gpus_per_node
        self.ranks_per_node = gpus_per_node
        self.master_port_range = master_port_range
        self._groups: list[PlacementGroup] = []
        self._reaper: Reaper | None = None
        self.logs_folder: Path | None = None
        self.keep_logs = False
        self._must_stop_ray = not ray.is_initialized()
        try:
            if self._must_stop_ray:
                self._start_ray(num_nodes, gpus_per_node, log_to_driver)
            nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            num_gpus = int(sum(resources.get("GPU", 0) for resources in nodes))
            _require_gpus(num_gpus, num_nodes, gpus_per_node, "the Ray cluster")
            self.has_gpus = num_gpus > 0
            self.threads_per_node = max(1, int(min(resources.get("CPU", 1) for resources in nodes)))
            self.threads_per_rank = max(1, self.threads_per_node * len(nodes) // self.world_size)
            self._reserve(num_nodes)
        except BaseException as error:  # a signal that came while Ray started is raised once it has
            self.keep_logs = isinstance(error, Exception)
            self.shutdown()
            raise

    @property
    def num_nodes(self) -> int:
        """Nodes that the ranks are spread over."""
        return self.world_size // self.ranks_per_node

    def ranks_by_engine(self, bundles_per_engine: int) -> list[tuple[int, ...]]:
        """Returns for each generation engine the ranks whose bundles it shares, all of one node.

        Args:
            bundles_per_engine: Bundles (GPUs) that an engine spans.

        Raises:
            ValueError: If a node's bundles cannot be shared out so.
        """
        if self.ranks_per_node % bundles_per_engine:
            raise ValueError(
                f"An engine of policy.generation spans {bundles_per_engine} GPUs, which does not divide "
                f"cluster.gpus_per_node {self.ranks_per_node}; an engine is on one node: change one of the two."
            )
        return list(itertools.batched(range(self.world_size), bundles_per_engine))

    def actor_options(self, rank: int, share: float) -> dict[str, Any]:
        """Options of a Ray actor that takes a share of a rank's bundle.

        Args:
            rank: 0 .. world_size - 1; ranks of one node are consecutive.
            share: Part of the bundle, in (0, 1].
        """
        node, bundle = divmod(rank, self.ranks_per_node)
        return {
            "num_cpus": share * (1 if self.has_gpus else _CPUS_PER_RANK_WITHOUT_GPU),
            "num_gpus": share if self.has_gpus else 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._groups[node], placement_group_bundle_index=bundle
            ),
        }

    def stop(self, actors: Sequence[Any], process_refs: Sequence[Any]) -> None:
        """Kill actors and wait until those of this node are gone.

        Args:
            actors: Handles; already dead ones do no harm.
            process_refs: References to (node address, process id) of each, so far as they are known.
        """
        known, _ = ray.wait(list(process_refs), num_returns=len(process_refs), timeout=0)
        processes = []
        for ref in known:
            with contextlib.suppress(RayError, psutil.NoSuchProcess):  # it never came up, or is gone already
                address, pid = ray.get(ref)
                if address == ray.util.get_node_ip_address():
                    processes.append(psutil.Process(pid))
        for actor in actors:
            ray.kill(actor)
        _, alive = psutil.wait_procs(processes, timeout=_EXIT_TIMEOUT_S)
        for process in alive:
            logger.warning("Process %d of an actor did not end within %d s.", process.pid, _EXIT_TIMEOUT_S)

    def shutdown(self) -> None:
        """Give the bundles back; end Ray, and wait for all of its processes, where this object started it."""
        if self._must_stop_ray and ray.is_initialized():
            for group in self._groups:
                remove_placement_group(group)
            _disconnect_and_kill()
        self._groups = []
        if self._reaper is not None:
            self._reaper.finish(keep_logs=self.keep_logs)
            self._reaper = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.keep_logs |= isinstance(error, Exception)
        self.shutdown()

    def _start_ray(self, num_nodes: int, gpus_per_node: int, log_to_driver: bool) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # sends nothing anywhere
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # an actor without a GPU keeps its environment
        logging_options = {"log_to_driver": log_to_driver, "logging_level": logging.ERROR}
        if not starts_ray_here():
            with _handlers_kept():
                ray.init(**logging_options)
            return
        num_gpus = torch.cuda.device_count()
        if num_gpus:
            _require_one_node(num_nodes)
        _require_gpus(num_gpus, num_nodes, gpus_per_node, "this machine")
        # Idle workers cannot become actors with an environment of their own.
        os.environ.setdefault("RAY_enable_worker_prestart", "0")
        os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
        with ending_signals_blocked(), _handlers_kept():
            self._reaper = Reaper(get_default_ray_temp_dir())
            context = ray.init(
                address="local",
                num_cpus=available_threads(),
                num_gpus=num_gpus,
                include_dashboard=False,
                # Ray 2.60 puts the interpreter's path into a shell command as it is, and so cannot start from a path
                # with a space in it.
                runtime_env={"py_executable": shlex.quote(sys.executable)},
                **_object_store_options(num_gpus > 0),
                **logging_options,
            )
        self.logs_folder = Path(context.address_info["session_dir"], "logs")

    def _reserve(self, num_nodes: int) -> None:
        bundle: dict[str, float] = {"GPU": 1, "CPU": 1} if self.has_gpus else {"CPU": _CPUS_PER_RANK_WITHOUT_GPU}
        for node in range(num_nodes):
            group = placement_group([dict(bundle) for _ in range(self.ranks_per_node)], strategy="STRICT_PACK")
            self._groups.append(group)
            if not group.wait(timeout_seconds=_PLACEMENT_TIMEOUT_S):
                raise ValueError(
                    f"The Ray cluster has no room for node {node} of {num_nodes}: {self.ranks_per_node} x {bundle} on "
                    f"one machine were not free within {_PLACEMENT_TIMEOUT_S} s, free in all are "
                    f"{ray.available_resources()}; stop what else runs there, or lower cluster.gpus_per_node or "
                    "cluster.num_nodes."
                )


def starts_ray_here() -> bool:
    """Whether a `Cluster` would start Ray on this machine, whose environment its actors then have."""
    return "RAY_ADDRESS" not in os.environ and not ray.is_initialized()


def available_threads() -> int:
    """CPU threads that this process may use: its affinity, or OMP_NUM_THREADS where that is set and lower."""
    cores = len(os.sched_getaffinity(0))
    limit = os.environ.get("OMP_NUM_THREADS", "")
    return min(cores, int(limit)) if limit.isdecimal() and int(limit) else cores


def _require_gpus(num_found: int, num_nodes: int, gpus_per_node: int, where: str) -> None:
    """No GPU at all is fine: the ranks then run on the CPU."""
    if 0 < num_found < num_nodes * gpus_per_node:
        raise ValueError(
            f"The recipe asks for {num_nodes * gpus_per_node} GPUs (cluster.num_nodes {num_nodes} x "
            f"cluster.gpus_per_node {gpus_per_node}), but {where} has {num_found}; lower them, or join machines to a "
            "Ray cluster and set RAY_ADDRESS."
        )


def _require_one_node(num_nodes: int) -> None:
    if num_nodes > 1:
        raise ValueError(
            f"The recipe asks for {num_nodes} nodes (cluster.num_nodes), but Ray would be started on this machine "
            "alone; start a Ray cluster and set RAY_ADDRESS, or set cluster.num_nodes to 1."
        )


def _object_store_options(has_gpus: bool) -> dict[str, Any]:
    """Ray's own size (30% of memory) with GPUs; else a modest one, in shared memory where there is enough of it."""
    if has_gpus:
        return {}
    free = shutil.disk_usage("/dev/shm").free
    if free < _MIN_SHARED_MEMORY_BYTES:
        folder = tempfile.gettempdir()
        logger.warning(
            "/dev/shm has only %d MiB free: Ray's object store goes to %s, which is slower.", free >> 20, folder
        )
        return {"object_store_memory": _OBJECT_STORE_BYTES_WITHOUT_GPU, "_plasma_directory": folder}
    return {"object_store_memory": min(_OBJECT_STORE_BYTES_WITHOUT_GPU, int(0.8 * free))}


@contextlib.contextmanager
def _handlers_kept() -> Iterator[None]:
    """Undo what is done inside to this process's signal handlers: Ray's own end it in the middle of what it does."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Ray sets none then
        return
    handlers = {number: signal.getsignal(number) for number in ENDING_SIGNALS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if handler is not None:  # one that Python did not set, and cannot set again
                signal.signal(number, handler)


def _disconnect_and_kill() -> None:
    """Disconnect from Ray and kill its processes; ray.shutdown() alone would wait a second for each to heed SIGTERM."""
    node = ray._private.worker._global_node
    if node is not None:
        kill_all_processes = node.kill_all_processes
        node.kill_all_processes = lambda **options: kill_all_processes(**options | {"allow_graceful": False})
    ray.shutdown()
