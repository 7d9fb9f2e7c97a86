"""Policy workers that note when their GPU's work begins and ends; one of them moves its state as NeMo-RL does."""

from typing import Any
from unittest import mock

from colocated_ways.marks import Marks, StreamMoments
from colocated_ways.upstream_state import UpstreamEngine
from nemo_offload_rl.data.batch import BatchedData
from nemo_offload_rl.data.loss_contract import LossFunction
from nemo_offload_rl.worker.checked import CheckedPolicyWorker

OURS = "colocated_ways.policy:MarkedWorker"
UPSTREAM = "colocated_ways.policy:UpstreamWorker"


class MarkedWorker(CheckedPolicyWorker):
    """The worker of a run.

    It notes `first_training_kernel` and `last_optimizer_kernel` of each training, and how long each refit takes: from
    the first weight's export to the engine's word that all are loaded.
    """

    def __init__(self, config: Any, *, rank: int, local_rank: int, **arguments: Any) -> None:
        marks = Marks(f"policy-{rank}")
        with marks.span("policy_build"):
            super().__init__(config, rank=rank, local_rank=local_rank, **arguments)
        self._marks = marks
        self._moments = StreamMoments(self.device, marks)
        self._is_first_forward = False
        self.state.model[0].register_forward_pre_hook(self._before_forward)

    def train(self, data: BatchedData, loss_fn: LossFunction, gbs: int, mbs: int) -> dict[str, Any]:
        """See `MegatronPolicyWorker.train`."""
        self._moments.anchor()
        self._is_first_forward = True
        result = super().train(data, loss_fn, gbs, mbs)
        self._moments.note("last_optimizer_kernel")
        return result

    def send_weights(self) -> dict[str, int]:
        """See `MegatronPolicyWorker.send_weights`."""
        with self._marks.span("refit"):
            sent = super().send_weights()
        self._moments.resolve()  # the optimizer's step has ended by now
        return sent

    def shutdown(self) -> None:
        """See `MegatronPolicyWorker.shutdown`."""
        self._moments.resolve()
        super().shutdown()

    def _before_forward(self, *_: object) -> None:
        if self._is_first_forward:
            self._is_first_forward = False
            self._moments.note("first_training_kernel")


class UpstreamWorker(MarkedWorker):
    """The same without the residency engine."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        with mock.patch("nemo_offload_rl.worker.worker.make_engine", UpstreamEngine):
            super().__init__(*arguments, **named)
