"""Weights through Ray's object store: works on every machine, at the price of two copies through host memory."""

import time
import warnings
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
import torch

from nemo_offload_rl.refit.checksum import tensor_checksum
from nemo_offload_rl.refit.interface import NamedTensor, RefitReport

MAX_BUCKETS_IN_FLIGHT = 2

# Tensors start at multiples of this in a packed bucket, so that every dtype's view of it is aligned.
_ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class PackedBucket:
    """Some tensors in one host buffer, which the object store hands to a process on the same node without a copy.

    Attributes:
        layout: (name, dtype, shape, byte offset) of each tensor.
        data: uint8 [num_bytes].
    """

    layout: tuple[tuple[str, torch.dtype, tuple[int, ...], int], ...]
    data: np.ndarray

    @classmethod
    def pack(cls, bucket: Sequence[NamedTensor]) -> "PackedBucket":
        """Copy tensors from whatever device they are on into one host buffer."""
        layout = []
        offset = 0
        for name, tensor in bucket:
            layout.append((name, tensor.dtype, tuple(tensor.shape), offset))
            offset += -(-tensor.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        data = torch.zeros(offset, dtype=torch.uint8)
        for (_, dtype, shape, start), (_, tensor) in zip(layout, bucket, strict=True):
            data[start : start + tensor.nbytes].view(dtype).view(shape).copy_(tensor.detach())
        return cls(tuple(layout), data.numpy())

    def unpack(self) -> list[NamedTensor]:
        """Views of the buffer as (name, CPU tensor); to be read, not written: the buffer may be shared."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            data = torch.from_numpy(self.data)
        return [
            (name, data[start : start + dtype.itemsize * int(np.prod(shape, dtype=np.int64))].view(dtype).view(shape))
            for name, dtype, shape, start in self.layout
        ]


class ObjectStoreTransport:
    """Puts each bucket into the object store once and has every receiver load it, two buckets in flight at most."""

    def __init__(self, receivers: Sequence[Any], *, verify: bool) -> None:
        """Bind the transport to its receivers.

        Args:
            receivers: Handles of Ray actors with a method `load_weights(bucket: PackedBucket)`.
            verify: Whether the report carries the checksums of what was sent.

        Raises:
            ValueError: If there is no receiver.
        """
        if not receivers:
            raise ValueError("A weight transport has no receiver; pass the generation engine's `receivers`.")
        self._receivers = list(receivers)
        self._verify = verify

    def send(self, buckets: Iterable[list[NamedTensor]]) -> RefitReport:
        """Send every bucket; returns once all receivers have loaded all of them (see `RefitTransport`)."""
        start = time.perf_counter()
        num_tensors = num_bytes = num_buckets = 0
        checksums: dict[str, int] = {}
        in_flight: deque[list[Any]] = deque()
        for bucket in buckets:
            num_buckets += 1
            num_tensors += len(bucket)
            num_bytes += sum(tensor.nbytes for _, tensor in bucket)
            if self._verify:
                checksums.update((name, tensor_checksum(tensor)) for name, tensor in bucket)
            if len(in_flight) == MAX_BUCKETS_IN_FLIGHT:
                ray.get(in_flight.popleft())
            packed = ray.put(PackedBucket.pack(bucket))
            in_flight.append([receiver.load_weights.remote(packed) for receiver in self._receivers])
        while in_flight:
            ray.get(in_flight.popleft())
        return RefitReport(
            num_tensors=num_tensors,
            num_bytes=num_bytes,
            num_buckets=num_buckets,
            seconds=time.perf_counter() - start,
            checksums=checksums if self._verify else None,
        )
