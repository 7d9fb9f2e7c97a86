"""Builds workers from the recipes beside this module, and reports what their steps moved."""

import contextlib
import gc
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from ports import free_port

from activation_cases import batches
from nemo_offload_rl.activation_offload.manager import ActivationOffloader
from nemo_offload_rl.algorithms.losses import NLLLoss
from nemo_offload_rl.config import load
from nemo_offload_rl.config.validate import for_machine
from nemo_offload_rl.data.batch import BatchedData
from nemo_offload_rl.hf_config import hf_config
from nemo_offload_rl.plan.planner import worker_plan
from nemo_offload_rl.worker.environment import library_environment
from nemo_offload_rl.worker.worker import MegatronPolicyWorker

RECIPES = Path(__file__).parent / "recipes"
MIB = 2**20
STATE_STAYS = ("policy.offload_optimizer_for_refit=false", "policy.residency.table.generate.params=keep")
"""Overrides for a worker that enters no phase but training: no host memory is set aside for its state."""


def policy(recipe: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the policy section of a recipe beside this module; without a GPU, features that need one are off.

    Raises:
        RecipeError: validation refuses it.
    """
    config: Any = load(RECIPES / f"{recipe}.yaml", list(overrides)).config
    config, _ = for_machine(config, has_gpus=torch.cuda.is_available())
    return dict(config["policy"])


@contextlib.contextmanager
def environment_of(megatron_cfg: Any) -> Iterator[None]:
    """Sets the environment of a worker group's ranks until the block ends.

    Only variables that are read while layers are built take effect; those that Transformer Engine reads on import are
    set before (except for its fused experts of quantized models on GPUs later than an H200).
    """
    variables = library_environment(megatron_cfg, refit_follows=False)
    before = {name: os.environ[name] for name in variables if name in os.environ}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)
        os.environ.update(before)


@contextlib.contextmanager
def running(
    section: Any, *, rank: int = 0, world_size: int = 1, port: int | None = None
) -> Iterator[MegatronPolicyWorker]:
    """Yields a worker that frees everything when the block ends; one at a time in a process."""
    release_memory()
    with environment_of(section["megatron_cfg"]):
        worker = MegatronPolicyWorker(
            section,
            plan=worker_plan(section, hf_config(section).to_dict(), world_size=world_size),
            rank=rank,
            world_size=world_size,
            local_rank=rank,
            master_addr="localhost",
            master_port=free_port() if port is None else port,
            seed=3,
            init_reference_model=False,
        )
        try:
            yield worker
        finally:
            worker.shutdown()
            release_memory()


def release_memory() -> None:
    """Empties torch's cache of GPU memory."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@dataclass(frozen=True)
class Feed:
    """Creates the batches of a worker's training steps.

    Args:
        worker: whose they are.
        section: its policy.
        kind: number of micro-batches of a step; see `batches.num_micro_batches`.
        rows: of a padded micro-batch.
        full: every row is as long as can be.
    """

    worker: MegatronPolicyWorker
    section: dict[str, Any]
    kind: str
    rows: int
    full: bool = False

    def batch(self, step: int) -> BatchedData:
        """Returns this rank's rows of a step."""
        ranks = self.worker.parallel_ranks()
        seed = step * ranks["dp_size"] + ranks["dp_rank"]
        number, longest = batches.num_micro_batches(self.kind, step), self.section["max_total_sequence_length"]
        packing = self.section["sequence_packing"]
        if packing["enabled"]:
            divisible_by = self.section["make_sequence_length_divisible_by"]
            lengths = batches.packed_lengths(number, packing["train_mb_tokens"], longest, seed, divisible_by)
        elif self.full:
            lengths = [longest] * (number * self.rows)
        else:
            lengths = batches.padded_lengths(number * self.rows, longest, seed)
        return batches.batch(lengths, self.section["hf_config"]["vocab_size"], seed)

    def train(self, data: BatchedData) -> dict[str, Any]:
        """Trains one step; collective."""
        whole = data.size * self.worker.parallel_ranks()["dp_size"]
        return self.worker.train(data, NLLLoss(), gbs=whole, mbs=self.rows)


@dataclass(frozen=True)
class Moved:
    """Reports, in bytes, what one step offloaded on one rank; see `activation_offload/report.py`.

    Attributes:
        distinct: of storages that were large enough, each counted once.
        kept: of these, left on the GPU by choice.
        refused: of these, left there because host memory was full.
        moved: copied out.
        duplicate: saved a second time, and not copied again.
        freed: seen gone between their copies.
        late: copied back only when needed.
        num_micro_batches: forward passes through model chunks that took part.
        host: page-locked for activations.
    """

    distinct: int = 0
    kept: int = 0
    refused: int = 0
    moved: int = 0
    duplicate: int = 0
    freed: int = 0
    late: int = 0
    num_micro_batches: int = 0
    host: int = 0

    @property
    def should_leave(self) -> int:
        """Returns the distinct bytes that should be offloaded: all but those kept on purpose."""
        return self.distinct - self.kept

    def cells(self) -> dict[str, Any]:
        """Returns fields of a row, for a whole step."""
        names = ("moved", "distinct", "kept", "refused", "duplicate", "freed", "late")
        return {f"{name}_mib": round(getattr(self, name) / MIB, 3) for name in names}


def offloader(worker: MegatronPolicyWorker) -> ActivationOffloader | None:
    """Returns the worker's activation offloader, or None if the recipe does not ask for one."""
    return worker.activations.offloader


@contextlib.contextmanager
def suspended(active: ActivationOffloader) -> Iterator[None]:
    """Runs the passes in the block without offloading."""
    active.disable_offload()
    try:
        yield
    finally:
        active.enable_offload()


def moved_by(worker: MegatronPolicyWorker) -> Moved:
    """Returns what the worker's last training step moved; all zeros if it does not offload."""
    active = offloader(worker)
    if active is None:
        return Moved()
    report = active.report
    total = report.total()
    return Moved(
        distinct=total.distinct_bytes,
        kept=total.resident_bytes,
        refused=total.refused_bytes,
        moved=total.moved_bytes,
        duplicate=total.duplicate_bytes,
        freed=total.freed_bytes,
        late=total.late_bytes,
        num_micro_batches=report.num_micro_batches,
        host=report.host_bytes,
    )
