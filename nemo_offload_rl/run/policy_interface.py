"""The verbs of a policy that loops use: those of ``worker.group.PolicyWorkerGroup``, with global batches.

Batch sizes count samples: rows of the batch, or groups of rows that belong together (``BatchedData.group_size``).

Each verb enters the phase that it needs; docs/decisions/phases.md says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from nemo_offload_rl.data.batch import BatchedData
from nemo_offload_rl.data.loss_contract import LossFunction
from nemo_offload_rl.plan.flops import FlopModel
from nemo_offload_rl.run.weight_sync import WeightSource
from nemo_offload_rl.storage.checksum import FileSum
from nemo_offload_rl.storage.manifest import Manifest


class Policy(WeightSource, Protocol):
    """Defines a policy that is trained, asked for log-probs, and saved."""

    def start_return(self, after: Sequence[Any], *, logprobs: bool) -> None:
        """Has state begin to come back once generation has left the GPU, as ``after`` says, and returns at once."""

    def train(self, data: BatchedData, loss_fn: LossFunction, gbs: int, mbs: int) -> dict[str, Any]:
        """Runs one optimizer step for every ``gbs`` samples; returns loss, grad_norm, lr, num_skipped and metrics."""

    def evaluate(self, data: BatchedData, loss_fn: LossFunction, mbs: int) -> dict[str, Any]:
        """Forward only; returns loss and metrics."""

    def get_logprobs(self, data: BatchedData, mbs: int) -> BatchedData:
        """``logprobs`` float32 [B, S]."""

    def get_reference_policy_logprobs(self, data: BatchedData, mbs: int) -> BatchedData:
        """``reference_logprobs`` float32 [B, S]."""

    def save_checkpoint(self, folder: str, save_optimizer: bool) -> dict[str, FileSum]:
        """Writes weights, and the optimizer's state if asked to; returns the folder's files."""

    def start_checkpoint(self, folder: str, save_optimizer: bool) -> None:
        """Takes the state of now for a checkpoint that is written beside what follows."""

    def is_checkpoint_written(self) -> bool:
        """Returns whether ``finish_checkpoint`` would not wait."""

    def finish_checkpoint(self) -> dict[str, FileSum]:
        """Completes what ``start_checkpoint`` has begun; returns the folder's files."""

    def find_damage(self, folder: str, files: Manifest) -> list[str]:
        """Returns what is wrong with the checkpoint files that ranks wrote, one line each."""

    def load_checkpoint(self, folder: str) -> None:
        """Reads what ``save_checkpoint`` wrote."""

    def export_hf(self, folder: str) -> None:
        """Writes a Hugging Face folder."""

    def memory_stats(self) -> dict[str, float]:
        """Returns the largest of the ranks' memory readings, in GiB by name."""

    def residency_metrics(self) -> dict[str, float]:
        """Returns what moved between GPU and host since the last call: ``PHASE/TARGET/NAME``, host memory."""

    def flop_model(self) -> FlopModel | None:
        """Returns what the model's FLOPs follow from; None where they are not known."""

    def gpu_names(self) -> list[str]:
        """Returns the name of each rank's GPU, or of its kind of device without one."""

    def shutdown(self) -> None:
        """Ends the policy's processes."""
