"""Sends weights by broadcast from the policy's rank 0 to engines on GPUs of their own, on any nodes.

Engines load a bucket while the ranks export the next one. One buffer on the sender is enough, as a bucket has left it
before the export continues. That also separates the broadcast from the export's own collectives: NCCL may run two
communicators on a GPU at once only if both fit on it.
"""

import contextlib
import functools
import ipaddress
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self

import ray
import torch
from torch import distributed

from nemo_offload_rl.refit.export import NullSender
from nemo_offload_rl.refit.fixed_buckets import FixedTensors
from nemo_offload_rl.refit.interface import Receiver, RefitSender
from nemo_offload_rl.refit.loads import EngineLoad, ExportedTensors, answer_of
from nemo_offload_rl.refit.plan import BucketLayout, ExportPlan, NamedTensor

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


TIMEOUT_S = 300.0
_LOOPBACK = "127.0.0.1"
_LOOK_PERIOD_S = 0.001
_SETTLE_TIMEOUT_S = 10.0


class RefitTimeoutError(RuntimeError):
    """Says that an engine did not answer, or did not take a bucket, in time."""


@dataclass(frozen=True)
class BroadcastBucket:
    """Describes a bucket that the sender is about to broadcast (see `WeightBucket`).

    Attributes:
        number: Of the bucket in its refit.
        layout: Positions of its tensors in a buffer.
        buffer_bytes: Size of the refit's largest bucket.
        at: Where the group's processes rendezvous.
        rank: The receiver's rank in the group.
    """

    number: int
    layout: BucketLayout
    buffer_bytes: int
    at: Rendezvous
    rank: int

    @contextlib.contextmanager
    def opened(self) -> Iterator[FixedTensors]:
        """Receives the bucket into memory with the same addresses in every refit."""
        yield _received(self.at, self.buffer_bytes).receive(self.number, self.layout, joined(self.at, self.rank))


class _ReceivedBuckets:
    """Holds, in an engine's process, the buffer of all buckets of a sender.

    torch's allocator would keep its memory anyway, and loads from the same addresses can be recorded.
    """

    def __init__(self, num_bytes: int) -> None:
        self._buffer = _buffer(num_bytes)
        self._tensors: dict[int, FixedTensors] = {}  # by bucket
        # Not the stream on which the engine may be generating meanwhile: its steps would wait for the weights.
        self._stream = torch.cuda.Stream() if self._buffer.is_cuda else None

    def receive(self, number: int, layout: BucketLayout, group: BroadcastGroup) -> FixedTensors:
        if number not in self._tensors:
            self._tensors[number] = FixedTensors(tuple(layout.views(self._buffer)))
        with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            group.broadcast(self._buffer[: max(1, layout.num_bytes)]).wait()
        if self._stream is not None:
            self._stream.synchronize()
        return self._tensors[number]


@functools.cache
def _received(at: Rendezvous, num_bytes: int) -> _ReceivedBuckets:
    return _ReceivedBuckets(num_bytes)


@dataclass(frozen=True)
class BroadcastTransport:
    """Makes rank 0 broadcast each bucket to all receivers; see `RefitTransport`.

    Attributes:
        receivers: All of them get every bucket.
        verify: Whether the sender returns the checksums of the weights it has sent.
        timeout_s: Seconds that the engines may take for a bucket.
    """

    receivers: Sequence[Receiver]
    verify: bool
    timeout_s: float = TIMEOUT_S

    def connect(self, plan: ExportPlan, *, rank: int, bucket_bytes: int) -> RefitSender:
        """Makes a rank's sender; only rank 0 has a buffer, of `bucket_bytes` or of the largest tensor's size.

        Raises:
            EngineLostError: If an engine's process has ended.
            RefitTimeoutError: If an engine does not answer in time.
        """
        if rank != 0:
            return NullSender()
        buckets = plan.buckets(bucket_bytes)
        return BroadcastSender(buckets, self.receivers, verify=self.verify, timeout_s=self.timeout_s)


