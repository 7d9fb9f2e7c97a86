"""Replays refits from CUDA graphs: records the export into buckets with fixed addresses once, then replays it.

The engine does the same with its loads (`FixedTensors`). Driven from Python, an export of 339 tensors took 59 to
118 ms on an H200, a replay 2.8 ms; vLLM's loads of 3,147 tensors took 266 ms, replays 12 (docs/results/refit.md).
"""

import functools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch

from nemo_offload_rl.memory.gpu_range import OutOfGpuMemoryError
from nemo_offload_rl.memory.units import GIB, MIB
from nemo_offload_rl.refit.checksum import tensor_checksum
from nemo_offload_rl.refit.fixed_buckets import FixedBuckets
from nemo_offload_rl.refit.interface import Export, Receiver, RefitSender
from nemo_offload_rl.refit.loads import ExportedTensors, send_buckets
from nemo_offload_rl.refit.plan import BucketLayout, NamedTensor
from nemo_offload_rl.refit.recorder import CaptureError, Recorder, Replay

logger = logging.getLogger(__name__)

MIN_GAIN_S = 0.005
"""Seconds that replaying the export must save in a refit."""

_ANOTHER_RANK = "another rank cannot record it, and ranks exchange weights in it"
_SAVES_TOO_LITTLE_THERE = "a replay saves too little on another rank, and ranks exchange weights in it"

_FAILURES = (RuntimeError, OSError)
"""Errors while buckets with fixed addresses are made, here or in an engine: streaming works, or fails likewise."""


