"""Runs GRPO steps and records the time of their phases, their results, and the longest response."""

import statistics
from collections.abc import Mapping
from typing import Any

from gpu_watch import GpuWatch, WatchedTimer

from colocated_ways.measured import Measured
from nemo_offload_rl.generation.interface import GenerationOutput, GenerationRequest
from nemo_offload_rl.metrics.phases import TFLOPS_PREFIX, UTILIZATION_PREFIX

WHOLE_STEP = "whole step"
NUM_TOKENS = "train/num_tokens"
PEAK_PREFIX = "performance/memory/policy/gpu_peak_"


class ResponseLengths:
    """Records the longest response of each generation, which no metric of a step has.

    Args:
        generation: whose `generate` is watched from now on.
    """

    def __init__(self, generation: Any) -> None:
        self.longest: list[int] = []
        generate = generation.generate

        def noted(request: GenerationRequest) -> GenerationOutput:
            output: GenerationOutput = generate(request)
            self.longest.append(max(len(response) for response in output.output_ids))
            return output

        generation.generate = noted


def run_steps(algorithm: Any, num_steps: int, watch: GpuWatch, measured: Measured, setting: str) -> None:
    """Runs GRPO steps; the first counts only for losses and gradient norms."""
    responses = ResponseLengths(algorithm._generation)
    seconds: list[Mapping[str, float]] = []
    metrics: list[Mapping[str, float]] = []
    peaks_gib: dict[str, float] = {}
    for step in range(1, num_steps + 1):
        timer = WatchedTimer(watch, peaks_gib if step > 1 else {})
        with timer.phase(WHOLE_STEP):
            of_step = algorithm.step(step, timer)
        peaks = {name: round(value, 2) for name, value in of_step.items() if name.startswith(PEAK_PREFIX)}
        print(f"{setting}, step {step} of {num_steps}: {timer.seconds()[WHOLE_STEP]:.2f} s; {peaks}", flush=True)
        measured.losses.append(of_step["train/loss"])
        measured.grad_norms.append(of_step["train/grad_norm"])
        if step == 1:
            responses.longest.clear()
        else:
            seconds.append(timer.seconds())
            metrics.append(of_step)
    for phase in dict.fromkeys(name for step in seconds for name in step):
        measured.add(f"{phase}", statistics.median(step[phase] for step in seconds if phase in step), "s")
    for phase, gib in peaks_gib.items():
        measured.add(f"{phase}: peak GPU memory", gib, "GiB")
    _add_metrics(metrics, measured)
    speeds = [step[NUM_TOKENS] / of_step[WHOLE_STEP] for step, of_step in zip(metrics, seconds, strict=True)]
    measured.add(f"tokens per second of a {WHOLE_STEP}", statistics.median(speeds), "tokens/s")
    measured.add("longest response", max(responses.longest), "tokens")


def _add_metrics(metrics: list[Mapping[str, float]], measured: Measured) -> None:
    """Adds medians of the metrics that describe a step's speed and size, and the policy's peaks of allocated memory."""
    for name in metrics[-1]:
        if name.startswith((TFLOPS_PREFIX, UTILIZATION_PREFIX)):
            unit = "TFLOP/s" if name.startswith(TFLOPS_PREFIX) else "share of the peak"
            measured.add(name.removeprefix("performance/"), statistics.median(step[name] for step in metrics), unit)
        elif name.startswith(PEAK_PREFIX):
            measured.add(name, max(step[name] for step in metrics), "GiB")
    for name, unit in ((NUM_TOKENS, "tokens"), ("train/token_mult_prob_error", "")):
        measured.add(name, statistics.median(step[name] for step in metrics), unit)
