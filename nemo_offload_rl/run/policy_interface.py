"""Defines the policy's methods that algorithms call; ``worker.group.PolicyWorkerGroup`` implements them.

All take global batches. Batch sizes count samples: rows of the batch, or groups of rows that belong together
(``BatchedData.group_size``).

Each method enters the residency phase that it needs; docs/decisions/phases.md says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from nemo_offload_rl.data.batch import BatchedData, LossFunction
from nemo_offload_rl.metrics.timer import ProfileOptions
from nemo_offload_rl.plan.step_time import FlopModel
from nemo_offload_rl.run.weight_sync import WeightSource
from nemo_offload_rl.storage.manifest import FileSum, Manifest


class Policy(WeightSource, Protocol):
    """Defines a policy that is trained, asked for log-probs, and saved."""

    def start_return(self, after: Sequence[Any], *, logprobs: bool) -> None:
        """Makes ranks copy state back to the GPU once generation has freed its memory there; returns at once.

        Args:
            after: Ray references that are done when generation has freed its GPU memory.
            logprobs: whether a log-prob pass comes before training.
        """

    def start_profile(self, options: ProfileOptions, prefix: str) -> None:
        """Makes ranks record what they do, to files whose names begin with ``prefix``."""

    def stop_profile(self) -> None:
        """Makes ranks write what they have recorded."""

    def train(self, data: BatchedData, loss_fn: LossFunction, gbs: int, mbs: int) -> dict[str, Any]:
        """Runs one optimizer step for every ``gbs`` samples; returns loss, grad_norm, lr, num_skipped and metrics."""

    def evaluate(self, data: BatchedData, loss_fn: LossFunction, mbs: int) -> dict[str, Any]:
        """Runs forward passes only; returns loss and metrics."""

    def get_logprobs(self, data: BatchedData, mbs: int) -> BatchedData:
        """Computes the policy's log-probs of the tokens; returns ``logprobs`` float32 [B, S]."""

    def get_reference_policy_logprobs(self, data: BatchedData, mbs: int) -> BatchedData:
        """Computes the reference policy's log-probs of the tokens; returns ``reference_logprobs`` float32 [B, S]."""

    def save_checkpoint(self, folder: str, save_optimizer: bool) -> dict[str, FileSum]:
        """Writes the weights and, if asked to, the optimizer's state; returns the folder's files."""

    def start_checkpoint(self, folder: str, save_optimizer: bool) -> None:
        """Takes a snapshot of the current state for a checkpoint that ranks write in the background."""

    def is_checkpoint_written(self) -> bool:
        """Returns whether ``finish_checkpoint`` would return without waiting for ranks."""

    def finish_checkpoint(self) -> dict[str, FileSum]:
        """Completes the checkpoint that ``start_checkpoint`` began; returns the folder's files."""

    def find_damage(self, folder: str, files: Manifest) -> list[str]:
        """Verifies the checkpoint files that ranks wrote; returns a line for each damaged file."""

    def load_checkpoint(self, folder: str, num_skipped: int = 0, num_train_calls: int | None = None) -> None:
        """Loads a checkpoint that ``save_checkpoint`` wrote, after so many skipped steps and calls of ``train``."""

    def export_hf(self, folder: str) -> None:
        """Writes a Hugging Face folder."""

    def memory_stats(self) -> dict[str, float]:
        """Returns the largest of the ranks' memory readings, in GiB by name."""

    def residency_metrics(self) -> dict[str, float]:
        """Returns metrics of moves between GPU and host since the last call (``PHASE/TARGET/NAME``) and host memory."""

    def flop_model(self) -> FlopModel | None:
        """Returns the sizes that the model's FLOPs are computed from; None where they are not known."""

    def gpu_names(self) -> list[str]:
        """Returns the name of each rank's GPU, or of its device type without a GPU."""

    def shutdown(self) -> None:
        """Ends the policy's processes."""
