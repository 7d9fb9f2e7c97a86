"""Finds addresses, ports and interfaces over which processes of a run meet, and listens on no others."""

import os
import socket
from datetime import timedelta

import psutil
import torch

LOOPBACK = "127.0.0.1"


def free_port(address: str, port_range: tuple[int, int] | None) -> int:
    """Returns a TCP port of this machine's `address` that nothing is bound to.

    Args:
        address: An address of this machine.
        port_range: First and last candidate; None lets the system choose.

    Raises:
        ValueError: If every port of the range is in use.
    """
    with listening(address, port_range) as listener:
        return int(listener.getsockname()[1])


def listening(address: str, port_range: tuple[int, int] | None, *, backlog: int = 1) -> socket.socket:
    """Returns a socket that listens on a TCP port of this machine's `address`, and so keeps the port from others.

    Args:
        address: An address of this machine.
        port_range: First and last candidate; None lets the system choose.
        backlog: Number of connections that may wait until they are accepted.

    Raises:
        ValueError: If every port of the range is in use.
    """
    candidates = range(0, 1) if port_range is None else range(port_range[0], port_range[1] + 1)
    for port in candidates:
        try:
            return _served(address, port, backlog)
        except OSError:
            continue
    raise ValueError(
        f"No port of {address} from {candidates.start} to {candidates.stop - 1} is free; widen "
        "cluster.master_port_range_low and cluster.master_port_range_high, or leave them out."
    )


def rendezvous_store(
    address: str,
    port: int,
    *,
    rank: int,
    world_size: int,
    timeout: timedelta,
    listener: socket.socket | None = None,
) -> torch.distributed.TCPStore:
    """Returns the store at which processes meet; rank 0 serves it, on this address only.

    By default torch listens on every interface and answers any host that connects.

    Args:
        address: An address or name of rank 0's host.
        port: A port there; rank 0 may give 0 if it is alone.
        rank: This process's rank.
        world_size: Number of processes.
        timeout: How long a process waits for the others.
        listener: Rank 0's socket that listens on the port already; it belongs to the store from then on.
    """
    descriptor: int | None = None
    if rank == 0:
        served = _served(address, port, world_size) if listener is None else listener
        port = served.getsockname()[1]
        descriptor = served.detach()
    return torch.distributed.TCPStore(
        address, port, world_size, is_master=rank == 0, timeout=timeout, master_listen_fd=descriptor
    )


def choose_interface(address: str) -> None:
    """Makes gloo use the interface from which this host reaches `address`, unless the environment names another.

    By default gloo uses the address that the hostname resolves to. On one host other machines may reach that address,
    although ranks need only loopback; on several hosts it may be loopback. NCCL by default uses any interface but
    loopback; on one host it needs only loopback.

    Args:
        address: An address or name of rank 0's host.
    """
    family, _, _, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # sends nothing, only selects the route
        own = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == own for one in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            if name == "lo":
                os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")


def _served(address: str, port: int, backlog: int) -> socket.socket:
    family, *_ = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server((address, port), family=family, backlog=backlog)
