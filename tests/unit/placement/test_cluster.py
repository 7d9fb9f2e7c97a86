import dataclasses
import os
import subprocess
import sys
import time

import pytest
import ray

from nemo_offload_rl.placement.cluster import Cluster, available_threads, num_cpus_of_ray
from nemo_offload_rl.placement.host import host_facts
from nemo_offload_rl.placement.nodes import require_gpus, require_no_segments, require_one_node
from nemo_offload_rl.run.preflight import node_facts

# Starts a Ray of its own, so it runs in its own process.
START_AND_STOP = """
import os, pathlib, psutil, ray, signal
from nemo_offload_rl.placement.cluster import Cluster

with Cluster(num_nodes=1, gpus_per_node=3) as cluster:
    inside = psutil.Process().children(recursive=True)
    assert len(inside) > 2
    addresses = {c.laddr.ip for process in inside for c in process.net_connections("tcp") if c.status == "LISTEN"}
    assert addresses, "Ray listens somewhere"
    assert addresses <= {"127.0.0.1", "::ffff:127.0.0.1"}, addresses

    class Where:
        def __init__(self):
            from nemo_offload_rl.placement.signals import ignore_ending_signals

            ignore_ending_signals()

        def bundle(self):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})  # as multiprocessing does
            return ray.util.get_current_placement_group() is not None

    ray.cloudpickle.register_pickle_by_value(__import__("sys").modules["__main__"])
    actors = [ray.remote(Where).options(**cluster.actor_options(rank, 0.5)).remote() for rank in range(3)]
    assert ray.get([actor.bundle.remote() for actor in actors]) == [True] * 3

    # A terminal's Ctrl-C goes to every process of the group, a scheduler's SIGTERM to every process of the job; only
    # this one may take notice. Its handlers are its own, though Ray has set others.
    taken = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: taken.append(number))
        for process in [*psutil.Process().children(recursive=True), psutil.Process()]:
            process.send_signal(number)
    assert ray.get([actor.bundle.remote() for actor in actors]) == [True] * 3
    assert taken == [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    folder = pathlib.Path(ray._private.worker._global_node.get_session_dir_path())
    assert folder.is_dir()
assert not ray.is_initialized()
# On a busy machine a process that has been told to end takes a moment.
assert psutil.wait_procs(psutil.Process().children(recursive=True), timeout=30)[1] == []
assert not folder.exists()
assert "NEMO_OFFLOAD_RL_DRIVER" not in os.environ
print("left nothing behind")
"""


def test_a_cluster_listens_on_loopback_survives_an_interrupt_and_leaves_no_process():
    command = [sys.executable, "-c", START_AND_STOP]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, start_new_session=True)
    assert run.returncode == 0, run.stderr
    assert "left nothing behind" in run.stdout


TOO_FEW = [
    (lambda: require_gpus(3, 2, 4, "here"), r"8 GPUs \(cluster.num_nodes 2 x cluster.gpus_per_node 4\), .* has 3"),
    (lambda: require_gpus(0, 2, 4, "here", needs_gpus=True), r"began on GPUs, but here has none now, .* has 8 "),
    (lambda: require_one_node(2), r"2 nodes .* set RAY_ADDRESS"),
    (lambda: require_no_segments(2), r"segments of 2 nodes .* set RAY_ADDRESS"),
]


@pytest.mark.parametrize(("require", "message"), TOO_FEW)
def test_too_few_gpus_or_nodes_are_an_error_with_the_numbers(require, message):
    with pytest.raises(ValueError, match=message):
        require()


def test_no_gpus_at_all_are_fine():
    require_gpus(8, 2, 4, "here")
    require_gpus(0, 2, 4, "here")
    require_no_segments(1)
    require_no_segments(None)