class GraphSender(RefitSender):
    """Sends buckets that keep their addresses, so that engines replay their loads, and this side its export.

    The first refit registers the buckets at the receivers. If there is no memory for them, another sender does this
    refit and the next one tries again; if they cannot be shared, the other sender does all refits. An export that
    cannot be recorded is driven from Python each time. One that can be is tried both ways: it is sent twice driven
    from Python, the first time to warm up, recorded, and replayed twice. What was chosen is logged once.

    If ranks exchange weights in the export, either all of them replay it or none: NCCL requires that a collective is in
    a graph on all its ranks, or on none. They agree before each step that any of them could refuse.

    Args:
        layouts: Layouts of the buckets.
        num_buffers: Number of buffers that these buckets alternate between.
        receivers: All of them get every bucket.
        streamed: The other sender, whose buckets exist only during a refit.
        verify: Whether to return checksums of the weights; they come from an export driven from Python, so that they
            expose a graph that exports anything else.
        make_recorder: Makes the recorder of the export; None drives every export from Python.
        device: The current CUDA device, or the CPU.
        min_gain_s: Seconds that replaying the export must save in a refit.
        record_collectives: Whether to record an export in which ranks exchange weights; all ranks must then send, and
            NCCL must not register the graphs' memory (`worker.environment`).
        max_pool_bytes: The most memory that the graphs of such an export may keep. Others keep one layer's attention.
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
        make_recorder: Callable[[], Recorder] | None,
        device: torch.device,
        min_gain_s: float,
        record_collectives: bool = False,
        max_pool_bytes: int = 0,
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
        self._record_collectives = record_collectives and make_recorder is not None
        self._max_pool_bytes = max_pool_bytes
        self._clock = clock
        self._is_decided = False
        self._has_moved = False  # whether the last refit found new addresses
        self._buckets: FixedBuckets | None = None  # unless refits are streamed
        self._recorded: _RecordedExport | None = None  # while the export is replayed
        self.metrics = {}

    def send(self, weights: Export) -> dict[str, int]:
        """Sends every bucket and returns once all receivers have loaded all of them (see `RefitSender`).

        Raises:
            OutOfGpuMemoryError: If there is no memory for the buckets; see `send_buckets` for other errors.
        """
        if not self._is_decided:
            self._is_decided = True
            return self._decide(weights)
        if self._buckets is None:
            return self._send_streamed(weights)
        self._record_again_if_moved(self._buckets, weights)
        if self._recorded is None:
            return self._send_driven(self._buckets, weights)
        return self._send_recorded(self._buckets, self._recorded, weights)

    def _decide(self, weights: Export) -> dict[str, int]:
        try:
            self._buckets = FixedBuckets(self._layouts, self._num_buffers, self._receivers, self._device)
        except _FAILURES as error:
            if isinstance(_cause(error), OutOfGpuMemoryError):
                self._is_decided = False
                logger.warning(
                    "This refit is streamed, not replayed from CUDA graphs, and the next one tries again: %s.",
                    _reason(error),
                )
            else:
                logger.info("Refits are streamed, not replayed from CUDA graphs: %s.", _reason(error))
            checksums = self._send_streamed(weights)
            if self._record_collectives and weights.collectives():
                weights.agree(False)
                # The other ranks drive their exports from Python from now on, and ask no more.
                self._make_recorder, self._record_collectives = None, False
            return checksums
        checksums = self._send_driven(self._buckets, weights)
        if self._make_recorder is None:
            return checksums
        why_not = self._why_not_recorded(weights)
        if not self._all_say(weights, not why_not):
            self._drive_from_python(why_not or _ANOTHER_RANK)
            return checksums
        self._send_driven(self._buckets, weights)
        driven_s = self.metrics["send_s"] - self.metrics["verify_s"]
        self._recorded = _RecordedExport(self._make_recorder())
        if not self._record(self._buckets, self._recorded, weights):
            return checksums
        self._send_recorded(self._buckets, self._recorded, weights)
        checksums = self._send_recorded(self._buckets, self._recorded, weights)
        graphs_s = self.metrics["send_s"] - self.metrics["verify_s"]
        times = f"{1e3 * graphs_s:.1f} ms instead of {1e3 * driven_s:.1f} ms"
        gains = driven_s - graphs_s >= self._min_gain_s
        if not self._all_say(weights, gains):
            too_little = f"a replay takes {times}, and must save at least {1e3 * self._min_gain_s:.0f} ms"
            self._drive_from_python(_SAVES_TOO_LITTLE_THERE if gains else too_little)
            return checksums
        logger.info(
            "Refits are replayed from CUDA graphs: %s, %d graphs of the export with %.0f MiB of temporaries.",
            times,
            len(self._layouts),
            self._recorded.pool_bytes / MIB,
        )
        return checksums

    def _why_not_recorded(self, weights: Export) -> str:
        collectives = weights.collectives()
        if collectives and not self._record_collectives:
            return f"ranks exchange parts of the weights in an export ({collectives})"
        return weights.why_not_recorded()

    def _all_say(self, weights: Export, yes: bool) -> bool:
        """Returns whether this rank says yes, and all with which it exchanges weights and that record it, too."""
        return weights.agree(yes) if self._record_collectives else yes

    def _record_again_if_moved(self, buckets: FixedBuckets, weights: Export) -> None:
        if self._recorded is None:
            return
        if self._all_say(weights, self._recorded.addresses == weights.addresses()):
            self._has_moved = False
        elif self._has_moved:  # recording in each refit costs more than it gains
            self._drive_from_python("the weights' addresses change in each refit")
        else:
            logger.info("The weights' addresses have changed since their export was recorded; it is recorded again.")
            self._record(buckets, self._recorded, weights)
            self._has_moved = True

    def _record(self, buckets: FixedBuckets, recorded: "_RecordedExport", weights: Export) -> bool:
        """Returns whether the export could be recorded; it is driven from Python otherwise."""
        try:
            recorded.record(buckets, weights)
        except CaptureError as error:
            why_not = _reason(error)
        else:
            why_not = self._why_pool_too_large(recorded.pool_bytes, weights)
        if self._all_say(weights, not why_not):
            return True
        self._drive_from_python(why_not or _ANOTHER_RANK)
        return False

    def _why_pool_too_large(self, pool_bytes: int, weights: Export) -> str:
        """Returns why graphs may not keep this much memory between refits; "" if they may."""
        if not weights.collectives() or pool_bytes <= self._max_pool_bytes:
            return ""
        return (
            f"graphs would keep {pool_bytes / MIB:.0f} MiB for weights that ranks exchange, more than the "
            f"{self._max_pool_bytes / MIB:.0f} MiB of policy.refit_buffer_size_gb"
        )

    def _drive_from_python(self, why: str) -> None:
        logger.info("The export of weights is driven from Python, not replayed from CUDA graphs: %s.", why)
        if self._recorded is not None:
            self._recorded.forget()
            self._recorded = None

    def close(self) -> None:
        """Frees graphs and addresses, here and at the receivers."""
        if self._recorded is not None:
            self._recorded.forget()
            self._recorded = None
        if self._buckets is not None:
            buckets, self._buckets = self._buckets, None
            buckets.close()

    def _send_streamed(self, weights: Export) -> dict[str, int]:
        start = self._clock()
        checksums = self._streamed.send(weights)
        self.metrics = {**self._streamed.metrics, "send_s": self._clock() - start, "graphs": 0.0}
        return checksums

    def _send_driven(self, buckets: FixedBuckets, weights: Export) -> dict[str, int]:
        start = self._clock()
        exported = ExportedTensors(weights, verify=self._verify)
        with buckets.mapped() as opened:
            times = send_buckets(opened, buckets.num_buffers, self._receivers, exported, self._clock)
        self.metrics = {
            **times,
            "export_s": times["export_s"] - exported.verify_s,
            "send_s": self._clock() - start,
            "verify_s": exported.verify_s,
            "graphs": 0.0,
        }
        return exported.checksums

    def _send_recorded(self, buckets: FixedBuckets, recorded: "_RecordedExport", weights: Export) -> dict[str, int]:
        start = self._clock()
        checksums = {name: tensor_checksum(tensor) for name, tensor in weights} if self._verify else {}
        verified = self._clock()
        with buckets.mapped() as opened:
            times = send_buckets(opened, buckets.num_buffers, self._receivers, recorded, self._clock)
        self.metrics = {
            **times,
            "send_s": self._clock() - start,
            "verify_s": verified - start,
            "graphs": 1.0,
            "graph_pool_gib": recorded.pool_bytes / GIB,
        }
        return checksums


def _cause(error: Exception) -> Exception:
    """Returns the error, or for an error in an engine, the engine's own."""
    cause: Exception = getattr(error.__cause__, "cause", error)
    return cause


