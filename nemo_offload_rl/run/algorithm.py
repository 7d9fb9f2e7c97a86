"""Defines the base class of algorithms with one policy, and the policy's methods that they call.

Defines the policy's methods that algorithms call; ``worker.group.PolicyWorkerGroup`` implements them. All take global
batches. Batch sizes count samples: rows of the batch, or groups of rows that belong together
(``BatchedData.group_size``).

Each method enters the residency phase that it needs; docs/decisions/phases.md says why.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from nemo_offload_rl.data.batch import BatchedData, LossFunction
from nemo_offload_rl.data.loader import DataPosition, ProblemLoader
from nemo_offload_rl.metrics.names import memory_metrics, residency_metrics, training_metrics
from nemo_offload_rl.metrics.phases import bf16_peak_tflops, utilization_metrics
from nemo_offload_rl.metrics.samples import JudgedAnswer
from nemo_offload_rl.metrics.timer import ProfileOptions, Timer
from nemo_offload_rl.plan.step_time import TRAINING_PASSES, FlopModel
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


POLICY_FOLDER = "policy"

# FLOPs of each phase, in forward passes.
PASSES = {"training": TRAINING_PASSES, "logprobs": 1, "reference_logprobs": 1}


class Algorithm(ABC):
    """Defines the interface that ``train_loop.Run`` calls; a subclass implements a training step and a validation.

    Args:
        policy: the policy to train.
        data: the training data.
        save_optimizer: whether checkpoints include the optimizer's state.

    Attributes:
        num_skipped: optimizer steps of the run that were skipped so far, since loss or gradient was not finite.
    """

    def __init__(self, policy: Policy, data: ProblemLoader[Any], *, save_optimizer: bool) -> None:
        self._policy = policy
        self._data = data
        self._save_optimizer = save_optimizer
        self._flops = ModelFlops(policy)
        self.num_skipped = 0
        # Answers of the newest validation to show to the user; empty for an algorithm that samples no answers.
        self.validation_answers: Sequence[JudgedAnswer] = ()

    @abstractmethod
    def step(self, step: int, timer: Timer) -> dict[str, float]:
        """Runs training step ``step`` (from 1), times its phases, and returns its metrics by their full names."""

    @abstractmethod
    def validate(self, step: int) -> dict[str, float]:
        """Returns validation metrics of the policy after ``step`` steps; empty without validation data."""

    def abandon_step(self) -> None:  # noqa: B027 - most algorithms have nothing to do
        """Ends what a step or a validation that has raised an error has under way, so that the policy can be saved."""

    def _train(
        self, batch: BatchedData, loss_fn: LossFunction, timer: Timer, *, gbs: int, mbs: int
    ) -> dict[str, float]:
        """Trains on a batch; returns metrics of the loss, FLOP utilisation, moves between GPU and host, and memory.

        Log-prob phases that the timer has measured in this step are assumed to be of the same batch.
        """
        with timer.phase("training"):
            result = self._policy.train(batch, loss_fn, gbs=gbs, mbs=mbs)
        self.num_skipped += result["num_skipped"]
        with timer.phase("metrics"):
            moves, memory = self._policy.residency_metrics(), self._policy.memory_stats()
        return (
            training_metrics(result)
            | {"train/num_tokens": float(batch["input_lengths"].sum())}
            | self._flops.metrics(batch["input_lengths"].tolist(), timer.seconds())
            | residency_metrics(moves)
            | memory_metrics("policy", memory)
        )

    @contextmanager
    def profiled(self, options: ProfileOptions, prefix: Path) -> Iterator[None]:
        """Has ranks record what they do inside the `with` block, to files whose names begin with ``prefix``.

        A block that raises leaves the recording unfinished: ranks that have failed cannot write it.
        """
        self._policy.start_profile(options, str(prefix))
        yield
        self._policy.stop_profile()

    @property
    def position(self) -> DataPosition:
        """The position of the next batch in the training data; set when a run resumes."""
        return self._data.position

    @position.setter
    def position(self, position: DataPosition) -> None:
        self._data.position = position

    def save(self, folder: Path) -> Mapping[str, FileSum]:
        """Writes the policy into a checkpoint folder; returns its files by their names in that folder.

        Raises:
            DiskFullError: the disk is full; training can go on.
        """
        files = _below_policy(self._policy.save_checkpoint(str(folder / POLICY_FOLDER), self._save_optimizer))
        self._save_own_files(folder)
        return files

    def _save_own_files(self, folder: Path) -> None:  # noqa: B027 - most algorithms have none
        """Writes what the algorithm's checkpoints have besides the policy, and `load` reads; see ``save``."""

    def start_save(self, folder: Path) -> None:
        """Takes a snapshot of the policy's state, which ranks write to a checkpoint folder while training goes on.

        Raises:
            DiskFullError: the disk is full; no save is in progress.
        """
        self._save_own_files(folder)  # first: where the disk is full, no save is in progress
        self._policy.start_checkpoint(str(folder / POLICY_FOLDER), self._save_optimizer)

    def is_save_written(self) -> bool:
        """Returns whether ``finish_save`` would return without waiting for ranks."""
        return self._policy.is_checkpoint_written()

    def finish_save(self) -> Mapping[str, FileSum]:
        """Waits until the save that ``start_save`` began is complete; returns the same as ``save``."""
        return _below_policy(self._policy.finish_checkpoint())

    def find_damage(self, folder: Path, files: Manifest) -> list[str]:
        """Has ranks verify the files that ranks wrote to a checkpoint; returns a line for each damaged file."""
        return self._policy.find_damage(str(folder), files)

    def load(self, folder: Path, step: int, num_skipped: int) -> None:
        """Loads the policy from the checkpoint folder of a step, up to which so many optimizer steps were skipped."""
        self.num_skipped = num_skipped
        self._policy.load_checkpoint(str(folder / POLICY_FOLDER), num_skipped, num_train_calls=step)

    def export_hf(self, folder: Path) -> None:
        """Writes the policy as a Hugging Face folder.

        Raises:
            DiskFullError: the disk is full.
        """
        self._policy.export_hf(str(folder))

    def stop(self) -> None:  # noqa: B027 - most algorithms have nothing to do
        """Ends what runs beside the loop on this machine, after an immediate stop, when workers may not answer."""

    def shutdown(self) -> None:
        """Ends the processes that the algorithm uses."""
        self._policy.shutdown()


def _below_policy(sums: Mapping[str, FileSum]) -> dict[str, FileSum]:
    return {f"{POLICY_FOLDER}/{name}": found for name, found in sums.items()}


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
