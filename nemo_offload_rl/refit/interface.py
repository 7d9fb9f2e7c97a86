"""Defines a weight transport: a sender in each policy rank, and buckets that engines load."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from nemo_offload_rl.refit.plan import ExportPlan, NamedTensor


class WeightBucket(Protocol):
    """Some weights on their way, as an engine's process gets them."""

    def opened(self) -> AbstractContextManager[Sequence[NamedTensor]]:
        """(Hugging Face name, whole tensor) pairs, to be read in the context; once, and not in the sender's process."""
        ...


class WeightLoader(Protocol):
    """The part of an engine, a Ray actor's class, that takes weights from every transport."""

    def process(self) -> tuple[str, int]:
        """This node's address and the process id there."""
        ...

    def load_weights(self, bucket: WeightBucket) -> None:
        """Load the tensors of a bucket; on return they have been read, and the sender may write over them.

        Raises:
            ValueError: If a name is unknown, or a shape or dtype differs.
        """
        ...


@dataclass(frozen=True)
class Receiver:
    """A transport's handle on one process of an engine that loads weights.

    Attributes:
        actor: Ray's handle of a `WeightLoader`.
        ranks: The bundles (GPUs) that the process has: those of policy ranks, or of its own above them.
        name: For messages.
    """

    actor: Any
    ranks: tuple[int, ...]
    name: str = "a generation engine"

    def load_weights(self, bucket: Any) -> Any:
        """Start to load a `WeightBucket`, or a reference to one; returns the reference that `ray.get` waits for."""
        return self.actor.load_weights.remote(bucket)


class RefitSender(Protocol):
    """One policy rank's end of a transport, which lives as long as the rank: buffers and handles are made once."""

    def send(self, weights: Iterable[NamedTensor]) -> dict[str, int]:
        """Send the weights and return once the receivers have loaded them.

        The export behind `weights` is collective: either all ranks draw them to the end, those that send nothing too,
        or, where a transport has recorded the export, none of them does.

        Args:
            weights: (Hugging Face name, tensor) in the plan's order. A tensor is valid until the next is drawn.

        Returns:
            `tensor_checksum` of each tensor that this rank has sent, by name; none where the transport does not verify.
        """
        ...


class RefitTransport(Protocol):
    """A way of weights to the receivers it was built for; it is pickled into every policy rank."""

    def connect(self, plan: ExportPlan, *, rank: int, bucket_bytes: int) -> RefitSender:
        """Make a rank's sender.

        Args:
            plan: What each refit will send.
            rank: Of this process.
            bucket_bytes: Of memory for tensors on their way (`policy.refit_buffer_size_gb`).
        """
        ...
