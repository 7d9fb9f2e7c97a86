"""Finds addresses, ports and interfaces over which processes of a run meet; no other is listened on."""

import itertools
import os
import socket
from datetime import timedelta

import psutil
import torch

LOOPBACK = "127.0.0.1"


def reserve_port(address: str, port_range: tuple[int, int] | None) -> socket.socket:
    """Returns a socket that is bound to a free TCP port of this machine's `address`, and keeps it while it is open.

    It does not listen. A server that names the port and may reuse addresses, as torch's stores do, can listen there;
    the system gives the port to no connection and to no server that asks for any.

    Args:
        address: An address of this machine.
        port_range: First and last candidate; None lets the system choose.

    Raises:
        ValueError: If every port of the range is in use.
    """
    family, *_ = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
    candidates = range(0, 1) if port_range is None else range(port_range[0], port_range[1] + 1)
    for reuses, port in itertools.product((False, True), candidates):  # at last a port of connections that just ended
        reserved = socket.socket(family)
        try:
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuses)
            reserved.bind((address, port))
        except OSError:
            reserved.close()
            continue
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, True)
        return reserved
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
) -> torch.distributed.TCPStore:
    """Returns the store at which processes meet; rank 0 serves it, on this address only.

    By default torch listens on every interface and answers any host that connects.

    Args:
        address: An address or name of rank 0's host.
        port: A port there, which `reserve_port` may keep; rank 0 may give 0 if it is alone.
        rank: This process's rank.
        world_size: Number of processes.
        timeout: How long a process waits for the others.
    """
    descriptor: int | None = None
    if rank == 0:
        family, *_ = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        served = socket.create_server((address, port), family=family, backlog=world_size)
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
