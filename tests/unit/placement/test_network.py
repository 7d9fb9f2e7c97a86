"""Tests where processes meet: free ports, listeners that keep them, and a store on one address alone."""

import os
import socket
import threading
from datetime import timedelta

import pytest

from nemo_offload_rl.placement.network import LOOPBACK, choose_interface, free_port, listening, rendezvous_store

TIMEOUT = timedelta(seconds=20)


def test_ports_come_from_the_range():
    low = free_port(LOOPBACK, None)
    assert free_port(LOOPBACK, (low, low + 50)) in range(low, low + 51)
    with socket.socket() as other:
        other.bind((LOOPBACK, 0))
        taken = other.getsockname()[1]
        with pytest.raises(ValueError, match=f"from {taken} to {taken} is free; widen cluster.master_port_range_low"):
            free_port(LOOPBACK, (taken, taken))


@pytest.mark.parametrize("listens_before", [True, False])
def test_processes_meet_at_a_store_that_only_its_address_reaches(listens_before):
    listener = listening("127.0.0.2", None) if listens_before else None
    port = listener.getsockname()[1] if listener is not None else free_port("127.0.0.2", None)
    found = []
    stores = []  # rank 0's serves both ranks: if it went with its thread, rank 1 would lose its connection

    def join(rank):
        of_first = listener if rank == 0 else None
        store = rendezvous_store("127.0.0.2", port, rank=rank, world_size=2, timeout=TIMEOUT, listener=of_first)
        stores.append(store)
        store.set(f"from {rank}", "hello")
        found.append(store.get(f"from {1 - rank}"))

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [b"hello", b"hello"]


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
