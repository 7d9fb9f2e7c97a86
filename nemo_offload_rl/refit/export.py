"""The policy's side of a refit, the same on every rank and with every transport."""

from collections import deque
from collections.abc import Callable, Iterable

from nemo_offload_rl.refit.interface import RefitSender, RefitTransport
from nemo_offload_rl.refit.plan import ExportPlan, NamedTensor


class WeightExport:
    """Sends one rank's export of the weights, which must bring the same tensors each time.

    Args:
        weights: starts an export; collective.
        rank: of this process.
        bucket_bytes: the most bytes of tensors in one bucket.
    """

    def __init__(self, weights: Callable[[], Iterable[NamedTensor]], *, rank: int, bucket_bytes: int) -> None:
        self._weights = weights
        self._rank = rank
        self._bucket_bytes = bucket_bytes
        self._plan = ExportPlan(())
        self._sender: RefitSender | None = None

    def connect(self, transport: RefitTransport) -> ExportPlan:
        """Learn from one export what each will bring, and make this rank's sender for it."""
        self._plan = ExportPlan.of(self._weights())
        self._sender = transport.connect(self._plan, rank=self._rank, bucket_bytes=self._bucket_bytes)
        return self._plan

    def send(self) -> dict[str, int]:
        """Export the weights and send them; returns the checksums of those that this rank has sent (see `RefitSender`).

        Raises:
            ValueError: The export has changed since `connect`.
        """
        if self._sender is None:
            raise RuntimeError("No transport is connected; call prepare_refit_info before send_weights.")
        return self._sender.send(self._plan.checked(self._weights()))


class DrawingSender:
    """Takes part in the export, which is collective, and sends nothing."""

    def send(self, weights: Iterable[NamedTensor]) -> dict[str, int]:
        """Draw all weights."""
        deque(weights, maxlen=0)
        return {}
