import operator
import os
import socket
import threading
import time
from contextlib import contextmanager
from datetime import timedelta

import pytest
from support.waiting import wait_until

from nemo_offload_rl.placement.network import LOOPBACK, choose_interface, rendezvous_store, reserve_port
from nemo_offload_rl.placement.nodes import (
    Node,
    NodeWatch,
    answers_at,
    choose_nodes,
    living_nodes,
    that_answer,
    why_too_few,
)


def node(number, domain=None, *, slots=1, free=None, port=0, address="10.0.0.1"):
    free = slots if free is None else free
    return Node(f"{number:08d}-id", address, port, domain, (number,), slots, free)


free_slots = operator.attrgetter("num_free_slots")


def ids(nodes):
    return None if nodes is None else [int(one.id[:8]) for one in nodes]


def test_nodes_are_different_ones_as_far_as_there_are_enough_and_in_their_order():
    cluster = [node(3), node(1, slots=2), node(2)]
    assert ids(choose_nodes(cluster, 2, None, free_slots)) == [1, 2]
    assert ids(choose_nodes(cluster, 4, None, free_slots)) == [1, 1, 2, 3]
    assert choose_nodes(cluster, 5, None, free_slots) is None
    assert choose_nodes([], 1, None, free_slots) is None
    cluster = [node(1, free=0), node(2), node(3)]  # the first is in use
    assert ids(choose_nodes(cluster, 2, 1, free_slots)) == [2, 3]
    assert choose_nodes(cluster, 3, None, free_slots) is None
    assert ids(choose_nodes(cluster, 3, None, lambda one: one.num_slots)) == [1, 2, 3]


def test_segments_are_whole_of_one_domain_each_and_of_few_domains():
    small = [node(number, "a") for number in (0, 1, 2)]
    large = [node(number, "b") for number in (14, 13, 12, 11, 10)]
    cluster = [*small, node(5), node(6), *large]
    assert ids(choose_nodes(cluster, 4, 2, free_slots)) == [10, 11, 12, 13]
    assert ids(choose_nodes(cluster, 6, 2, free_slots)) == [10, 11, 12, 13, 0, 1]
    assert choose_nodes(cluster, 8, 2, free_slots) is None  # nodes 14, 2, 5 and 6 are in no whole segment
    assert choose_nodes(cluster, 8, 4, free_slots) is None


def test_a_cluster_with_too_few_says_what_it_has_and_the_remedy():
    cluster = [node(1, "a"), node(2, "a"), node(3, "b"), node(4), node(5, slots=0)]
    text = why_too_few(cluster, 8, 4, None)
    assert "asks for 8 nodes (cluster.num_nodes) with 4 ranks each" in text and "10.0.0.1 (00000004);" in text
    assert why_too_few(cluster, 8, 4, 2) == text  # without segments there would be too few as well
    text = why_too_few(cluster, 4, 4, 2)
    assert "puts 2 in a, 1 in b; 1 nodes have no such label;" in text and "set cluster.segment_size to null" in text


def test_what_ray_says_of_nodes(monkeypatch):
    def ray_node(name, address, **fields):
        return {"NodeID": name, "NodeManagerAddress": address, "NodeManagerPort": 7, "Alive": True, **fields}

    gpus = {"GPU": 8.0, "CPU": 64.0}
    monkeypatch.setattr(
        "ray.nodes",
        lambda: [
            ray_node("a", "10.0.0.10", Resources=gpus, Labels={"nvidia.com/gpu.clique": "x.1"}),
            ray_node("b", "10.0.0.9", Resources=gpus | {"nvlink_domain_y": 1.0, "topo_rank": 12.0}, Labels={}),
            ray_node("c", "head", Resources={"CPU": 3.0}, Labels={}),
            ray_node("d", "10.0.0.8", Resources={}, Labels={}) | {"Alive": False},
        ],
    )
    free = {"a": {"GPU": 5.0, "CPU": 64.0}, "b": gpus}
    monkeypatch.setattr("ray._private.state.available_resources_per_node", lambda: free)
    first, second, head = living_nodes({"GPU": 1, "CPU": 1}, 4)
    assert first == Node("a", "10.0.0.10", 7, "x.1", (10, 0, 0, 10), 2, 1)
    assert second == Node("b", "10.0.0.9", 7, "y", (12.0,), 2, 2)
    assert (head.domain, head.num_slots, head.num_free_slots) == (None, 0, 0)
    monkeypatch.setattr("ray._private.state.available_resources_per_node", lambda: {"c": {"CPU": 0.1}})
    assert living_nodes({"CPU": 0.02}, 1)[2].num_free_slots == 5  # and not 4, by rounding


