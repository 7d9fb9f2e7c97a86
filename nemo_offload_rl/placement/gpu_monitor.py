"""Monitors the GPUs of all nodes of a run: a small Ray actor on each node reads them, and the driver collects."""

import importlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from nemo_offload_rl.placement.signals import ignore_ending_signals

_GIB = 2**30

GpuSample = dict[int, dict[str, float]]
"""A reading of every GPU of a machine: the driver's GPU index -> metric name -> value."""


class NoGpuReadingsError(ValueError):
    """Says that this machine's GPUs cannot be read, why, and what to do."""


class GpuReader:
    """Reads every GPU that the driver knows, whatever CUDA_VISIBLE_DEVICES says.

    Args:
        nvml: the module `pynvml`; imported where None.

    Raises:
        NoGpuReadingsError: the package or the driver is missing, or there is no GPU.
    """

    def __init__(self, nvml: Any = None) -> None:
        if nvml is None:
            try:
                nvml = importlib.import_module("pynvml")
            except ModuleNotFoundError as error:
                raise NoGpuReadingsError(
                    "the package nvidia-ml-py is not installed (make setup EXTRAS=te brings it)"
                ) from error
        self._nvml = nvml
        try:
            nvml.nvmlInit()
            self._gpus = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        except nvml.NVMLError as error:
            raise NoGpuReadingsError(f"NVML, the driver's library, failed: {error}") from error
        if not self._gpus:
            raise NoGpuReadingsError("the driver reports no GPU")

    def read(self) -> GpuSample:
        """Returns one reading; leaves out values that a GPU does not report, such as the power of a MIG slice."""
        return {index: dict(self._read_one(gpu)) for index, gpu in enumerate(self._gpus)}

    def _read_one(self, gpu: Any) -> Iterator[tuple[str, float]]:
        nvml = self._nvml
        readings: tuple[tuple[str, Callable[[], float]], ...] = (
            ("utilization_percent", lambda: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu),
            ("memory_gib", lambda: nvml.nvmlDeviceGetMemoryInfo(gpu).used / _GIB),
            ("power_w", lambda: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000),
            ("temperature_c", lambda: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU)),
        )
        for name, read in readings:
            try:
                yield name, float(read())
            except nvml.NVMLError:
                continue


class GpuSampler:
    """Reads the GPUs at an interval, and keeps the readings until `take` returns them.

    Args:
        reader: reads this machine's GPUs.
        interval_s: seconds between readings; the first is taken at once.
    """

    def __init__(self, reader: GpuReader, interval_s: float) -> None:
        self._reader = reader
        self._interval_s = interval_s
        self._samples: list[GpuSample] = []
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpu-sampler", daemon=True)
        self._thread.start()

    def take(self) -> list[GpuSample]:
        """Returns the readings since the last call."""
        with self._lock:
            taken, self._samples = self._samples, []
        return taken

    def close(self) -> None:
        """Ends the thread."""
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            sample = self._reader.read()
            with self._lock:
                self._samples.append(sample)
            if self._end.wait(self._interval_s):
                return


logger = logging.getLogger(__name__)

_LATE_AFTER_S = 30.0
_MEANS = ("utilization_percent", "power_w")


class GpuMetrics(Protocol):
    """Defines where a run gets the metrics of its GPUs."""

    def of_step(self, step: int) -> dict[str, float]:
        """Returns metrics of the readings since the previous step that have arrived; does not wait."""

    def close(self) -> None:
        """Ends the readings."""


class NoGpuMetrics:
    """Replaces `GpuMonitor` where monitoring is off."""

    def of_step(self, step: int) -> dict[str, float]:
        """Returns no metrics."""
        return {}

    def close(self) -> None:
        """Does nothing."""


class NodeMonitor:
    """Reads the GPUs of the node that it runs on, as a Ray actor around `GpuSampler`.

    Args:
        interval_s: seconds between readings.
    """

    def __init__(self, interval_s: float) -> None:
        ignore_ending_signals()
        self._sampler: GpuSampler | None = None
        self._why_not = ""
        try:
            self._sampler = GpuSampler(GpuReader(), interval_s)
        except NoGpuReadingsError as error:
            self._why_not = str(error)

    def take(self) -> list[GpuSample] | str:
        """Returns the readings since the last call, or the reason why GPUs cannot be read."""
        return self._why_not if self._sampler is None else self._sampler.take()


