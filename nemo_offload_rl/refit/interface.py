"""What a weight transport is, and how weights are grouped on their way through it."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

NamedTensor = tuple[str, torch.Tensor]


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


class RefitTransport(Protocol):
    """Pushes weights to the receivers it was built for; it is pickled into the worker that sends."""

    def send(self, buckets: Iterable[list[NamedTensor]]) -> RefitReport:
        """Send every bucket and return once all receivers have loaded all of them.

        Args:
            buckets: Lists of (Hugging Face name, tensor). A tensor need only stay valid until the next bucket is drawn.
        """
        ...


def bucketize(named_tensors: Iterable[NamedTensor], max_bytes: int) -> Iterator[list[NamedTensor]]:
    """Group tensors, in their order, into lists of at most `max_bytes`; a larger tensor is a list of its own.

    Args:
        named_tensors: (name, tensor) pairs, drawn only as far as the current bucket needs.
        max_bytes: The most bytes of one bucket; positive.

    Raises:
        ValueError: If `max_bytes` is not positive.
    """
    if max_bytes <= 0:
        raise ValueError(f"The refit bucket size is {max_bytes} bytes; it must be positive.")
    return _group(named_tensors, max_bytes)


def _group(named_tensors: Iterable[NamedTensor], max_bytes: int) -> Iterator[list[NamedTensor]]:
    bucket: list[NamedTensor] = []
    bucket_bytes = 0
    for name, tensor in named_tensors:
        if bucket and bucket_bytes + tensor.nbytes > max_bytes:
            yield bucket
            bucket, bucket_bytes = [], 0
        bucket.append((name, tensor))
        bucket_bytes += tensor.nbytes
    if bucket:
        yield bucket
