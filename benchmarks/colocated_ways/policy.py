"""Defines policy workers that record when their GPU's work begins and ends; one moves its state as NeMo-RL does."""

from typing import Any
from unittest import mock

from colocated_ways.copies import CopyMarks
from colocated_ways.marks import Marks, StreamMoments
from colocated_ways.upstream_state import UpstreamEngine
from nemo_offload_rl.data.batch import BatchedData, LossFunction
from nemo_offload_rl.model_check.check import ModelCheck
from nemo_offload_rl.worker import worker as worker_module
from nemo_offload_rl.worker.worker import MegatronPolicyWorker

_PARTS = ("read_hf_config", "bind_to_gpu", "build", "make_offloader", "make_graphs")
"""Functions of the worker's module that build a worker."""


class MarkedWorker(MegatronPolicyWorker):
    """Runs the worker of a run and records its moments.

    It records `first_training_kernel` and `last_optimizer_kernel` of each training, how long each refit takes (from the
    first weight's export until the engine reports that all are loaded), and spans of everything else in a switch.
    """

    def __init__(self, config: Any, *, rank: int, local_rank: int, **arguments: Any) -> None:
        marks = Marks(f"policy-{rank}")
        marks.watch(worker_module, {name: f"policy_build, {name}" for name in _PARTS})
        marks.watch(worker_module.distributed, {"initialize": "policy_build, distributed.initialize"})
        marks.watch(ModelCheck, {"finish": "policy_build, ModelCheck.finish"})  # runs beside the others
        with marks.span("policy_build"):
            super().__init__(config, rank=rank, local_rank=local_rank, **arguments)
        self._marks = marks
        self._moments = StreamMoments(self.device, marks)
        self._copies = CopyMarks(self.offloader.meter, marks, self._moments)
        self._is_first_forward = False
        self.state.model[0].register_forward_pre_hook(self._before_forward)
        marks.watch(self, {verb: verb for verb in ("start_return", "offload_before_refit", "offload_after_refit")})
        marks.watch(self, {"_catch_up": "catch up"})
        marks.watch(
            self.residency,
            {
                "enter": lambda phase, **_: f"enter {phase}",
                "prefetch": lambda phase, *_, **__: f"prefetch {phase}",
                "start_leaving": lambda phase: f"start leaving for {phase}",
            },
        )
        marks.watch(self.batcher, {"cut": "cut the batch", "_common": "agree on its sizes"})
        # Not at the end of `train`, which empties torch's cache after the update and waits for the GPU to do so.
        update: Any = self.state.optimizer
        step = update.step_with_ready_grads

        def noted_step(*of_step: Any, **named_of_step: Any) -> Any:
            result = step(*of_step, **named_of_step)
            self._moments.note("last_optimizer_kernel", again=True)
            return result

        update.step_with_ready_grads = noted_step

    def train(self, data: BatchedData, loss_fn: LossFunction, gbs: int, mbs: int) -> dict[str, Any]:
        """See `MegatronPolicyWorker.train`."""
        with self._marks.span("train"):
            with self._marks.span("anchor the clocks"):  # of this benchmark alone
                self._moments.anchor()
            self._is_first_forward = True
            return super().train(data, loss_fn, gbs, mbs)

    def send_weights(self) -> dict[str, int]:
        """See `MegatronPolicyWorker.send_weights`."""
        with self._marks.span("refit"):
            sent = super().send_weights()
        self._resolve()  # the optimizer's step has ended by now
        return sent

    def shutdown(self) -> None:
        """See `MegatronPolicyWorker.shutdown`."""
        self._resolve()
        super().shutdown()

    def _resolve(self) -> None:
        with self._marks.span("write the marks"):  # of this benchmark alone
            self._moments.resolve()
            self._copies.resolve()

    def _before_forward(self, *_: object) -> None:
        if self._is_first_forward:
            self._is_first_forward = False
            self._moments.note("first_training_kernel")


class UpstreamWorker(MarkedWorker):
    """Runs the same worker without the offloader."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        with mock.patch("nemo_offload_rl.worker.worker.make_offloader", UpstreamEngine):
            super().__init__(*arguments, **named)
