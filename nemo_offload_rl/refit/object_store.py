"""Sends weights through Ray's object store: works on every machine, but copies twice through host memory."""

import contextlib
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import ray
import torch

from nemo_offload_rl.refit.export import NullSender
from nemo_offload_rl.refit.interface import Receiver, RefitSender
from nemo_offload_rl.refit.loads import ExportedTensors, Loads
from nemo_offload_rl.refit.plan import BucketLayout, ExportPlan, NamedTensor

MAX_BUCKETS_IN_FLIGHT = 2


@dataclass(frozen=True)
class PackedBucket:
    """Holds tensors in one host buffer, which a process on the same node gets from the object store without a copy.

    Attributes:
        layout: Positions of the tensors in the buffer.
        data: uint8 [num_bytes].
    """

    layout: BucketLayout
    data: np.ndarray

    @contextlib.contextmanager
    def opened(self) -> Iterator[list[NamedTensor]]:
        """Yields views of the buffer as (name, CPU tensor), to be read only: the buffer may be shared."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            data = torch.from_numpy(self.data)
        yield self.layout.views(data)


@dataclass(frozen=True)
class ObjectStoreTransport:
    """Makes rank 0 put each bucket into the object store once for all receivers; see `RefitTransport`.

    Attributes:
        receivers: All of them get every bucket.
        verify: Whether the sender returns the checksums of the weights it has sent.
    """

    receivers: Sequence[Receiver]
    verify: bool

    def connect(self, plan: ExportPlan, *, rank: int, bucket_bytes: int) -> RefitSender:
        """Makes a rank's sender; only rank 0 has a buffer."""
        if rank != 0:
            return NullSender()
        return ObjectStoreSender(plan.buckets(bucket_bytes), self.receivers, verify=self.verify)


class ObjectStoreSender(RefitSender):
    """Packs bucket after bucket into one host buffer; at most two copies of it are in flight."""

    def __init__(self, buckets: Sequence[BucketLayout], receivers: Sequence[Receiver], *, verify: bool) -> None:
        self._buckets = buckets
        self._receivers = receivers
        self._verify = verify
        self.metrics = {}
        self._buffer = torch.zeros(max((bucket.num_bytes for bucket in buckets), default=0), dtype=torch.uint8)

    def send(self, weights: Iterable[NamedTensor]) -> dict[str, int]:
        """Sends every bucket and returns once all receivers have loaded all of them (see `RefitSender`)."""
        exported = ExportedTensors(weights, verify=self._verify)
        export_s = 0.0
        loads = Loads(self._receivers, MAX_BUCKETS_IN_FLIGHT)
        for number, bucket in enumerate(self._buckets):
            start = time.perf_counter()
            exported.fill(number, bucket.slots(self._buffer))
            if torch.cuda.is_available():
                torch.cuda.current_stream().synchronize()  # Ray reads the buffer next
            export_s += time.perf_counter() - start
            loads.wait_for_room()
            loads.start(ray.put(PackedBucket(bucket, self._buffer[: bucket.num_bytes].numpy())), bucket.tensors)
        exported.finish()
        loads.wait()
        self.metrics = {
            "export_s": export_s - exported.verify_s,
            "verify_s": exported.verify_s,
            "load_s": loads.seconds,
        }
        return exported.checksums
