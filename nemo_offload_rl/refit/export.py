"""The policy's side of a refit, the same on every rank and with every transport."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import torch

from nemo_offload_rl.refit.interface import RefitSender, RefitTransport
from nemo_offload_rl.refit.plan import ExportPlan, NamedTensor
from nemo_offload_rl.refit.recorder import addresses_of, why_not_recorded


class ExportReads(Protocol):
    """Says which tensors an export reads, and over which kinds of parallelism its ranks exchange them."""

    def tensors(self) -> Iterable[torch.Tensor]:
        """Return all tensors that an export reads, the same objects each time; none before the first export."""
        ...

    def collectives(self) -> str:
        """Return over which kinds of parallelism ranks exchange weights in an export; nothing where each has all."""
        ...


class _Unknown:
    """Says nothing of what an export reads, so that it is driven from Python."""

    def tensors(self) -> Iterable[torch.Tensor]:
        return ()

    def collectives(self) -> str:
        return ""


UNKNOWN: ExportReads = _Unknown()


class WeightExport:
    """Sends one rank's export of the weights, which must bring the same tensors each time.

    Args:
        weights: starts an export; collective.
        rank: of this process.
        bucket_bytes: the most bytes of tensors in one bucket.
        reads: where an export's weights come from.
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
        """Learn from one export what each will bring, and make this rank's sender for it."""
        if self._sender is not None:
            self._sender.close()
        self._plan = ExportPlan.of(self._weights())
        self._sources = list(self._reads.tensors())
        self._sender = transport.connect(self._plan, rank=self._rank, bucket_bytes=self._bucket_bytes)
        return self._plan

    def send(self) -> dict[str, int]:
        """Export the weights and send them; returns the checksums of those that this rank has sent (see `RefitSender`).

        Raises:
            ValueError: The export has changed since `connect`.
        """
        if self._sender is None:
            raise RuntimeError("No transport is connected; call prepare_refit_info before send_weights.")
        start = time.perf_counter()
        checksums = self._sender.send(self)
        self._metrics = {**self._sender.metrics, "send_s": time.perf_counter() - start}
        return checksums

    def take_metrics(self) -> dict[str, float]:
        """Return the figures of the last `send` once, as refit/NAME: its sender's, and `send_s`, which is all of it."""
        metrics, self._metrics = self._metrics, {}
        return {f"refit/{name}": value for name, value in metrics.items()}

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
        if collectives := self._reads.collectives():
            return f"ranks exchange parts of the weights in an export ({collectives})"
        return why_not_recorded(self._sources)


class DrawingSender(RefitSender):
    """Takes part in the export, which is collective, and sends nothing."""

    def send(self, weights: Iterable[NamedTensor]) -> dict[str, int]:
        """Draw all weights."""
        deque(weights, maxlen=0)
        return {}
