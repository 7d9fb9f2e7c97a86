"""What a weight transport is: a sender in each policy rank, and buckets that engines load."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

from nemo_offload_rl.refit.plan import ExportPlan, NamedTensor


class WeightBucket(Protocol):
    """Some weights on their way, as an engine's process gets them."""

    def named_tensors(self) -> Sequence[NamedTensor]:
        """(Hugging Face name, whole tensor) pairs, to be read until `load_weights` returns."""
        ...


class WeightLoader(Protocol):
    """The part of an engine, a Ray actor's class, that takes weights from every transport."""

    def load_weights(self, bucket: WeightBucket) -> None:
        """Load the tensors of a bucket; on return they have been read, and the sender may write over them.

        Raises:
            ValueError: If a name is unknown, or a shape or dtype differs.
        """
        ...


@dataclass(frozen=True)
class Receiver:
    """One process of an engine that loads weights, as a transport holds it.

    Attributes:
        actor: Ray's handle of a `WeightLoader`.
        ranks: The policy ranks whose bundles (GPUs) the process shares.
    """

    actor: Any
    ranks: tuple[int, ...]

    def load_weights(self, bucket: Any) -> Any:
        """Start to load a `WeightBucket`, or a reference to one; returns the reference that `ray.get` waits for."""
        return self.actor.load_weights.remote(bucket)


@dataclass(frozen=True)
class RefitReport:
    """What one refit moved.

    Attributes:
        num_tensors: Tensors sent.
        num_bytes: Their bytes, counted once however many receivers there are.
        num_buckets: Buckets they were sent in.
        seconds: Wall time, the export of the weights included.
        checksums: `tensor_checksum` of each tensor as sent, by Hugging Face name; None where checking is off.
    """

    num_tensors: int
    num_bytes: int
    num_buckets: int
    seconds: float
    checksums: dict[str, int] | None

    @classmethod
    def of_ranks(cls, reports: Sequence[Self | None]) -> Self:
        """Sum up what the ranks have sent; None for a rank that sends nothing.

        Raises:
            RuntimeError: If two ranks have sent different tensors under one name.
        """
        sent = [report for report in reports if report is not None]
        checksums: dict[str, int] = {}
        for report in sent:
            for name, checksum in (report.checksums or {}).items():
                if checksums.setdefault(name, checksum) != checksum:
                    raise RuntimeError(f"Two ranks of the policy have sent different weights as {name}.")
        return cls(
            num_tensors=sum(report.num_tensors for report in sent),
            num_bytes=sum(report.num_bytes for report in sent),
            num_buckets=sum(report.num_buckets for report in sent),
            seconds=max(report.seconds for report in sent),
            checksums=None if any(report.checksums is None for report in sent) else checksums,
        )


class RefitSender(Protocol):
    """One policy rank's end of a transport, which lives as long as the rank: buffers and handles are made once."""

    def send(self, weights: Iterable[NamedTensor]) -> RefitReport | None:
        """Send the weights and return once the receivers have loaded them.

        The export behind `weights` is collective: every rank draws them to the end, also one that sends nothing and
        returns None.

        Args:
            weights: (Hugging Face name, tensor) in the plan's order. A tensor is valid until the next is drawn.
        """
        ...


class RefitTransport(Protocol):
    """A way of weights to the receivers it was built for; it is pickled into every policy rank."""

    def connect(self, plan: ExportPlan, *, rank: int, bucket_bytes: int) -> RefitSender:
        """Make a rank's sender.

        Args:
            plan: What each refit will send.
            rank: Of this process.
            bucket_bytes: The most bytes of tensors in one bucket (`policy.refit_buffer_size_gb`).
        """
        ...
