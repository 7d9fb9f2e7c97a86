"""Replays refits from CUDA graphs: records the export into buckets with fixed addresses once, then replays it.

The engine does the same with its loads (`FixedTensors`). Driven from Python, an export of 339 tensors took 59 to
118 ms on an H200, a replay 2.8 ms.
"""

import functools
import logging
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch

from nemo_offload_rl.memory.units import GIB, MIB
from nemo_offload_rl.refit.checksum import tensor_checksum
from nemo_offload_rl.refit.fixed_buckets import FixedBuckets, LastBucket
from nemo_offload_rl.refit.interface import Export, Receiver, RefitSender
from nemo_offload_rl.refit.loads import Loads
from nemo_offload_rl.refit.plan import BucketLayout, NamedTensor
from nemo_offload_rl.refit.recorder import Recorder, Replay

logger = logging.getLogger(__name__)

MIN_GAIN_S = 0.005
"""Seconds that graphs must save in a refit to be used."""

_FAILURES = (RuntimeError, OSError)
"""Errors of steps that only graphs need, here and in an engine: streaming works without them, or fails likewise."""


class GraphSender(RefitSender):
    """Replays refits from CUDA graphs if that is possible and faster, and otherwise uses another sender.

    The first refit tries both: it sends twice with the other sender, the first time to warm up, records, and sends
    twice with graphs, the first time for the engine to record. It logs its choice once.

    Args:
        layouts: Layouts of the buckets that graphs fill.
        num_buffers: Number of buffers that these buckets alternate between.
        receivers: All of them get every bucket.
        streamed: The other sender, which is driven from Python.
        verify: Whether to return checksums of the weights; they come from a separate export driven from Python, so that
            they expose a graph that exports anything else.
        make_recorder: Makes the recorder of the export.
        device: The current CUDA device, or the CPU.
        min_gain_s: Seconds that graphs must save in a refit to be used.
        clock: Returns the time in seconds.
    """

    def __init__(
        self,
        layouts: Sequence[BucketLayout],
        num_buffers: int,
        receivers: Sequence[Receiver],
        streamed: RefitSender,
        *,
        verify: bool,
        make_recorder: Callable[[], Recorder],
        device: torch.device,
        min_gain_s: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._layouts = layouts
        self._num_buffers = num_buffers
        self._receivers = receivers
        self._streamed = streamed
        self._verify = verify
        self._make_recorder = make_recorder
        self._device = device
        self._min_gain_s = min_gain_s
        self._clock = clock
        self._is_decided = False
        self._has_moved = False  # whether the last refit found new addresses
        self._recorded: _RecordedExport | None = None  # while graphs are used
        self.metrics = {}

    def send(self, weights: Export) -> dict[str, int]:
        """Sends every bucket and returns once all receivers have loaded all of them (see `RefitSender`).

        Raises:
            EngineLostError: If an engine's process has ended.
            RuntimeError: If an engine has failed, for example because it cannot open a buffer.
            ValueError: If an engine has refused a weight.
        """
        if not self._is_decided:
            self._is_decided = True
            return self._decide(weights)
        if self._recorded is None:
            return self._send_streamed(weights)
        if self._recorded.addresses == weights.addresses():
            self._has_moved = False
        elif self._has_moved:  # recording in each refit costs more than it gains
            self._give_up("the weights' addresses change in each refit")
            return self._send_streamed(weights)
        else:
            self._has_moved = True
            logger.info("The weights' addresses have changed since their export was recorded; it is recorded again.")
            try:
                self._recorded.record(weights)
            except _FAILURES as error:
                self._give_up(_reason(error))
                return self._send_streamed(weights)
        return self._send_recorded(self._recorded, weights)

    def _decide(self, weights: Export) -> dict[str, int]:
        checksums = self._send_streamed(weights)
        if why_not := weights.why_not_recorded():
            logger.info("Refits are streamed, not replayed from CUDA graphs: %s.", why_not)
            return checksums
        try:
            self._send_streamed(weights)
            streamed_s = self.metrics["send_s"] - self.metrics["verify_s"]
            self._recorded = _RecordedExport(self._layouts, self._num_buffers, self._device, self._make_recorder())
            self._recorded.record(weights)
            self._send_recorded(self._recorded, weights)
            checksums = self._send_recorded(self._recorded, weights)
            graphs_s = self.metrics["send_s"] - self.metrics["verify_s"]
        except _FAILURES as error:
            self._give_up(_reason(error))
            return self._send_streamed(weights)
        times = f"{1e3 * graphs_s:.1f} ms instead of {1e3 * streamed_s:.1f} ms"
        if streamed_s - graphs_s < self._min_gain_s:
            self._give_up(f"a replay takes {times}, and must save at least {1e3 * self._min_gain_s:.0f} ms")
            return checksums
        logger.info(
            "Refits are replayed from CUDA graphs: %s, %d graphs of the export with %.0f MiB of temporaries.",
            times,
            len(self._layouts),
            self._recorded.pool_bytes / MIB,
        )
        return checksums

    def _give_up(self, why: str) -> None:
        logger.info("Refits are streamed, not replayed from CUDA graphs: %s.", why)
        self.close()

    def close(self) -> None:
        """Frees graphs and addresses, here and at the receivers."""
        if self._recorded is not None:
            recorded, self._recorded = self._recorded, None
            recorded.close(self._receivers)

    def _send_streamed(self, weights: Export) -> dict[str, int]:
        start = self._clock()
        checksums = self._streamed.send(weights)
        self.metrics = {**self._streamed.metrics, "send_s": self._clock() - start, "graphs": 0.0}
        return checksums

    def _send_recorded(self, recorded: "_RecordedExport", weights: Export) -> dict[str, int]:
        start = self._clock()
        checksums = {name: tensor_checksum(tensor) for name, tensor in weights} if self._verify else {}
        verified = self._clock()
        times = recorded.send(self._receivers, self._clock)
        self.metrics = {
            **times,
            "send_s": self._clock() - start,
            "verify_s": verified - start,
            "graphs": 1.0,
            "graph_pool_gib": recorded.pool_bytes / GIB,
        }
        return checksums


def _reason(error: Exception) -> str:
    """Returns the first line of an error; for an error in an engine, of the engine's own error."""
    cause = getattr(error.__cause__, "cause", error)
    return f"{cause}".partition("\n")[0].rstrip(".") or type(cause).__name__


class _RecordedExport:
    """Holds an export as graphs, one for each bucket.

    Args:
        layouts: Layouts of the buckets.
        num_buffers: Number of buffers that the buckets alternate between.
        device: The current CUDA device, or the CPU.
        recorder: A recorder that nothing else uses.
    """

    def __init__(
        self, layouts: Sequence[BucketLayout], num_buffers: int, device: torch.device, recorder: Recorder
    ) -> None:
        self._name = uuid.uuid4().hex
        self._device = device
        self._recorder = recorder
        self._buckets = FixedBuckets(layouts, num_buffers, device)
        self._replays: list[Replay] = []
        self._is_known = False  # whether the receivers know the buckets
        self.addresses: tuple[int, ...] = ()

    @property
    def pool_bytes(self) -> int:
        """Returns the bytes of the graphs' temporaries, which stay allocated."""
        return self._recorder.pool_bytes

    def record(self, weights: Export) -> None:
        """Records an export anew, without sending anything.

        Raises:
            CaptureError: The export cannot be recorded.
            OutOfGpuMemoryError: There is no memory for the buffers.
        """
        if self._replays:
            self._replays.clear()
            self._recorder.forget()
        self.addresses = weights.addresses()
        drawn = iter(weights)
        with self._buckets.mapped():
            for slots in self._buckets.slots:
                self._replays.append(self._recorder.record(functools.partial(_fill, slots, drawn)))
            deque(drawn, maxlen=0)  # exhaust the export, which checks at its end that there are no more tensors

    def send(self, receivers: Sequence[Receiver], clock: Callable[[], float]) -> dict[str, float]:
        """Replays every bucket, and waits until the receivers have loaded it.

        Returns:
            `export_s`, `load_s` and `first_kernel_to_loaded_s` (see `RefitSender.metrics`).
        """
        times = {"export_s": 0.0}
        loads = Loads(receivers, self._buckets.num_buffers)
        with self._buckets.mapped() as handles, loads.settled():
            began = clock()
            for number, replay in enumerate(self._replays):
                loads.wait_for_room()
                start = clock()
                replay()
                if self._device.type == "cuda":
                    torch.cuda.current_stream().synchronize()  # the receiver's process reads the buffer next
                times["export_s"] += clock() - start
                bucket = self._buckets.bucket(self._name, number, handles, is_known=self._is_known)
                loads.start(bucket, self._buckets.layouts[number].tensors)
            loads.wait()
            times["first_kernel_to_loaded_s"] = clock() - began
        self._is_known = True
        return times | {"load_s": loads.seconds}

    def close(self, receivers: Sequence[Receiver]) -> None:
        """Frees the graphs' memory and the addresses, here and at the receivers."""
        loads = Loads(receivers, 1)
        try:
            loads.start(LastBucket(self._name))
            loads.wait()
        finally:  # a dead engine holds no memory
            self._replays.clear()
            self._recorder.forget()
            self._buckets.close()


def _fill(slots: Sequence[torch.Tensor], drawn: Iterator[NamedTensor]) -> None:
    for slot, (_, tensor) in zip(slots, drawn, strict=False):
        slot.copy_(tensor.detach(), non_blocking=True)