def test_what_a_joined_cluster_lacks_is_said_before_anything_is_reserved(ray_cluster):
    start = time.monotonic()
    with pytest.raises(ValueError, match=r"2 segments of 2 nodes of one NVLink domain .* 1 nodes have no such label"):
        Cluster(num_nodes=4, gpus_per_node=1, segment_size=2)
    with pytest.raises(ValueError, match=r"asks for 1 nodes .* with 10000 ranks each"):
        Cluster(num_nodes=1, gpus_per_node=10_000)
    assert time.monotonic() - start < 10
    with pytest.raises(ValueError, match="began on GPUs, but the Ray cluster has none now"):
        Cluster(num_nodes=1, gpus_per_node=1, needs_gpus=True)
    with Cluster(num_nodes=2, gpus_per_node=1) as cluster:
        assert len(cluster.node_ids) == 1
        assert cluster.node_of(0) == cluster.node_of(1)
        assert cluster.node_name(1) is None
        assert cluster.loss_of(1, ask=True) is None
        [(host, *_), same] = cluster.on_each_node(node_facts)
        assert host.total_bytes == host_facts().total_bytes
        assert same[0] is host  # a node with two groups of ranks is asked once


def test_a_second_cluster_shares_ray_and_leaves_it_running(ray_cluster):
    with Cluster(num_nodes=1, gpus_per_node=4, master_port_range=(5000, 5010)) as second:
        assert (second.world_size, second.has_gpus) == (4, False)
        assert second.master_port_range == (5000, 5010)
        [second_group] = second._groups
    assert ray.is_initialized()
    assert ray_cluster.world_size == 2
    states = {id: group["state"] for id, group in ray.util.placement_group_table().items()}
    assert states[second_group.id.hex()] == "REMOVED"
    assert all(states[group.id.hex()] == "CREATED" for group in ray_cluster._groups)


def test_threads_are_limited_by_omp_num_threads_and_shared_out_to_the_ranks(ray_cluster, monkeypatch):
    assert ray_cluster.threads_per_node == available_threads()
    assert ray_cluster.threads_per_rank == max(1, available_threads() // 2)
    for limit, threads in (("1", 1), ("100000", len(os.sched_getaffinity(0)))):
        monkeypatch.setenv("OMP_NUM_THREADS", limit)
        assert available_threads() == threads
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert (num_cpus_of_ray(3), num_cpus_of_ray(0)) == (3, 1)  # a bundle for each GPU all the same
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert available_threads() == len(os.sched_getaffinity(0))


def test_an_engine_has_consecutive_ranks_of_a_node_or_of_whole_nodes(ray_cluster):
    with Cluster(num_nodes=2, gpus_per_node=4) as cluster:
        assert cluster.bundles_by_engine(2) == [(0, 1), (2, 3), (4, 5), (6, 7)]
        assert cluster.bundles_by_engine(4) == [(0, 1, 2, 3), (4, 5, 6, 7)]
        assert cluster.bundles_by_engine(8) == [tuple(range(8))]
        assert cluster.are_on_one_node(range(8))  # this Ray has one node, which has the bundles of both
        cluster.nodes[1] = dataclasses.replace(cluster.nodes[1], id="another")
        assert cluster.are_on_one_node(range(4, 8))
        assert not cluster.are_on_one_node((3, 4))
        for bundles in (3, 6, 16):
            with pytest.raises(ValueError, match=rf"spans {bundles} GPUs, which neither divides the 4 .* its 8 GPUs"):
                cluster.bundles_by_engine(bundles)


def test_generation_may_have_bundles_of_its_own(ray_cluster):
    with Cluster(num_nodes=1, gpus_per_node=4, num_engine_devices=3) as cluster:
        assert (cluster.world_size, cluster.ranks_per_node, cluster.num_nodes) == (1, 1, 1)
        assert cluster.bundles_by_engine(3) == [(1, 2, 3)]
        assert cluster.engine_share == 1.0
        options = [cluster.actor_options(bundle, 1.0)["scheduling_strategy"] for bundle in range(4)]
        assert [one.placement_group_bundle_index for one in options] == [0, 1, 2, 3]
    with Cluster(num_nodes=3, gpus_per_node=2, num_engine_devices=4) as cluster:
        assert (cluster.world_size, cluster.ranks_per_node, cluster.num_nodes) == (2, 2, 1)
        assert cluster.bundles_by_engine(2) == [(2, 3), (4, 5)]
        assert cluster.bundles_by_engine(4) == [(2, 3, 4, 5)]
        groups = [cluster.actor_options(bundle, 1.0)["scheduling_strategy"].placement_group for bundle in (1, 2, 5)]
        assert len({group.id for group in groups}) == 3
