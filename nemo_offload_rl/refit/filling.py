"""Fills buckets one after the other and has receivers load them, the same for every kind of bucket."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from nemo_offload_rl.refit.checksum import tensor_checksum
from nemo_offload_rl.refit.interface import Receiver, WeightBucket
from nemo_offload_rl.refit.loads import Loads
from nemo_offload_rl.refit.plan import NamedTensor, TensorSpec


@dataclass(frozen=True)
class OpenBucket:
    """Holds a bucket while its memory is allocated.

    Attributes:
        slots: Returns for each tensor the view of the bucket's buffer that it is copied into. A view that was kept, in
            the frames of an error, would keep host memory mapped.
        specs: The tensors.
        message: What receivers get.
    """

    slots: Callable[[], Sequence[torch.Tensor]]
    specs: Sequence[TensorSpec]
    message: WeightBucket


class Filler(Protocol):
    """Fills the buckets of one refit."""

    def fill(self, number: int, slots: Sequence[torch.Tensor]) -> None:
        """Starts to fill a bucket, on the current stream; buckets are filled in order.

        Args:
            number: The bucket's number, from 0.
            slots: Views of the bucket's buffer, one for each tensor.
        """
        ...

    def finish(self) -> None:
        """Ends the export after the last bucket."""
        ...


class ExportedTensors:
    """Copies an export's tensors into buckets, driven from Python (see `Filler`).

    Args:
        weights: Starts the export.
        verify: Whether to compute checksums.
    """

    def __init__(self, weights: Iterable[NamedTensor], *, verify: bool) -> None:
        self._weights = iter(weights)
        self._verify = verify
        self.checksums: dict[str, int] = {}
        """`tensor_checksum` of each tensor that was copied, by name; empty without `verify`."""
        self.verify_s = 0.0
        """Seconds that the checksums have taken."""

    def fill(self, number: int, slots: Sequence[torch.Tensor]) -> None:
        """Copies the next tensors of the export."""
        for slot, (name, tensor) in zip(slots, self._weights, strict=False):
            slot.copy_(tensor.detach(), non_blocking=True)
            if self._verify:
                start = time.perf_counter()
                self.checksums[name] = tensor_checksum(tensor)
                self.verify_s += time.perf_counter() - start

    def finish(self) -> None:
        """Exhausts the export, which checks at its end that there are no more tensors."""
        deque(self._weights, maxlen=0)


def send_buckets(
    buckets: Sequence[OpenBucket],
    num_buffers: int,
    receivers: Sequence[Receiver],
    filler: Filler,
    clock: Callable[[], float] = time.perf_counter,
    keep_memory: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Fills every bucket, and returns once all receivers have loaded all of them, also after an error.

    Args:
        buckets: In the order of the export.
        num_buffers: Number of buffers that the buckets alternate between.
        receivers: All of them get every bucket.
        filler: Fills the buckets.
        clock: Returns the time in seconds.
        keep_memory: Called after an error if a receiver may still read a bucket, whose memory must then stay.

    Returns:
        `export_s`, `load_s` and `first_kernel_to_loaded_s` (see `RefitSender.metrics`).

    Raises:
        EngineLostError: If an engine's process has ended.
        RuntimeError: If an engine has failed, for example because it cannot open a buffer.
        ValueError: If an engine has refused a weight.
    """
    export_s = 0.0
    loads = Loads(receivers, num_buffers)
    try:
        with loads.settled():  # a receiver may still have a buffer open after an error
            began = clock()
            for number, bucket in enumerate(buckets):
                loads.wait_for_room()
                start = clock()
                filler.fill(number, bucket.slots())
                if torch.cuda.is_available():
                    torch.cuda.current_stream().synchronize()  # the receiver's process reads the buffer next
                export_s += clock() - start
                loads.start(bucket.message, bucket.specs)
            filler.finish()
            loads.wait()
            first_kernel_to_loaded_s = clock() - began
    finally:
        if loads.may_be_read:
            keep_memory()
    return {"export_s": export_s, "load_s": loads.seconds, "first_kernel_to_loaded_s": first_kernel_to_loaded_s}
