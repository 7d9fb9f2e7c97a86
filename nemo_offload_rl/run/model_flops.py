"""Computes the TFLOP/s and the share of the GPUs' peak of a step's phases, from the lengths of the batch's rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from nemo_offload_rl.metrics.utilization import bf16_peak_tflops, utilization_metrics
from nemo_offload_rl.plan.flops import TRAINING_PASSES, FlopModel

if TYPE_CHECKING:
    from nemo_offload_rl.run.policy_interface import Policy

# FLOPs of each phase, in forward passes.
PASSES = {"training": TRAINING_PASSES, "logprobs": 1, "reference_logprobs": 1}


class ModelFlops:
    """Counts a policy's FLOPs in each phase of a step.

    Args:
        policy: the policy; queried for its model and GPUs on first use, since it may still be being built before.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    @cached_property
    def _model(self) -> FlopModel | None:
        return self._policy.flop_model()

    @cached_property
    def _gpu_names(self) -> list[str]:
        return self._policy.gpu_names()

    def metrics(self, lengths: Sequence[int], seconds: Mapping[str, float]) -> dict[str, float]:
        """Returns `performance/tflops_per_gpu/PHASE`, and the share of the peak where that is known.

        Args:
            lengths: tokens of each row of the batch, over all ranks, without padding.
            seconds: seconds of the step's phases so far; only those in `PASSES` are read.

        Returns:
            Metrics by name; empty for a model whose FLOPs are not known.
        """
        if self._model is None:
            return {}
        forward = self._model.forward_flops(lengths)
        flops = {phase: passes * forward for phase, passes in PASSES.items() if phase in seconds}
        names = self._gpu_names
        peak = bf16_peak_tflops(names) if self._model.precision == "bfloat16" else None
        return utilization_metrics(flops, seconds, num_gpus=len(names), peak_tflops=peak)
