"""Starts or joins the Ray cluster of a run, and reserves resources for each rank."""

import contextlib
import itertools
import logging
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil
import ray
import torch
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from nemo_offload_rl.placement.local_ray import (
    GcsWatch,
    complete_environment,
    disconnect_and_kill,
    handlers_kept,
    join_ray,
    object_store_options,
    session_root,
)
from nemo_offload_rl.placement.nodes import (
    Node,
    NodeLostError,
    NodeWatch,
    choose_nodes,
    living_nodes,
    require_gpus,
    require_no_segments,
    require_one_node,
    that_answer,
    why_too_few,
)
from nemo_offload_rl.placement.reaper import Reaper
from nemo_offload_rl.placement.signals import ending_signals_blocked

logger = logging.getLogger(__name__)


# The share of a rank's bundle that its policy worker takes, and that an actor of the colocated generation engine takes.
WORKER_SHARE = ENGINE_SHARE = 0.5

# CPUs that a rank's bundle requests from Ray without GPUs, so low that any number of ranks fits on a small machine.
_CPUS_PER_RANK_WITHOUT_GPU = 0.02
_PLACEMENT_TIMEOUT_S = 60
_GCS_PATIENCE_S = 10.0
_GCS_RESTART_S = 50.0
# Ranks that end within this time are reported together: each look at all that are pending costs the driver time.
_TOGETHER_S = 0.05
_EXIT_TIMEOUT_S = 15
_ANSWER_TIMEOUT_S = 5.0
_LOOK_PERIOD_S = 0.5