@dataclass
class _Node:
    """Tracks the `NodeMonitor` of a node.

    Attributes:
        name: the node's name.
        actor: its `NodeMonitor`; None once it has failed.
        answer: Ray reference of the requested readings that have not arrived; None without such a request.
        asked_s: when they were requested.
        was_late: whether the warning about late readings has been logged.
    """

    name: str
    actor: Any
    answer: Any = None
    asked_s: float = 0.0
    was_late: bool = False


class GpuMonitor:
    """Collects the readings of all nodes in a background thread, so that no step waits for them.

    A node that cannot read its GPUs, or whose actor has died, is left out from then on, with a warning. For a node that
    is late, since its actor is still starting or the node is busy, it logs one warning and uses the readings once they
    arrive.

    Args:
        actors: handles of a `NodeMonitor` on each node, in the order of the nodes.
        flush_interval_s: seconds between collections.
        late_after_s: seconds without an answer after which a node counts as late.
    """

    def __init__(self, actors: Sequence[Any], flush_interval_s: float, *, late_after_s: float = _LATE_AFTER_S) -> None:
        self._nodes = [_Node(f"node{index}", actor) for index, actor in enumerate(actors)]
        self._interval_s = flush_interval_s
        self._late_after_s = late_after_s
        self._new: list[tuple[str, GpuSample]] = []
        self._of_step: dict[str, list[float]] = {}
        self._step: int | None = None
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpu-monitor", daemon=True)
        self._thread.start()

    def of_step(self, step: int) -> dict[str, float]:
        """Returns the mean utilisation and power, and the largest memory and temperature, of each GPU.

        A later call for the same step includes the readings of the earlier calls. Readings that have not been collected
        yet count for a later step.
        """
        with self._lock:
            new, self._new = self._new, []
        if step != self._step:
            self._step, self._of_step = step, {}
        for node, sample in new:
            for gpu, values in sample.items():
                for name, value in values.items():
                    self._of_step.setdefault(f"performance/gpus/{node}/gpu{gpu}/{name}", []).append(value)
        return {name: _summary(name, values) for name, values in self._of_step.items()}

    def close(self) -> None:
        """Ends the thread and the actors."""
        self._end.set()
        for node in self._nodes:
            if node.actor is not None:
                ray.kill(node.actor)  # also ends a pending call to the actor
        self._thread.join(self._interval_s + self._late_after_s)

    def _run(self) -> None:
        while True:
            self._collect()
            if self._end.wait(self._interval_s):
                return

    def _collect(self) -> None:
        for node in self._nodes:
            if node.actor is not None and node.answer is None:
                node.answer, node.asked_s = node.actor.take.remote(), time.monotonic()
        asked = [node for node in self._nodes if node.answer is not None]
        if not asked:
            return
        # A late node delays the readings of the others by no more than this.
        answers, _ = ray.wait([node.answer for node in asked], num_returns=len(asked), timeout=self._interval_s)
        for node in asked:
            if node.answer in answers:
                self._take_answer(node)
            elif not node.was_late and time.monotonic() - node.asked_s > self._late_after_s:
                node.was_late = True
                logger.warning(
                    "logger.monitor_gpus: %s has sent no readings for %g s; they are recorded once they arrive.",
                    node.name,
                    self._late_after_s,
                )

    def _take_answer(self, node: _Node) -> None:
        try:
            taken = ray.get(node.answer)
        except RayError as error:
            taken = f"its actor does not answer ({type(error).__name__})"
        node.answer = None
        if isinstance(taken, str):
            if not self._end.is_set():
                logger.warning("logger.monitor_gpus: there are no readings from %s: %s.", node.name, taken)
                node.actor = None
            return
        with self._lock:
            self._new += [(node.name, sample) for sample in taken]


def watch_gpus(node_ids: Sequence[str], *, collection_interval_s: float, flush_interval_s: float) -> GpuMonitor:
    """Starts a `NodeMonitor` on each node, without waiting for it, and returns the monitor that collects the readings.

    Args:
        node_ids: Ray's ids of the nodes.
        collection_interval_s: seconds between readings of a GPU.
        flush_interval_s: seconds between collections by the driver.
    """
    actor_class = ray.remote(NodeMonitor)
    actors = [
        actor_class.options(
            num_cpus=0, num_gpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)
        ).remote(collection_interval_s)
        for node_id in node_ids
    ]
    return GpuMonitor(actors, flush_interval_s)


def _summary(name: str, values: Sequence[float]) -> float:
    return sum(values) / len(values) if name.endswith(_MEANS) else max(values)
