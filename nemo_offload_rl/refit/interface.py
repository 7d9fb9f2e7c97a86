"""Defines the interface of a weight transport: a sender in each policy rank, and buckets that engines load."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

from nemo_offload_rl.refit.plan import ExportPlan, NamedTensor


class WeightBucket(Protocol):
    """Defines a bucket of weights, as an engine's process receives it."""

    def opened(self) -> AbstractContextManager[Sequence[NamedTensor]]:
        """Yields (Hugging Face name, whole tensor) pairs, which may be read only inside the context.

        There may be none: some buckets only tell the receiver's process of memory that it shares with the sender.
        It may be called once, and not in the sender's process.
        """
        ...


class WeightLoader(Protocol):
    """Defines the part of an engine's Ray actor class that takes weights from any transport."""

    def process(self) -> tuple[str, int]:
        """Returns this node's address and the process id there."""
        ...

    def load_weights(self, bucket: WeightBucket) -> float:
        """Loads the tensors of a bucket; on return they have been read, and the sender may overwrite them.

        Returns:
            The seconds that it took, including the time to make the tensors readable here.

        Raises:
            ValueError: If a name is unknown, or a shape or dtype differs.
        """
        ...


@dataclass(frozen=True)
class Receiver:
    """Starts loads in one process of an engine for a transport.

    Attributes:
        actor: Ray's handle of a `WeightLoader`.
        ranks: The process's bundles (GPUs), by the policy ranks that it shares them with; higher numbers for its own.
        name: The engine's name in messages.
    """

    actor: Any
    ranks: tuple[int, ...]
    name: str = "a generation engine"

    def load_weights(self, bucket: Any) -> Any:
        """Starts to load a `WeightBucket`, or a reference to one; returns the reference for `ray.get`."""
        return self.actor.load_weights.remote(bucket)


class Export(Protocol):
    """Yields a rank's weights under their Hugging Face names."""

    def __iter__(self) -> Iterator[NamedTensor]:
        """Starts an export: (Hugging Face name, tensor) in the plan's order. A tensor is valid until the next is drawn.

        It is collective: either all ranks draw it to the end, including those that send nothing, or, if a transport has
        recorded the export, none of them does.
        """
        ...

    def addresses(self) -> tuple[int, ...]:
        """Returns the addresses of all tensors that an export reads; a recording is valid while they are unchanged."""
        ...

    def why_not_recorded(self) -> str:
        """Returns why this rank's exports must be driven from Python; empty if they may be recorded."""
        ...

    def collectives(self) -> str:
        """Returns the kinds of parallelism over which ranks exchange weights in an export; empty if each has all."""
        ...

    def agree(self, yes: bool) -> bool:
        """Returns whether all ranks say yes; collective if ranks exchange weights in an export."""
        ...


class RefitSender(Protocol):
    """Sends one policy rank's weights in each refit.

    It lives as long as the rank, so that buffers and handles are made once.
    """

    metrics: Mapping[str, float] = MappingProxyType({})
    """Metrics of the last `send`, as far as they are known.

    `export_s`, until the tensors were in buckets; `load_s`, of the receivers' loads, which overlap with the exports of
    other buckets; `first_kernel_to_loaded_s`, from the first bucket's export until the last receiver has reported that
    everything is loaded, without mapping and unmapping of buffers; `verify_s`, of checksums; `graphs`, 1 if the export
    was replayed from CUDA graphs, and `graph_pool_gib`, the memory of their temporaries.
    """

    def send(self, weights: Export) -> dict[str, int]:
        """Sends the weights and returns once the receivers have loaded them.

        Args:
            weights: The export, with the tensors of the plan.

        Returns:
            `tensor_checksum` of each tensor that this rank has sent, by name; empty if the transport does not verify.
        """
        ...

    def close(self) -> None:
        """Frees what the sender keeps between refits, here and at the receivers; does nothing by default."""
        return None


class RefitTransport(Protocol):
    """Makes each rank's sender to the receivers that it was built for.

    It is pickled into every policy rank.
    """

    def connect(self, plan: ExportPlan, *, rank: int, bucket_bytes: int) -> RefitSender:
        """Makes a rank's sender.

        Args:
            plan: The tensors that each refit sends.
            rank: The rank of this process.
            bucket_bytes: Size of the memory for tensors in transit (`policy.refit_buffer_size_gb`).
        """
        ...
