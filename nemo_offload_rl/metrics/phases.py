"""Finds the phases of a step among its metrics, and computes their TFLOP/s and share of the GPU's peak."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

PHASE_PREFIX = "timing/train/"
STEP_SECONDS = "total_step_time"


def phase_seconds(metrics: Mapping[str, float | None]) -> dict[str, float]:
    """Returns the seconds of each phase from a step's metrics named timing/train/PHASE."""
    return {
        name.removeprefix(PHASE_PREFIX): seconds
        for name, seconds in metrics.items()
        if name.startswith(PHASE_PREFIX) and seconds is not None
    }


TFLOPS_PREFIX = "performance/tflops_per_gpu/"
UTILIZATION_PREFIX = "performance/model_flop_utilization/"

# Dense bf16 TFLOP/s by a pattern of the GPU's name in torch and the driver, from NVIDIA's data sheets, whose figures
# with sparsity are twice these. The first match counts, so PCIe and NVL cards come before the same chip on SXM.
_BF16_TFLOPS: Sequence[tuple[str, float]] = (
    (r"H100 PCIe", 756.0),
    (r"H[12]00 NVL", 835.0),
    (r"GH200|H200|H100.*HBM3", 989.0),
    (r"A100", 312.0),
    (r"L40S", 362.0),
)


def bf16_peak_tflops(gpu_names: Sequence[str]) -> float | None:
    """Returns the dense bf16 peak of one of a run's GPUs in TFLOP/s.

    Args:
        gpu_names: names of all GPUs of the run; empty without a GPU.

    Returns:
        TFLOP/s; None if the GPUs differ, are not known here, or are MIG slices, whose share of the peak is not known.
    """
    if len(set(gpu_names)) != 1 or "MIG" in gpu_names[0]:
        return None
    return next((peak for pattern, peak in _BF16_TFLOPS if re.search(pattern, gpu_names[0])), None)


def utilization_metrics(
    flops: Mapping[str, float], seconds: Mapping[str, float], *, num_gpus: int, peak_tflops: float | None
) -> dict[str, float]:
    """Returns `performance/tflops_per_gpu/PHASE` of each phase, and its share of the GPU's peak.

    Args:
        flops: model FLOPs of each phase, of all GPUs together.
        seconds: seconds of each phase; may include phases without FLOPs.
        num_gpus: number of GPUs, or of ranks on a CPU, that share the work.
        peak_tflops: peak of one GPU; None to leave out the share.
    """
    reached = {phase: flops[phase] / seconds[phase] / num_gpus / 1e12 for phase in flops if seconds.get(phase, 0) > 0}
    metrics = {f"{TFLOPS_PREFIX}{phase}": value for phase, value in reached.items()}
    if peak_tflops is not None:
        metrics |= {f"{UTILIZATION_PREFIX}{phase}": value / peak_tflops for phase, value in reached.items()}
    return metrics


def mean_in_phase(rows: Sequence[Mapping[str, float | None]], prefix: str, phase: str) -> float | None:
    """Returns the mean over steps of a phase's metric, weighted by the phase's seconds; None if no step has it.

    Args:
        rows: the steps' metrics, as `read_metrics` gives them.
        prefix: the metric's name without the phase.
        phase: the phase's name.
    """
    pairs = [
        (value, seconds)
        for row in rows
        if (value := row.get(f"{prefix}{phase}")) is not None
        and (seconds := row.get(f"timing/train/{phase}")) is not None
    ]
    whole = sum(seconds for _, seconds in pairs)
    return sum(value * seconds for value, seconds in pairs) / whole if whole > 0 else None
