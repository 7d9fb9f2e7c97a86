"""The process group of a refit: a policy rank and the engines' processes, separate from all their other groups."""

import contextlib
import functools
import ipaddress
import os
import socket
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self

import torch
from torch import distributed

SENDER = 0  # the sender's rank in the group; receivers follow it
_ABORT_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Rendezvous:
    """Describes where the processes of a group rendezvous.

    Attributes:
        address: Address of the sender's node; a loopback address if all processes are on it.
        port: Port of the sender's store.
        size: Number of processes in the group.
        timeout_s: Seconds that a process may wait for the others.
    """

    address: str
    port: int
    size: int
    timeout_s: float

    def store(self, listener: socket.socket | None = None) -> distributed.TCPStore:
        """Returns the group's store; given a listener, this process serves it, only at the listener's address."""
        return distributed.TCPStore(
            self.address,
            self.port,
            self.size,
            is_master=listener is not None,
            timeout=timedelta(seconds=self.timeout_s),
            wait_for_workers=False,
            master_listen_fd=None if listener is None else listener.detach(),
        )


class BroadcastGroup:
    """Broadcasts the sender's buffers to all receivers: with NCCL between GPUs, with gloo between CPUs."""

    def __init__(self, store: distributed.TCPStore, at: Rendezvous, rank: int) -> None:
        """Joins the other processes; with gloo, returns once all have joined."""
        timeout = timedelta(seconds=at.timeout_s)
        if torch.cuda.is_available():
            if ipaddress.ip_address(at.address).is_loopback:
                os.environ.setdefault("NCCL_SOCKET_IFNAME", "=lo")
            nccl_options = distributed.ProcessGroupNCCL.Options()
            nccl_options._timeout = timeout
            self._group: Any = distributed.ProcessGroupNCCL(store, rank, at.size, nccl_options)
        else:
            options = distributed.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._timeout = timeout
            # By default, gloo uses the address that the host's name resolves to.
            options._devices = [distributed.ProcessGroupGloo.create_device(hostname=_address_towards(at.address))]
            self._group = distributed.ProcessGroupGloo(store, rank, at.size, options)

    @classmethod
    def announced(cls, at: Rendezvous, rank: int) -> Self:
        """Joins as a receiver, after announcing it: the sender joins once all receivers have announced themselves."""
        store = at.store()
        store.set(announcement(rank), "")
        return cls(store, at, rank)

    def broadcast(self, buffer: torch.Tensor) -> Any:
        """Starts to send a buffer, or to receive into it; returns torch's `Work`."""
        options = distributed.BroadcastOptions()
        options.rootRank, options.rootTensor = SENDER, 0
        return self._group.broadcast([buffer], options)

    def abort(self) -> None:
        """Aborts pending work on a GPU, which nothing else would end; the group cannot be used afterwards."""
        if torch.cuda.is_available():
            self._group.abort()


class FirstBroadcast:
    """Forms the sender's group and starts its first broadcast, in a thread of its own.

    Both backends wait for all processes without a timeout or a message: gloo in the constructor of its group, NCCL in
    the first broadcast, which creates its communicator. The caller watches the processes meanwhile.

    Args:
        store: the sender's store.
        at: where the group's processes rendezvous.
        buffer: the buffer to send.
    """

    def __init__(self, store: distributed.TCPStore, at: Rendezvous, buffer: torch.Tensor) -> None:
        self._group: BroadcastGroup | None = None
        self._started: Future[tuple[BroadcastGroup, Any]] = Future()
        scopes: list[contextlib.AbstractContextManager[Any]] = []
        if buffer.is_cuda:  # the current device and stream are per thread
            scopes = [torch.cuda.device(buffer.device), torch.cuda.stream(torch.cuda.current_stream(buffer.device))]

        def start() -> None:
            try:
                with contextlib.ExitStack() as stack:
                    for scope in scopes:
                        stack.enter_context(scope)
                    self._group = BroadcastGroup(store, at, SENDER)
                    self._started.set_result((self._group, self._group.broadcast(buffer)))
            except Exception as error:  # noqa: BLE001 - `result` raises it in the caller's thread
                self._started.set_exception(error)

        threading.Thread(target=start, name="first-broadcast", daemon=True).start()

    def is_done(self) -> bool:
        """Whether all processes have joined, or joining has failed."""
        return self._started.done()

    def result(self) -> tuple[BroadcastGroup, Any]:
        """Returns the group and torch's `Work`, or raises the error with which joining failed."""
        return self._started.result()

    def abort(self) -> None:
        """Aborts pending work; a thread that still waits for a process ends with this process."""
        if self._group is not None:
            aborting = threading.Thread(target=self._group.abort, name="abort-broadcast", daemon=True)
            aborting.start()
            aborting.join(_ABORT_TIMEOUT_S)


def announcement(rank: int) -> str:
    """Returns the key of the store by which a receiver announces itself."""
    return f"receiver {rank}"


# In an engine's process, the group outlives the buckets that it receives.
joined = functools.cache(BroadcastGroup.announced)


def _address_towards(target: str) -> str:
    """Returns the address from which this host reaches another one."""
    family, _, _, _, address = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing, only selects the route
        return str(probe.getsockname()[0])
