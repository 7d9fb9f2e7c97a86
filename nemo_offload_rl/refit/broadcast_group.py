"""The process group of a refit: a policy rank and the engines' processes, beside all other groups that they are in."""

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
class MeetingPoint:
    """Names the place where the processes of a group meet.

    Attributes:
        address: Of the sender's node; a loopback address where all processes are on it.
        port: Of the sender's store.
        size: Processes of the group.
        timeout_s: How long one may wait for the others.
    """

    address: str
    port: int
    size: int
    timeout_s: float

    def store(self, listener: socket.socket | None = None) -> distributed.TCPStore:
        """The group's store, served where there is a listener; it answers no other address than the listener's."""
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

    def __init__(self, store: distributed.TCPStore, at: MeetingPoint, rank: int) -> None:
        """Meet the other processes; with gloo, returns once all are there."""
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
            # Left to itself, gloo takes the address that the host's name stands for.
            options._devices = [distributed.ProcessGroupGloo.create_device(hostname=_address_towards(at.address))]
            self._group = distributed.ProcessGroupGloo(store, rank, at.size, options)

    @classmethod
    def announced(cls, at: MeetingPoint, rank: int) -> Self:
        """Join as a receiver, and let the sender know before: it joins once it knows of all."""
        store = at.store()
        store.set(announcement(rank), "")
        return cls(store, at, rank)

    def broadcast(self, buffer: torch.Tensor) -> Any:
        """Start to send a buffer, or to receive into it; returns torch's `Work`."""
        options = distributed.BroadcastOptions()
        options.rootRank, options.rootTensor = SENDER, 0
        return self._group.broadcast([buffer], options)

    def abort(self) -> None:
        """Give up what is under way on a GPU, where nothing else would; the group is of no use afterwards."""
        if torch.cuda.is_available():
            self._group.abort()


class FirstBroadcast:
    """Forms the sender's group and starts its first broadcast, in a thread of its own.

    Either waits for all processes without end or message, gloo in the constructor of its group, and NCCL, which makes
    its communicator only then, in the broadcast. The caller watches the processes meanwhile.

    Args:
        store: of the sender.
        at: where the group meets.
        buffer: what is sent.
    """

    def __init__(self, store: distributed.TCPStore, at: MeetingPoint, buffer: torch.Tensor) -> None:
        self._group: BroadcastGroup | None = None
        self._started: Future[tuple[BroadcastGroup, Any]] = Future()
        scopes: list[contextlib.AbstractContextManager[Any]] = []
        if buffer.is_cuda:  # a thread has a device and a current stream of its own
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
        """Returns the group and torch's `Work`, or raises what joining has failed with."""
        return self._started.result()

    def abort(self) -> None:
        """Gives up what is under way; a thread that is waiting for a process all the same ends with this one."""
        if self._group is not None:
            aborting = threading.Thread(target=self._group.abort, name="abort-broadcast", daemon=True)
            aborting.start()
            aborting.join(_ABORT_TIMEOUT_S)


def announcement(rank: int) -> str:
    """Key of the store that says that a receiver is there."""
    return f"receiver {rank}"


# Of an engine's process: its group outlives the buckets that come through it.
joined = functools.cache(BroadcastGroup.announced)


def _address_towards(target: str) -> str:
    """The address of this host that reaches another."""
    family, _, _, _, address = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing: only chooses the way
        return str(probe.getsockname()[0])
