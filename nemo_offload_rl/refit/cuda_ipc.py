"""Sends weights through memory that a policy rank and the engine on its GPU share, without a copy through the host.

On a CPU, both processes map the same host memory. Buckets alternate between two buffers: while the engine loads one,
the rank exports the next.
"""

import contextlib
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from nemo_offload_rl.memory.shared_buffer import BufferHandle, SharedBuffer, make_shared_buffer
from nemo_offload_rl.refit.bucket_memory import explain_refit_oom
from nemo_offload_rl.refit.checksum import tensor_checksum
from nemo_offload_rl.refit.export import NullSender
from nemo_offload_rl.refit.graphs import MIN_GAIN_S, GraphSender
from nemo_offload_rl.refit.interface import Receiver, RefitSender
from nemo_offload_rl.refit.loads import Loads
from nemo_offload_rl.refit.plan import BucketLayout, ExportPlan, NamedTensor
from nemo_offload_rl.refit.recorder import CudaRecorder

NUM_BUFFERS = 2


@dataclass(frozen=True)
class SharedBucket:
    """Describes a bucket in a buffer that the sender shares (see `WeightBucket`).

    Attributes:
        layout: Positions of its tensors in the buffer.
        handle: Handle by which the receiver's process opens the buffer.
    """

    layout: BucketLayout
    handle: BufferHandle

    @contextlib.contextmanager
    def opened(self) -> Iterator[list[NamedTensor]]:
        """Maps the buffer; waits at the end for all GPU work that was started in the context."""
        with self.handle.opened() as buffer:
            yield self.layout.views(buffer)


@dataclass(frozen=True)
class CudaIpcTransport:
    """Makes each rank send to the receivers whose first rank it is; see `RefitTransport`.

    Attributes:
        receivers: Each is on the GPU of its first rank.
        verify: Whether senders return the checksums of the weights they have sent.
        graphs: Whether to replay the export from CUDA graphs if that is possible and faster.
        min_gain_s: Seconds that graphs must save in a refit to be used.
    """

    receivers: Sequence[Receiver]
    verify: bool
    graphs: bool = True
    min_gain_s: float = MIN_GAIN_S

    def connect(self, plan: ExportPlan, *, rank: int, bucket_bytes: int) -> RefitSender:
        """Makes a rank's sender.

        Its buffers take `bucket_bytes` together, or more if a tensor exceeds half of that.
        """
        receivers = [receiver for receiver in self.receivers if receiver.ranks[0] == rank]
        if not receivers:
            return NullSender()
        half = plan.buckets(max(1, bucket_bytes // NUM_BUFFERS))
        streamed = CudaIpcSender(half, receivers, verify=self.verify)
        if not self.graphs:
            return streamed
        fits = plan.num_bytes <= bucket_bytes  # then a single bucket has all weights
        return GraphSender(
            plan.buckets(bucket_bytes) if fits else half,
            1 if fits else NUM_BUFFERS,
            receivers,
            streamed,
            verify=self.verify,
            make_recorder=CudaRecorder,
            device=current_device(),
            min_gain_s=self.min_gain_s,
        )


class CudaIpcSender(RefitSender):
    """Copies bucket after bucket into buffers that exist only during a refit."""

    def __init__(self, buckets: Sequence[BucketLayout], receivers: Sequence[Receiver], *, verify: bool) -> None:
        self._buckets = buckets
        self._receivers = receivers
        self._verify = verify
        self._device = current_device()
        self._verify_s = 0.0
        self.metrics = {}

    def send(self, weights: Iterable[NamedTensor]) -> dict[str, int]:
        """Sends every bucket and returns once all receivers have loaded all of them (see `RefitSender`).

        Raises:
            EngineLostError: If an engine's process has ended.
            RuntimeError: If an engine has failed, for example because it cannot open a buffer.
            ValueError: If an engine has refused a weight.
        """
        weights = iter(weights)
        checksums: dict[str, int] = {}
        export_s = self._verify_s = 0.0
        # When an error ends the refit, a receiver may still have a buffer open, which must not be freed yet.
        with self._buffers() as buffers, (loads := Loads(self._receivers, len(buffers))).settled():
            began = time.perf_counter()
            for number, bucket in enumerate(self._buckets):
                loads.wait_for_room()
                buffer = buffers[number % len(buffers)]
                start = time.perf_counter()
                self._fill(bucket, buffer, weights, checksums)
                export_s += time.perf_counter() - start
                loads.start(SharedBucket(bucket, buffer.handle), bucket.tensors)
            deque(weights, maxlen=0)  # exhaust the export, which checks at its end that there are no more tensors
            loads.wait()
            first_kernel_to_loaded_s = time.perf_counter() - began
        self.metrics = {
            "export_s": export_s - self._verify_s,
            "verify_s": self._verify_s,
            "load_s": loads.seconds,
            "first_kernel_to_loaded_s": first_kernel_to_loaded_s,
        }
        return checksums

    def _fill(
        self, bucket: BucketLayout, buffer: SharedBuffer, weights: Iterator[NamedTensor], checksums: dict[str, int]
    ) -> None:
        for (_, slot), (name, tensor) in zip(bucket.views(buffer.tensor), weights, strict=False):
            slot.copy_(tensor.detach(), non_blocking=True)
            if self._verify:
                start = time.perf_counter()
                checksums[name] = tensor_checksum(tensor)
                self._verify_s += time.perf_counter() - start
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # the receiver's process reads the buffer next

    @contextlib.contextmanager
    def _buffers(self) -> Iterator[list[SharedBuffer]]:
        sizes = [
            max(1, *(bucket.num_bytes for bucket in self._buckets[first::NUM_BUFFERS]))
            for first in range(min(NUM_BUFFERS, len(self._buckets)))
        ]
        with contextlib.ExitStack() as stack:
            buffers = []
            for size in sizes:
                with explain_refit_oom(sum(sizes)):
                    buffers.append(make_shared_buffer(size, self._device))
                stack.callback(buffers[-1].close)
            yield buffers


def current_device() -> torch.device:
    """Returns this process's GPU, or the CPU if there is none."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
