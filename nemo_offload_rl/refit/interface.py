"""Defines a weight transport: a sender in each policy rank, and buckets that engines load."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

from nemo_offload_rl.refit.plan import ExportPlan, NamedTensor


class WeightBucket(Protocol):
    """Defines a bucket of weights, as an engine's process gets it."""

    def opened(self) -> AbstractContextManager[Sequence[NamedTensor]]:
        """(Hugging Face name, whole tensor) pairs, to be read in the context; once, and not in the sender's process."""
        ...


class WeightLoader(Protocol):
    """Defines the part of an engine, a Ray actor's class, that takes weights from every transport."""

    def process(self) -> tuple[str, int]:
        """This node's address and the process id there."""
        ...

    def load_weights(self, bucket: WeightBucket) -> float:
        """Load the tensors of a bucket; on return they have been read, and the sender may write over them.

        Returns:
            The seconds that it took, with all that makes the tensors readable here.

        Raises:
            ValueError: If a name is unknown, or a shape or dtype differs.
        """
        ...


@dataclass(frozen=True)
class Receiver:
    """Starts the loads of one process of an engine, on behalf of a transport.

    Attributes:
        actor: Ray's handle of a `WeightLoader`.
        ranks: The bundles (GPUs) that the process has: those of policy ranks, or of its own above them.
        name: What messages call the engine.
    """

    actor: Any
    ranks: tuple[int, ...]
    name: str = "a generation engine"

    def load_weights(self, bucket: Any) -> Any:
        """Start to load a `WeightBucket`, or a reference to one; returns the reference that `ray.get` waits for."""
        return self.actor.load_weights.remote(bucket)


class Export(Protocol):
    """Yields a rank's weights under their Hugging Face names."""

    def __iter__(self) -> Iterator[NamedTensor]:
        """Start an export: (Hugging Face name, tensor) in the plan's order. A tensor is valid until the next is drawn.

        It is collective: either all ranks draw it to the end, those that send nothing too, or, where a transport has
        recorded the export, none of them does.
        """
        ...

    def addresses(self) -> tuple[int, ...]:
        """Return where all that an export reads is now; as long as that stays, a recorded one can be replayed."""
        ...

    def why_not_recorded(self) -> str:
        """Return why exports must be driven from Python; nothing where one may be recorded."""
        ...


class RefitSender(Protocol):
    """Sends one policy rank's weights in each refit; lives as long as the rank: buffers and handles are made once."""

    metrics: Mapping[str, float] = MappingProxyType({})
    """Figures of the last `send`, each where it is known.

    `export_s`, until the tensors were in buckets; `load_s`, of the receivers' loads, which other buckets' exports
    overlap; `first_kernel_to_loaded_s`, from the first bucket's export until the last receiver has said that all is
    loaded, so without the mapping and unmapping of buffers; `verify_s`, of checksums; `graphs`, 1 where the export was
    replayed from CUDA graphs, and `graph_pool_gib`, the memory that their temporaries keep.
    """

    def send(self, weights: Export) -> dict[str, int]:
        """Send the weights and return once the receivers have loaded them.

        Args:
            weights: The same as in the plan.

        Returns:
            `tensor_checksum` of each tensor that this rank has sent, by name; none where the transport does not verify.
        """
        ...

    def close(self) -> None:
        """Give back what is kept between refits, here and at the receivers; nothing unless a sender says so."""
        return None


class RefitTransport(Protocol):
    """Makes each rank's sender to the receivers it was built for; it is pickled into every policy rank."""

    def connect(self, plan: ExportPlan, *, rank: int, bucket_bytes: int) -> RefitSender:
        """Make a rank's sender.

        Args:
            plan: What each refit will send.
            rank: Of this process.
            bucket_bytes: Of memory for tensors on their way (`policy.refit_buffer_size_gb`).
        """
        ...