@contextmanager
def server(*, greets):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            while greets:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                connection.sendall(bytes(9))
                connection.close()

        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


def test_a_node_answers_where_its_process_does_and_not_its_kernel_alone(monkeypatch):
    with server(greets=True) as alive, server(greets=False) as stopped:
        assert answers_at("127.0.0.1", alive, 5)
        assert not answers_at("127.0.0.1", stopped, 0.2)
        nodes = [node(0, port=alive, address="127.0.0.1"), node(1, port=stopped, address="127.0.0.1"), node(2)]
        assert ids(that_answer(nodes, 0.2)) == [0, 2]
        assert ids(that_answer(nodes[1:2], 0.2)) == [1]  # only this machine
        monkeypatch.setenv("RAY_USE_TLS", "1")
        assert answers_at("127.0.0.1", stopped, 5)  # a server with TLS greets later
    assert not answers_at("127.0.0.1", alive, 5)


def test_a_node_that_stops_answering_is_lost_once_patience_is_over():
    with server(greets=True) as first:
        with server(greets=True) as second:
            nodes = [node(0, port=first, address="127.0.0.1"), node(1, port=second, address="127.0.0.1")]
            watch = NodeWatch(nodes, period_s=0.01, patience_s=0.3)
            time.sleep(0.5)
            assert not watch.has_lost
            assert watch.loss_of(nodes[1], ask=True) is None
        start = time.monotonic()
        wait_until(lambda: watch.has_lost)
        assert time.monotonic() - start > 0.2
        assert watch.loss_of(nodes[0], ask=True) is None
        with pytest.raises(Exception, match=r"node 127.0.0.1 \(00000001\) has not answered for 0.3 s"):
            raise watch.loss_of(nodes[1])
        watch.close()


def test_a_node_that_is_asked_is_lost_at_once():
    with server(greets=True) as first:
        nodes = [node(0, port=first, address="127.0.0.1"), node(1, port=1, address="127.0.0.1")]
        watch = NodeWatch(nodes, period_s=100, patience_s=100)
        assert watch.loss_of(nodes[1]) is None
        assert "does not answer" in str(watch.loss_of(nodes[1], ask=True))
        assert watch.loss_of(nodes[0], ask=True) is None
        watch.close()


TIMEOUT = timedelta(seconds=20)


def test_a_reserved_port_of_the_range_is_kept_from_all_but_the_server_that_names_it():
    with reserve_port(LOOPBACK, None) as first:
        low = first.getsockname()[1]
        with reserve_port(LOOPBACK, (low, low + 50)) as second, socket.socket() as other:
            assert second.getsockname()[1] in range(low + 1, low + 51)
            with pytest.raises(OSError, match="in use"):
                other.bind(second.getsockname())
        none_free = pytest.raises(ValueError, match=f"{low} to {low} is free; widen cluster.master_port_range_low")
        with socket.create_server(first.getsockname()), none_free:
            reserve_port(LOOPBACK, (low, low))


def test_a_range_of_one_port_serves_a_run_that_follows_another():
    with reserve_port(LOOPBACK, None) as reserved:
        address = reserved.getsockname()
        with socket.create_server(address) as server, socket.create_connection(address):
            server.accept()[0].close()  # the server's side closes first, so the port stays in TIME_WAIT
    reserve_port(LOOPBACK, (address[1], address[1])).close()


@pytest.mark.parametrize("is_reserved", [True, False])
def test_processes_meet_at_a_store_that_only_its_address_reaches(is_reserved):
    reserved = reserve_port("127.0.0.2", None)
    port = reserved.getsockname()[1]
    if not is_reserved:
        reserved.close()
    found = []
    stores = []  # rank 0's serves both ranks: if it went with its thread, rank 1 would lose its connection

    def join(rank):
        store = rendezvous_store("127.0.0.2", port, rank=rank, world_size=2, timeout=TIMEOUT)
        stores.append(store)
        store.set(f"from {rank}", "hello")
        found.append(store.get(f"from {1 - rank}"))

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [b"hello", b"hello"]
    reserved.close()


def test_other_addresses_do_not_reach_the_store():
    store = rendezvous_store("127.0.0.2", 0, rank=0, world_size=1, timeout=TIMEOUT)
    socket.create_connection(("127.0.0.2", store.port), timeout=5).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((LOOPBACK, store.port), timeout=5)


def test_processes_of_one_host_meet_on_its_loopback_interface(monkeypatch):
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")  # so that the variable is restored, also if it is not set now
        monkeypatch.delenv(name)
    choose_interface(LOOPBACK)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    assert os.environ["NCCL_SOCKET_IFNAME"] == "=lo"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth9")
    choose_interface(LOOPBACK)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth9"