class Cluster:
    """Reserves one resource bundle per rank in a Ray cluster; as a context manager it leaves no process behind.

    Bundles are numbered node by node. Rank N of the policy has bundle N; generation shares these bundles, or has the
    bundles after them to itself.

    Joins the cluster that RAY_ADDRESS names, or the Ray that this process is already connected to; otherwise starts Ray
    on this machine, listening on the loopback address.

    Attributes:
        world_size: Number of ranks, `num_nodes` x `gpus_per_node` less `num_engine_devices`.
        num_bundles: Number of bundles of policy and generation together.
        has_gpus: Whether each rank has a GPU of its own; otherwise ranks are processes on the CPU.
        ranks_per_node: Ranks of each node that has any.
        bundles_per_node: Bundles of each node, of policy and generation together.
        engines_are_apart: Whether generation has bundles of its own.
        engine_bundles_per_node: Bundles that engines may use, of each node with engines.
        master_port_range: First and last port for the ranks' rendezvous; None for any free port.
        threads_per_rank: CPU threads that each rank may use when all ranks compute at once.
        threads_per_engine_bundle: CPU threads that an engine's processes may use, per bundle of the engine.
        threads_per_node: CPU threads that one process may use while the others of its node wait.
        logs_folder: Folder of the output of Ray's processes; None if Ray was not started here.
        keep_logs: Whether that folder stays when Ray ends here; set after an error in the `with` block, too.
        nodes: The nodes of the bundles, in their order; a node may occur more than once.
    """

    def __init__(
        self,
        *,
        num_nodes: int,
        gpus_per_node: int,
        num_engine_devices: int = 0,
        master_port_range: tuple[int, int] | None = None,
        segment_size: int | None = None,
        wait_for_nodes_s: float = 0.0,
        needs_gpus: bool = False,
        log_to_driver: bool = False,
    ) -> None:
        """Starts or joins Ray and reserves the bundles.

        Args:
            num_nodes: Nodes to spread the ranks over.
            gpus_per_node: Bundles of each node; each has a GPU where the cluster has any.
            num_engine_devices: Bundles of generation alone: some of a single node, or all of the last nodes.
            master_port_range: First and last port for the ranks' rendezvous; None for any free port.
            segment_size: Number of consecutive nodes that have to be in one NVLink domain; None for any nodes.
            wait_for_nodes_s: Seconds to wait until a joined cluster has enough nodes, such as when one is replaced.
            needs_gpus: Whether ranks need GPUs even where there are none now, such as after a loss of all GPU nodes.
            log_to_driver: Whether this process also prints the output of ranks.

        Raises:
            ValueError: If the cluster has fewer GPUs or nodes than asked for, or RAY_ADDRESS cannot be used. If Ray is
                not running yet, this machine's GPUs are counted before Ray starts.
        """
        self.num_bundles = num_nodes * gpus_per_node
        self.world_size = self.num_bundles - num_engine_devices
        self.bundles_per_node = gpus_per_node
        self.ranks_per_node = self.world_size if num_nodes == 1 else gpus_per_node
        self.engines_are_apart = num_engine_devices > 0
        self.engine_bundles_per_node = num_engine_devices or gpus_per_node if num_nodes == 1 else gpus_per_node
        self.master_port_range = master_port_range
        self.nodes: list[Node] = []
        self._groups: list[PlacementGroup] = []
        self._watch: NodeWatch | None = None
        self._reaper: Reaper | None = None
        self.logs_folder: Path | None = None
        self.keep_logs = False
        self._must_stop_ray = not ray.is_initialized()
        try:
            if self._must_stop_ray:
                self._start_ray(num_nodes, gpus_per_node, segment_size, needs_gpus, log_to_driver)
            self.has_gpus, self.nodes = self._find_nodes(num_nodes, segment_size, wait_for_nodes_s, needs_gpus)
            self._reserve()
            self._share_out_threads()
            if len(self.node_ids) > 1:
                self._watch = NodeWatch(self.nodes)
        except BaseException as error:  # including a signal that arrived while Ray was starting
            self.keep_logs = isinstance(error, Exception)
            self.shutdown()
            raise

    @property
    def _first_engine_bundle(self) -> int:
        return self.world_size if self.engines_are_apart else 0

    @property
    def num_nodes(self) -> int:
        """Number of nodes that have ranks of the policy."""
        return self.world_size // self.ranks_per_node

    @property
    def node_ids(self) -> list[str]:
        """Ray's ids of the nodes that have bundles, in the order of the bundles."""
        return list(dict.fromkeys(node.id for node in self.nodes))

    def node_of(self, bundle: int) -> Node:
        """Returns the node of a bundle, and so of the rank with the same number."""
        return self.nodes[bundle // self.bundles_per_node]

    def on_each_node[Value](self, function: Callable[[], Value]) -> list[Value]:
        """Calls a function once on each node that has bundles, and returns the results in the order of the bundles.

        Args:
            function: Importable there; takes no GPU.

        Raises:
            ValueError: If a node does not answer.
        """
        task = ray.remote(function)
        refs = {
            node_id: task.options(
                num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)
            ).remote()
            for node_id in self.node_ids
        }
        try:
            values = dict(zip(refs, ray.get(list(refs.values()), timeout=_PLACEMENT_TIMEOUT_S), strict=True))
        except RayError as error:
            raise ValueError(
                f"A node of the Ray cluster did not say how much memory it has: {error}; see `ray status`, and start "
                "the same command again once all nodes answer."
            ) from error
        return [values[node.id] for node in self.nodes]

    def wait(self, refs: Sequence[Any], timeout_s: float | None) -> tuple[list[Any], list[Any]]:
        """Waits for one of the references, but returns early, perhaps with none, if a node is lost.

        Unlike `ray.wait` it returns all that are done 50 ms later, or as soon as all are: one by one, the answers of 64
        nodes take 64 calls with all of them.

        Args:
            refs: Ray references to wait for.
            timeout_s: The most seconds to wait; None for no limit.

        Returns:
            The references that are done, and the others.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            slices = [] if self._watch is None else [self._watch.period_s]
            done, pending = ray.wait(
                list(refs), timeout=min([*slices, *([] if left is None else [left])], default=None)
            )
            if done and pending:
                others, pending = ray.wait(pending, num_returns=len(pending), timeout=_TOGETHER_S)
                done += others
            if done or left == 0.0 or (self._watch is not None and self._watch.has_lost):
                return done, pending

    def loss_of(self, rank: int, *, ask: bool = False) -> NodeLostError | None:
        """Returns the error of a rank, or of another bundle, if its node no longer answers; otherwise None.

        Args:
            rank: 0 .. num_bundles - 1.
            ask: Whether to query the node now, such as after another rank has failed; may take some seconds.
        """
        return None if self._watch is None else self._watch.loss_of(self.node_of(rank), ask=ask)

    def gcs_watch(self, message: Callable[[str], str]) -> GcsWatch:
        """Returns a watch that ends this process once Ray's GCS is gone; `message` says so, given its address."""
        address = ray.get_runtime_context().gcs_address
        # That of a joined cluster may be restarted by those who run it; Ray waits 60 s for that.
        patience_s = _GCS_RESTART_S if self._reaper is None else _GCS_PATIENCE_S
        return GcsWatch(address, lambda: message(address), patience_s=patience_s)

    def node_name(self, rank: int) -> str | None:
        """Returns the name of a rank's node for messages; None if all ranks are on one node."""
        return None if self._watch is None else str(self.node_of(rank))

    def bundles_by_engine(self, bundles_per_engine: int) -> list[tuple[int, ...]]:
        """Returns the bundles of each generation engine: the ranks' bundles, or generation's own.

        An engine has a part of a node, or several whole nodes that follow each other.

        Args:
            bundles_per_engine: Bundles (GPUs) that an engine spans.

        Raises:
            ValueError: If the engines share out neither the bundles of a node nor the nodes.
        """
        of_node, total = self.engine_bundles_per_node, self.num_bundles - self._first_engine_bundle
        is_part_of_node, has_whole_nodes = of_node % bundles_per_engine == 0, bundles_per_engine % of_node == 0
        if not is_part_of_node and not (has_whole_nodes and total % bundles_per_engine == 0):
            raise ValueError(
                f"An engine of policy.generation spans {bundles_per_engine} GPUs, which neither divides the {of_node} "
                "GPUs that generation has on each node (cluster.gpus_per_node, or "
                "policy.generation.colocated.resources.gpus_per_node) nor is a multiple of them that divides its "
                f"{total} GPUs; change one of the two."
            )
        return list(itertools.batched(range(self._first_engine_bundle, self.num_bundles), bundles_per_engine))

    def are_on_one_node(self, bundles: Sequence[int]) -> bool:
        """Returns whether the bundles are on one node of Ray, so that their processes can meet on its loopback."""
        return len({self.node_of(bundle).id for bundle in bundles}) == 1

    @property
    def engine_share(self) -> float:
        """The share of a bundle that an engine's actor takes."""
        return 1.0 if self.engines_are_apart else ENGINE_SHARE

    def actor_options(self, bundle: int, share: float) -> dict[str, Any]:
        """Returns the options of a Ray actor that takes a share of a bundle.

        Args:
            bundle: 0 .. num_bundles - 1; rank N has bundle N.
            share: Share of the bundle, in (0, 1].
        """
        node, of_node = divmod(bundle, self.bundles_per_node)
        return {
            "num_cpus": share * (1 if self.has_gpus else _CPUS_PER_RANK_WITHOUT_GPU),
            "num_gpus": share if self.has_gpus else 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._groups[node], placement_group_bundle_index=of_node
            ),
        }

    def options_beside(self, bundle: int) -> dict[str, Any]:
        """Returns the options of a Ray actor on a bundle's node that takes none of its resources."""
        strategy = NodeAffinitySchedulingStrategy(self.node_of(bundle).id, soft=False)
        return {"num_cpus": 0, "num_gpus": 0, "scheduling_strategy": strategy}

    def stop(self, actors: Sequence[Any], process_refs: Sequence[Any]) -> None:
        """Kills actors and waits until the processes of those on this node have ended.

        Args:
            actors: Actor handles; dead actors are ignored.
            process_refs: Ray references to the (node address, process id) of each actor; those that are not done are
                ignored.
        """
        known, _ = ray.wait(list(process_refs), num_returns=len(process_refs), timeout=0)
        processes = []
        for ref in known:
            with contextlib.suppress(RayError, psutil.NoSuchProcess):  # it has never started, or has already ended
                address, pid = ray.get(ref)
                if address == ray.util.get_node_ip_address():
                    processes.append(psutil.Process(pid))
        for actor in actors:
            ray.kill(actor)
        _, alive = psutil.wait_procs(processes, timeout=_EXIT_TIMEOUT_S)
        for process in alive:
            logger.warning("Process %d of an actor did not end within %d s.", process.pid, _EXIT_TIMEOUT_S)

    def shutdown(self) -> None:
        """Gives the bundles back and disconnects from Ray, if this object connected to it.

        If it also started Ray, it ends Ray and waits for all of its processes.
        """
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        if ray.is_initialized():
            for group in self._groups:
                remove_placement_group(group)
            if self._must_stop_ray:
                disconnect_and_kill()
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

    def _start_ray(
        self, num_nodes: int, gpus_per_node: int, segment_size: int | None, needs_gpus: bool, log_to_driver: bool
    ) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # An actor without a GPU keeps its CUDA_VISIBLE_DEVICES.
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        logging_options = {"log_to_driver": log_to_driver, "logging_level": logging.ERROR}
        if not starts_ray_here():
            with handlers_kept():
                join_ray(logging_options)
            return
        complete_environment()
        num_gpus = torch.cuda.device_count()
        require_no_segments(segment_size)
        if num_gpus:
            require_one_node(num_nodes)
        require_gpus(num_gpus, num_nodes, gpus_per_node, "this machine", needs_gpus=needs_gpus)
        # Prestarted workers would be idle: an actor with its own environment needs a new process.
        os.environ.setdefault("RAY_enable_worker_prestart", "0")
        os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
        with ending_signals_blocked(), handlers_kept():
            root = session_root()
            self._reaper = Reaper(root)
            context = ray.init(
                address="local",
                num_cpus=num_cpus_of_ray(num_gpus),
                num_gpus=num_gpus,
                include_dashboard=False,
                _temp_dir=root,
                # Ray 2.60 does not quote the interpreter's path in a shell command, and so fails if it has a space.
                runtime_env={"py_executable": shlex.quote(sys.executable)},
                **object_store_options(num_gpus > 0),
                **logging_options,
            )
        self.logs_folder = Path(context.address_info["session_dir"], "logs")

    def _find_nodes(
        self, num_nodes: int, segment_size: int | None, wait_for_nodes_s: float, needs_gpus: bool
    ) -> tuple[bool, list[Node]]:
        """Chooses the nodes; waits until their resources are free, and up to `wait_for_nodes_s` for further nodes.

        Returns:
            Whether ranks have GPUs, and the nodes.
        """
        start = time.monotonic()
        while True:
            num_gpus = int(ray.cluster_resources().get("GPU", 0))
            has_gpus = num_gpus > 0 or needs_gpus
            nodes = that_answer(living_nodes(_bundle(has_gpus), self.bundles_per_node), _ANSWER_TIMEOUT_S)
            chosen = choose_nodes(nodes, num_nodes, segment_size, lambda node: node.num_free_slots)
            if chosen is not None:
                return has_gpus, chosen
            waited_s = time.monotonic() - start
            if choose_nodes(nodes, num_nodes, segment_size, lambda node: node.num_slots) is None:
                if waited_s >= wait_for_nodes_s:
                    where = "the Ray cluster"
                    require_gpus(num_gpus, num_nodes, self.bundles_per_node, where, needs_gpus=needs_gpus)
                    raise ValueError(why_too_few(nodes, num_nodes, self.bundles_per_node, segment_size))
            elif waited_s >= max(wait_for_nodes_s, _PLACEMENT_TIMEOUT_S):
                raise _no_room(num_nodes, self.bundles_per_node)
            time.sleep(_LOOK_PERIOD_S)

    def _share_out_threads(self) -> None:
        """Sets how many CPU threads policy and generation may use, by the node that has the fewest."""
        threads = {node["NodeID"]: node["Resources"].get("CPU", 1) for node in ray.nodes()}
        self.threads_per_node = max(1, int(min(threads[node_id] for node_id in self.node_ids)))
        nodes_of_ranks = len({node.id for node in self.nodes[: self.num_nodes]})
        self.threads_per_rank = max(1, self.threads_per_node * nodes_of_ranks // self.world_size)
        engine_nodes = self.nodes[self._first_engine_bundle // self.bundles_per_node :]
        nodes_of_engines = len({node.id for node in engine_nodes})
        num_engine_bundles = self.num_bundles - self._first_engine_bundle
        self.threads_per_engine_bundle = max(1, self.threads_per_node * nodes_of_engines // num_engine_bundles)

    def _reserve(self) -> None:
        """Reserves all bundles in a placement group per node."""
        self._groups = [
            placement_group(
                [_bundle(self.has_gpus) for _ in range(self.bundles_per_node)],
                strategy="STRICT_PACK",
                bundle_label_selector=[{"ray.io/node-id": node.id}] * self.bundles_per_node,
            )
            for node in self.nodes
        ]
        if not all(group.wait(timeout_seconds=_PLACEMENT_TIMEOUT_S) for group in self._groups):
            raise _no_room(len(self.nodes), self.bundles_per_node)


def starts_ray_here() -> bool:
    """Returns whether a `Cluster` would start Ray on this machine, with actors that inherit this environment."""
    return "RAY_ADDRESS" not in os.environ and not ray.is_initialized()


def available_threads() -> int:
    """Returns the CPU threads that this process may use: its affinity, or OMP_NUM_THREADS if that is set and lower."""
    cores = len(os.sched_getaffinity(0))
    limit = os.environ.get("OMP_NUM_THREADS", "")
    return min(cores, int(limit)) if limit.isdecimal() and int(limit) else cores


def num_cpus_of_ray(num_gpus: int) -> int:
    """Returns the CPUs that a Ray started here has: one for each GPU's bundle, whatever OMP_NUM_THREADS is."""
    return max(available_threads(), num_gpus)


def _bundle(has_gpus: bool) -> dict[str, float]:
    return {"GPU": 1, "CPU": 1} if has_gpus else {"CPU": _CPUS_PER_RANK_WITHOUT_GPU}


def _no_room(num_nodes: int, gpus_per_node: int) -> ValueError:
    return ValueError(
        f"The Ray cluster has no room for {num_nodes} nodes (cluster.num_nodes) of {gpus_per_node} ranks "
        f"(cluster.gpus_per_node): that many were not free within {_PLACEMENT_TIMEOUT_S} s, and "
        f"the free resources are {ray.available_resources()}; stop other jobs there, or lower one of the two."
    )
