"""Sends weights through memory that a policy rank and the engine on its GPU share, without a copy through the host.

On a CPU, both processes map the same host memory. Buckets alternate between two buffers: while the engine loads one,
the rank exports the next.
"""

import contextlib
import itertools
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from nemo_offload_rl.memory.shared_buffer import BufferHandle, SharedBuffer, make_shared_buffer
from nemo_offload_rl.memory.units import MIB
from nemo_offload_rl.refit.export import NullSender
from nemo_offload_rl.refit.fixed_buckets import explain_refit_oom
from nemo_offload_rl.refit.graphs import MIN_GAIN_S, GraphSender
from nemo_offload_rl.refit.interface import Receiver, RefitSender
from nemo_offload_rl.refit.loads import ExportedTensors, OpenBucket, send_buckets
from nemo_offload_rl.refit.plan import BucketLayout, ExportPlan, NamedTensor, buffer_sizes
from nemo_offload_rl.refit.recorder import CudaRecorder

logger = logging.getLogger(__name__)

NUM_BUFFERS = 2

_KEPT: list[contextlib.ExitStack] = []
"""Buffers that an engine may still read after an error; freed, their memory would be given to someone else.

Buckets with fixed addresses need no such list: the driver frees their memory only once no process maps it.
"""


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
        graphs: Whether buckets keep their addresses if that is possible, so that CUDA graphs can be replayed.
        record_export: Whether, with `graphs`, the export may be replayed as well as the receivers' loads.
        min_gain_s: Seconds that replaying the export must save in a refit.
    """

    receivers: Sequence[Receiver]
    verify: bool
    graphs: bool = True
    record_export: bool = True
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
            make_recorder=CudaRecorder if self.record_export else None,
            device=current_device(),
            min_gain_s=self.min_gain_s,
            record_collectives=self._all_ranks_send() and os.environ.get("NCCL_GRAPH_REGISTER") == "0",
            max_pool_bytes=bucket_bytes,
        )

    def _all_ranks_send(self) -> bool:
        num_ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        return {receiver.ranks[0] for receiver in self.receivers} >= set(range(num_ranks))


class CudaIpcSender(RefitSender):
    """Copies bucket after bucket into buffers that exist only during a refit, driven from Python."""

    def __init__(self, buckets: Sequence[BucketLayout], receivers: Sequence[Receiver], *, verify: bool) -> None:
        self._layouts = buckets
        self._receivers = receivers
        self._verify = verify
        self._device = current_device()
        self.metrics = {}

    def send(self, weights: Iterable[NamedTensor]) -> dict[str, int]:
        """Sends every bucket and returns once all receivers have loaded all of them (see `RefitSender`).

        Raises:
            OutOfGpuMemoryError: If there is no memory for the buffers; see `send_buckets` for other errors.
        """
        exported = ExportedTensors(weights, verify=self._verify)
        with contextlib.ExitStack() as stack:
            buckets = self._buckets(stack)
            keep = partial(self._keep, stack)
            times = send_buckets(buckets, NUM_BUFFERS, self._receivers, exported, keep_memory=keep)
        self.metrics = {**times, "export_s": times["export_s"] - exported.verify_s, "verify_s": exported.verify_s}
        return exported.checksums

    def _buckets(self, stack: contextlib.ExitStack) -> list[OpenBucket]:
        """Returns the buckets, whose memory is freed when the stack is closed."""
        sizes = buffer_sizes(self._layouts, NUM_BUFFERS)
        buffers = []
        for size in sizes:
            with explain_refit_oom(sum(sizes)):
                buffers.append(make_shared_buffer(size, self._device))
            stack.callback(buffers[-1].close)
        return [
            OpenBucket(partial(_slots, layout, buffer), layout.tensors, SharedBucket(layout, buffer.handle))
            for layout, buffer in zip(self._layouts, itertools.cycle(buffers), strict=False)
        ]

    def _keep(self, stack: contextlib.ExitStack) -> None:
        _KEPT.append(stack.pop_all())
        logger.warning(
            "A generation engine may still read the refit's buffers after an error; their %.0f MiB stay allocated "
            "until this process ends.",
            sum(buffer_sizes(self._layouts, NUM_BUFFERS)) / MIB,
        )


def _slots(layout: BucketLayout, buffer: SharedBuffer) -> list[torch.Tensor]:
    return layout.slots(buffer.tensor)


def current_device() -> torch.device:
    """Returns this process's GPU, or the CPU if there is none."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