class BroadcastSender(RefitSender):
    """Broadcasts bucket after bucket and watches the engines meanwhile."""

    def __init__(
        self, buckets: Sequence[BucketLayout], receivers: Sequence[Receiver], *, verify: bool, timeout_s: float
    ) -> None:
        self._buckets = buckets
        self._buffer_bytes = max((bucket.num_bytes for bucket in buckets), default=0)
        self._receivers = receivers
        self._verify = verify
        self._timeout_s = timeout_s
        self._loads: dict[Any, EngineLoad] = {}  # in flight, by their references, in the order of sending
        listener = socket.create_server((self._address(), 0), backlog=len(receivers))
        address, port = listener.getsockname()[:2]
        self._at = Rendezvous(address, port, len(receivers) + 1, timeout_s)
        self._store = self._at.store(listener)
        self._first: FirstBroadcast | None = None  # set while the engines join
        self._group: BroadcastGroup | None = None  # set once the engines have joined

    def send(self, weights: Iterable[NamedTensor]) -> dict[str, int]:
        """Sends every bucket and returns once all receivers have loaded all of them (see `RefitSender`).

        Raises:
            EngineLostError: If an engine's process has ended.
            RefitTimeoutError: If an engine has not taken a bucket in time.
            RuntimeError: If an engine has failed; ValueError if the engine raised that.
        """
        exported = ExportedTensors(weights, verify=self._verify)
        buffer = _buffer(self._buffer_bytes)
        try:
            for number, bucket in enumerate(self._buckets):
                exported.fill(number, bucket.slots(buffer))
                self._broadcast(number, bucket, buffer[: max(1, bucket.num_bytes)])
            exported.finish()
            self._watch(lambda: not self._loads)
        except BaseException:
            self._loads.clear()
            if (under_way := self._group or self._first) is not None:
                under_way.abort()
            raise
        return exported.checksums

    def _broadcast(self, number: int, bucket: BucketLayout, data: torch.Tensor) -> None:
        """Sends a bucket's buffer; on return the buffer is free, and the engines may still be loading the bucket."""
        for rank, receiver in enumerate(self._receivers, start=1):
            message = BroadcastBucket(number, bucket, self._buffer_bytes, self._at, rank)
            reference = receiver.load_weights(message)
            self._loads[reference] = EngineLoad(receiver.name, bucket.tensors)
        work = self._broadcast_first(data) if self._group is None else self._started(self._group, data)
        self._watch(work.is_completed)
        with self._naming_the_engine():
            work.wait()

    def _broadcast_first(self, data: torch.Tensor) -> Any:
        """Starts the first broadcast once all engines have announced themselves.

        An engine may still end before it has joined the group.
        """
        keys = [announcement(rank) for rank in range(1, self._at.size)]
        self._watch(lambda: self._store.check(keys))
        self._first = FirstBroadcast(self._store, self._at, data)
        self._watch(self._first.is_done)
        with self._naming_the_engine():
            self._group, work = self._first.result()
        self._first = None  # it holds the work, and with it the buffer
        return work

    def _started(self, group: BroadcastGroup, data: torch.Tensor) -> Any:
        with self._naming_the_engine():
            return group.broadcast(data)

    @contextlib.contextmanager
    def _naming_the_engine(self) -> Iterator[None]:
        """Looks for the failed engine behind an error of the group.

        The group fails first, and its error cannot say which engine it was.
        """
        try:
            yield
        except RuntimeError:
            self._watch(lambda: not self._loads, min(_SETTLE_TIMEOUT_S, self._timeout_s))
            raise

    def _watch(self, is_done: Callable[[], bool], timeout_s: float | None = None) -> None:
        """Waits for a condition, and raises an error if an engine fails or takes too long."""
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s
        while not is_done():
            done: list[Any] = []
            if self._loads:
                done, _ = ray.wait(list(self._loads), timeout=_LOOK_PERIOD_S)
            else:
                time.sleep(_LOOK_PERIOD_S)
            for reference in done:
                engine = self._loads[reference].engine
                answer_of(reference, next(load for load in self._loads.values() if load.engine == engine))
                del self._loads[reference]
            if time.monotonic() > deadline:
                waiting = "; ".join(map(str, self._loads.values())) or "the sender, though all engines have answered"
                raise RefitTimeoutError(
                    f"A refit has waited {limit_s:g} s for {waiting}; check the engine's log, and whether its node "
                    "can be reached from that of the policy's rank 0."
                )

    def _address(self) -> str:
        """Returns the address at which all engines reach this process: loopback if they are on this node."""
        processes = {receiver.actor.process.remote(): receiver.name for receiver in self._receivers}
        here = ray.util.get_node_ip_address()
        _, late = ray.wait(list(processes), num_returns=len(processes), timeout=self._timeout_s)
        if late:
            names = ", ".join(processes[reference] for reference in late)
            raise RefitTimeoutError(
                f"The refit got no answer from {names} within {self._timeout_s:g} s; check the engine's log, and "
                "whether its node can be reached from that of the policy's rank 0."
            )
        addresses = {answer_of(reference, name)[0] for reference, name in processes.items()}
        return _LOOPBACK if addresses == {here} else here


def _buffer(num_bytes: int) -> torch.Tensor:
    """Allocates a bucket's memory: uint8 [num_bytes], at least one byte, on this process's GPU or in host memory."""
    return torch.empty(max(1, num_bytes), dtype=torch.uint8, device="cuda" if torch.cuda.is_available() else "cpu")
