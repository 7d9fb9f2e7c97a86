"""Reads utilisation, memory, power and temperature of a machine's GPUs with NVML, in a background thread."""

import importlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

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
