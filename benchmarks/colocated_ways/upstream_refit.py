"""Replays NeMo-RL's refit of an engine on the same GPU: alternating torch buffers, shared by torch's CUDA IPC.

Each function names what it replays, in files of NeMo-RL below nemo_rl/. NeMo-RL's messages on ZeroMQ sockets are calls
of Ray actors here, as in our own transports.
"""

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ray
import torch

from nemo_offload_rl.memory.shared_buffer import BufferHandle, SharedBuffer, make_shared_buffer
from nemo_offload_rl.refit.cuda_ipc import SharedBucket
from nemo_offload_rl.refit.export import NullSender
from nemo_offload_rl.refit.interface import Receiver, RefitSender
from nemo_offload_rl.refit.plan import BucketLayout, ExportPlan, NamedTensor
from nemo_offload_rl.run.weight_sync import WeightSync

MEMORY_RATIO = 0.3
"""Of the free GPU memory, for both buffers: weight_sync/ipc_weight_synchronizer.py, _compute_buffer_size."""
_DEVICE_INDEX = 6
"""Of the arguments of torch's `rebuild_cuda_tensor`."""


class UpstreamWeightSync(WeightSync):
    """Replays weight_sync/ipc_weight_synchronizer.py, lines 75 to 106 (`sync_weights`) at commit 00fa128513dc."""

    def refresh(self) -> None:
        """Sends the weights whenever it is called, one call after the other."""
        self._policy.offload_before_refit()
        self._generation.prepare_for_generation(["weights"])
        self._policy.send_weights()
        self._policy.offload_after_refit()
        self._generation.prepare_for_generation(["kv_cache"])
        self._stale = False


@dataclass(frozen=True)
class UpstreamTransport:
    """See `RefitTransport`.

    Attributes:
        receivers: each is on the GPU of its first rank.
    """

    receivers: Sequence[Receiver]

    def connect(self, plan: ExportPlan, *, rank: int, bucket_bytes: int) -> RefitSender:
        """Creates a rank's sender; `bucket_bytes` counts only where there is no GPU whose free memory could."""
        receivers = [receiver for receiver in self.receivers if receiver.ranks[0] == rank]
        return UpstreamSender(plan, receivers, bucket_bytes) if receivers else NullSender()


class UpstreamSender(RefitSender):
    """Replays models/policy/utils.py, stream_weights_via_ipc_zmq_impl."""

    def __init__(self, plan: ExportPlan, receivers: Sequence[Receiver], bucket_bytes: int) -> None:
        self._plan = plan
        self._receivers = receivers
        self._bucket_bytes = bucket_bytes

    def send(self, weights: Iterable[NamedTensor]) -> dict[str, int]:
        """Packs, hands over and waits, alternating two buffers; then the engine processes its weights."""
        weights = iter(weights)
        free = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else None
        nbytes = (self._bucket_bytes if free is None else int(free * MEMORY_RATIO)) // 2
        buckets = self._plan.buckets(max(1, nbytes))
        largest = max(nbytes, *(bucket.num_bytes for bucket in buckets))
        buffers = [_make_buffer(largest), _make_buffer(largest)]  # both at once and whole, however little is sent
        loads: deque[list[Any]] = deque()
        for number, bucket in enumerate(buckets):
            buffer = buffers[number % 2]
            _pack(bucket, buffer.tensor, weights)
            if loads:
                ray.get(loads.popleft())
            shared = SharedBucket(bucket, buffer.handle)
            loads.append([receiver.load_weights(shared) for receiver in self._receivers])
        deque(weights, maxlen=0)
        while loads:
            ray.get(loads.popleft())
        for buffer in buffers:
            buffer.close()
        buffers.clear()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        ray.get([receiver.actor.complete_refit.remote() for receiver in self._receivers])
        return {}


def _pack(bucket: BucketLayout, buffer: torch.Tensor, weights: Iterator[NamedTensor]) -> None:
    for (_, slot), (_, tensor) in zip(bucket.views(buffer), weights, strict=False):
        slot.copy_(tensor.detach(), non_blocking=True)
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()


def _make_buffer(nbytes: int) -> SharedBuffer:
    return TorchBuffer(nbytes) if torch.cuda.is_available() else make_shared_buffer(nbytes, torch.device("cpu"))


class TorchBuffer:
    """Holds GPU memory of torch's allocator (see `SharedBuffer`).

    Args:
        nbytes: size.
    """

    def __init__(self, nbytes: int) -> None:
        self.tensor = torch.empty(nbytes, dtype=torch.uint8, device="cuda")

    @property
    def handle(self) -> BufferHandle:
        """Replays models/policy/utils.py, get_handle_from_tensor: a handle anew for each bucket."""
        from torch.multiprocessing.reductions import reduce_tensor

        return TorchHandle(reduce_tensor(self.tensor)[1])

    def close(self) -> None:
        """Gives the memory back to torch."""
        del self.tensor


@dataclass(frozen=True)
class TorchHandle:
    """See `BufferHandle`.

    Attributes:
        arguments: of torch's `rebuild_cuda_tensor`.
    """

    arguments: tuple[Any, ...]

    @contextlib.contextmanager
    def opened(self) -> Iterator[torch.Tensor]:
        """Replays models/policy/utils.py, rebuild_cuda_tensor_from_ipc, and the wait before the acknowledgement."""
        from torch.multiprocessing.reductions import rebuild_cuda_tensor

        arguments = list(self.arguments)
        arguments[_DEVICE_INDEX] = torch.cuda.current_device()
        yield rebuild_cuda_tensor(*arguments)
        torch.cuda.current_stream().synchronize()
