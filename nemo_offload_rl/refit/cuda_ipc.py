"""Weights through memory that a policy rank and the engine on its GPU share: no copy through the host.

On a CPU it is host memory that both processes map. Buckets take turns in two buffers: while the engine loads one, the
rank exports the next.
"""

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ray
import torch

from nemo_offload_rl.memory.gpu_range import OutOfGpuMemoryError
from nemo_offload_rl.memory.shared_buffer import BufferHandle, SharedBuffer, make_shared_buffer
from nemo_offload_rl.memory.units import GIB
from nemo_offload_rl.refit.checksum import tensor_checksum
from nemo_offload_rl.refit.export import DrawingSender
from nemo_offload_rl.refit.interface import Receiver, RefitSender
from nemo_offload_rl.refit.plan import BucketLayout, ExportPlan, NamedTensor

NUM_BUFFERS = 2
_SETTLE_TIMEOUT_S = 60


@dataclass(frozen=True)
class SharedBucket:
    """Some tensors in a buffer of the sender's (see `WeightBucket`).

    Attributes:
        layout: Where they are in it.
        handle: Of the buffer.
    """

    layout: BucketLayout
    handle: BufferHandle

    @contextlib.contextmanager
    def opened(self) -> Iterator[list[NamedTensor]]:
        """Map the buffer; all that was started on the GPU has ended when the context ends."""
        with self.handle.opened() as buffer:
            yield self.layout.views(buffer)


@dataclass(frozen=True)
class CudaIpcTransport:
    """Has each rank send to the receivers whose first rank it is; see `RefitTransport`.

    Attributes:
        receivers: Each is on the GPU of its first rank.
        verify: Whether senders return the checksums of what they have sent.
    """

    receivers: Sequence[Receiver]
    verify: bool

    def connect(self, plan: ExportPlan, *, rank: int, bucket_bytes: int) -> RefitSender:
        """Make a rank's sender; its buffers take `bucket_bytes` together, more where a tensor is above half of that."""
        receivers = [receiver for receiver in self.receivers if receiver.ranks[0] == rank]
        if not receivers:
            return DrawingSender()
        return CudaIpcSender(plan.buckets(max(1, bucket_bytes // NUM_BUFFERS)), receivers, verify=self.verify)


class CudaIpcSender:
    """Copies bucket after bucket into buffers that live as long as one refit."""

    def __init__(self, buckets: Sequence[BucketLayout], receivers: Sequence[Receiver], *, verify: bool) -> None:
        self._buckets = buckets
        self._receivers = receivers
        self._verify = verify
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def send(self, weights: Iterable[NamedTensor]) -> dict[str, int]:
        """Send every bucket and return once all receivers have loaded all of them (see `RefitSender`)."""
        weights = iter(weights)
        checksums: dict[str, int] = {}
        loads: deque[list[Any]] = deque()  # of the last buckets, a list of references each
        with self._buffers() as buffers:
            try:
                for number, bucket in enumerate(self._buckets):
                    if len(loads) == len(buffers):
                        ray.get(loads.popleft())
                    buffer = buffers[number % len(buffers)]
                    self._fill(bucket, buffer, weights, checksums)
                    shared = SharedBucket(bucket, buffer.handle)
                    loads.append([receiver.load_weights(shared) for receiver in self._receivers])
                deque(weights, maxlen=0)  # to the end, where the export checks that there is no more
                while loads:
                    ray.get(loads.popleft())
            finally:
                # A receiver may still have a buffer open, which must not be freed under it.
                left = [reference for references in loads for reference in references]
                if left:
                    ray.wait(left, num_returns=len(left), timeout=_SETTLE_TIMEOUT_S)
        return checksums

    def _fill(
        self, bucket: BucketLayout, buffer: SharedBuffer, weights: Iterator[NamedTensor], checksums: dict[str, int]
    ) -> None:
        for (_, slot), (name, tensor) in zip(bucket.views(buffer.tensor), weights, strict=False):
            slot.copy_(tensor.detach(), non_blocking=True)
            if self._verify:
                checksums[name] = tensor_checksum(tensor)
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # another process reads it now

    @contextlib.contextmanager
    def _buffers(self) -> Iterator[list[SharedBuffer]]:
        sizes = [
            max(1, *(bucket.num_bytes for bucket in self._buckets[first::NUM_BUFFERS]))
            for first in range(min(NUM_BUFFERS, len(self._buckets)))
        ]
        with contextlib.ExitStack() as stack:
            buffers = []
            for size in sizes:
                try:
                    buffers.append(make_shared_buffer(size, self._device))
                except OutOfGpuMemoryError as error:
                    raise OutOfGpuMemoryError(
                        f"The refit finds no {sum(sizes) / GIB:.2f} GiB of GPU memory for its buckets, beside the "
                        "policy's and the engine's weights; lower policy.refit_buffer_size_gb or "
                        "policy.generation.vllm_cfg.gpu_memory_utilization."
                    ) from error
                stack.callback(buffers[-1].close)
            yield buffers
