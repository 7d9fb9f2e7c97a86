"""Turns FLOPs and seconds of phases into TFLOP/s a GPU and their share of the GPU's peak, as metrics."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

TFLOPS_PREFIX = "performance/tflops_per_gpu/"
UTILIZATION_PREFIX = "performance/model_flop_utilization/"

# Dense bf16 TFLOP/s by the name that torch and the driver give a GPU, from NVIDIA's data sheets, whose figures with
# sparsity are twice these. The first that matches counts: PCIe and NVL cards before those of the same chip on SXM.
_BF16_TFLOPS: Sequence[tuple[str, float]] = (
    (r"H100 PCIe", 756.0),
    (r"H[12]00 NVL", 835.0),
    (r"GH200|H200|H100.*HBM3", 989.0),
    (r"A100", 312.0),
    (r"L40S", 362.0),
)


def bf16_peak_tflops(gpu_names: Sequence[str]) -> float | None:
    """Returns the peak of a GPU's dense bf16 products in TFLOP/s.

    Args:
        gpu_names: names of all GPUs that work together; none without a GPU.

    Returns:
        None where they differ, are not known here, or are parts of a GPU (MIG), whose share of the peak is not known.
    """
    if len(set(gpu_names)) != 1 or "MIG" in gpu_names[0]:
        return None
    return next((peak for pattern, peak in _BF16_TFLOPS if re.search(pattern, gpu_names[0])), None)


def utilization_metrics(
    flops: Mapping[str, float], seconds: Mapping[str, float], *, num_gpus: int, peak_tflops: float | None
) -> dict[str, float]:
    """Names what GPUs reached in each phase: `performance/tflops_per_gpu/PHASE`, and of the peak the share.

    Args:
        flops: model FLOPs of each phase, of all GPUs together.
        seconds: of each phase; more phases than have FLOPs may be in it.
        num_gpus: GPUs, or on a CPU ranks, among which the work was divided.
        peak_tflops: of one GPU; None for no share.
    """
    reached = {phase: flops[phase] / seconds[phase] / num_gpus / 1e12 for phase in flops if seconds.get(phase, 0) > 0}
    metrics = {f"{TFLOPS_PREFIX}{phase}": value for phase, value in reached.items()}
    if peak_tflops is not None:
        metrics |= {f"{UTILIZATION_PREFIX}{phase}": value / peak_tflops for phase, value in reached.items()}
    return metrics


def mean_in_phase(rows: Sequence[Mapping[str, float | None]], prefix: str, phase: str) -> float | None:
    """Returns the mean over steps of a phase's metric, each step weighted by its seconds; None where there is none.

    Args:
        rows: the steps' metrics, as `read_metrics` gives them.
        prefix: of the metric's name, before the phase.
        phase: whose.
    """
    pairs = [
        (value, seconds)
        for row in rows
        if (value := row.get(f"{prefix}{phase}")) is not None
        and (seconds := row.get(f"timing/train/{phase}")) is not None
    ]
    whole = sum(seconds for _, seconds in pairs)
    return sum(value * seconds for value, seconds in pairs) / whole if whole > 0 else None
