"""Reads this process's GPU memory from NVML, the driver's library, including CUDA context and kernels."""

from __future__ import annotations

import functools
import importlib
import os
from typing import Any


def process_gpu_bytes(nvml: Any = None, pid: int | None = None) -> int | None:
    """Returns this process's memory on torch's current GPU, as counted by the driver.

    Takes about a millisecond. In a container the driver may know processes by other ids, or not report them.

    Args:
        nvml: the module `pynvml`; imported if None.
        pid: id of another process to read instead.

    Returns:
        Bytes; None if the package or the driver is missing, or the driver does not report the process.
    """
    nvml = _pynvml() if nvml is None else nvml
    if nvml is None:
        return None
    try:
        running = nvml.nvmlDeviceGetComputeRunningProcesses(_handle(nvml))
    except nvml.NVMLError:
        return None
    own = os.getpid() if pid is None else pid
    found = [process.usedGpuMemory for process in running if process.pid == own]
    return int(found[0]) if found and found[0] is not None else None


@functools.cache
def _pynvml() -> Any:
    try:
        nvml = importlib.import_module("pynvml")
    except ModuleNotFoundError:  # it comes with the extra te
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    return nvml


def _handle(nvml: Any) -> Any:
    import torch

    return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties().uuid}")