def _reason(error: Exception) -> str:
    """Returns the first line of an error; for an error in an engine, of the engine's own error."""
    cause = _cause(error)
    return f"{cause}".partition("\n")[0].rstrip(".") or type(cause).__name__


class _RecordedExport:
    """Holds an export as graphs, one for each bucket, and fills buckets by replaying them (see `Filler`).

    Args:
        recorder: A recorder that nothing else uses.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._replays: list[Replay] = []
        self.addresses: tuple[int, ...] = ()
        """Addresses of what the recorded export reads; empty unless a recording is complete."""

    @property
    def pool_bytes(self) -> int:
        """Returns the bytes of the graphs' temporaries, which stay allocated."""
        return self._recorder.pool_bytes

    def record(self, buckets: FixedBuckets, weights: Export) -> None:
        """Records an export anew, without sending anything.

        Raises:
            CaptureError: The export cannot be recorded.
            OutOfGpuMemoryError: There is no memory for the buffers.
        """
        if self._replays:
            self.forget()
        addresses, drawn = weights.addresses(), iter(weights)
        with buckets.mapped() as opened:
            for bucket in opened:
                self._replays.append(self._recorder.record(functools.partial(_fill, bucket.slots(), drawn)))
            deque(drawn, maxlen=0)  # exhaust the export, which checks at its end that there are no more tensors
        self.addresses = addresses

    def fill(self, number: int, slots: Sequence[torch.Tensor]) -> None:
        """Replays a bucket's graph, which writes to the slots that it was recorded with."""
        self._replays[number]()

    def finish(self) -> None:
        """Does nothing: nothing is drawn in a replay."""

    def forget(self) -> None:
        """Frees the graphs' memory."""
        self.addresses = ()
        self._replays.clear()
        self._recorder.forget()


def _fill(slots: Sequence[torch.Tensor], drawn: Iterator[NamedTensor]) -> None:
    for slot, (_, tensor) in zip(slots, drawn, strict=False):
        slot.copy_(tensor.detach(), non_blocking=True)
