"""The policy's side of a refit, the same on every rank and for every transport."""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import torch

from nemo_offload_rl.refit.interface import RefitSender, RefitTransport
from nemo_offload_rl.refit.plan import ExportPlan, NamedTensor
from nemo_offload_rl.refit.recorder import addresses_of, why_not_recorded


class ExportReads(Protocol):
    """Describes the tensors that an export reads, and the parallelism over which its ranks exchange them."""

    def tensors(self) -> Iterable[torch.Tensor]:
        """Returns all tensors that an export reads, the same objects each time; none before the first export."""
        ...

    def collectives(self) -> str:
        """Returns the kinds of parallelism over which ranks exchange weights in an export; empty if each has all."""
        ...

    def agree(self, yes: bool) -> bool:
        """Returns whether all ranks say yes; collective if there are such kinds of parallelism."""
        ...


class _Unknown:
    """Declares no tensors that an export reads, so that it is not recorded but driven from Python."""

    def tensors(self) -> Iterable[torch.Tensor]:
        return ()

    def collectives(self) -> str:
        return ""

    def agree(self, yes: bool) -> bool:
        return yes


UNKNOWN: ExportReads = _Unknown()


class WeightExport:
    """Sends one rank's export of the weights, which must yield the same tensors each time.

    Args:
        weights: starts an export; collective.
        rank: the rank of this process.
        bucket_bytes: largest number of bytes of tensors in one bucket.
        reads: describes the tensors that an export reads.
    """

    def __init__(
        self,
        weights: Callable[[], Iterable[NamedTensor]],
        *,
        rank: int,
        bucket_bytes: int,
        reads: ExportReads = UNKNOWN,
    ) -> None:
        self._weights = weights
        self._rank = rank
        self._bucket_bytes = bucket_bytes
        self._reads = reads
        self._sources: list[torch.Tensor] = []
        self._plan = ExportPlan(())
        self._sender: RefitSender | None = None
        self._metrics: dict[str, float] = {}

    def connect(self, transport: RefitTransport) -> ExportPlan:
        """Runs one export to learn which tensors each export yields, and makes this rank's sender for them."""
        self._disconnect()
        self._plan = ExportPlan.of(self._weights())
        self._sources = list(self._reads.tensors())
        self._sender = transport.connect(self._plan, rank=self._rank, bucket_bytes=self._bucket_bytes)
        return self._plan

    def send(self) -> dict[str, int]:
        """Exports and sends the weights; returns the checksums of those that this rank sent (see `RefitSender`).

        Raises:
            ValueError: The export has changed since `connect`.
        """
        if self._sender is None:
            raise RuntimeError("No transport is connected; call prepare_refit_info before send_weights.")
        start = time.perf_counter()
        checksums = self._sender.send(self)
        self._metrics = {**self._sender.metrics, "send_s": time.perf_counter() - start}
        return checksums

    def close(self) -> None:
        """Frees what the sender keeps: NCCL does not end a process group while a graph holds one of its collectives."""
        from nemo_offload_rl.refit.loads import EngineLostError  # imports Ray, which a worker needs only for a refit

        with contextlib.suppress(EngineLostError):  # engines may end before the policy
            self._disconnect()

    def take_metrics(self) -> dict[str, float]:
        """Returns the metrics of the last `send` as refit/NAME, and clears them.

        They are its sender's metrics, and `send_s`, the seconds of the whole call.
        """
        metrics, self._metrics = self._metrics, {}
        return {f"refit/{name}": value for name, value in metrics.items()}

    def _disconnect(self) -> None:
        if self._sender is not None:
            sender, self._sender = self._sender, None  # it must not send after an error of its close
            sender.close()

    def __iter__(self) -> Iterator[NamedTensor]:
        """See `Export`.

        Raises:
            ValueError: The export has changed since `connect`.
        """
        return self._plan.checked(self._weights())

    def addresses(self) -> tuple[int, ...]:
        """See `Export`."""
        return addresses_of(self._sources)

    def why_not_recorded(self) -> str:
        """See `Export`."""
        return why_not_recorded(self._sources)

    def collectives(self) -> str:
        """See `Export`."""
        return self._reads.collectives()

    def agree(self, yes: bool) -> bool:
        """See `Export`."""
        return self._reads.agree(yes)


class NullSender(RefitSender):
    """Takes part in the export, which is collective, but sends nothing."""

    def send(self, weights: Iterable[NamedTensor]) -> dict[str, int]:
        """Exhausts the export without sending its weights."""
        deque(weights, maxlen=0)
        return {}
