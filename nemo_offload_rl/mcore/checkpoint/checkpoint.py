"""Saves and loads a rank's training state through megatron-core's dist_checkpointing.

The optimizer is written as `dp_reshardable`: `fully_reshardable` comes back silently wrong in megatron-core 0.19.2
when DDP has several buckets. Any number of data-parallel ranks can read it, if DDP divides the parameters into the same
buckets. The caller gives a folder of its own and renames it when every rank is done.
"""

import dataclasses
import json
import logging
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import megatron.core
import torch
from megatron.core import dist_checkpointing, tensor_parallel
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.utils import unwrap_model
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import STORAGE_TYPES, TensorStorageMetadata

from nemo_offload_rl.mcore.build import TrainingState
from nemo_offload_rl.mcore.checkpoint.checkpoint_writer import HashingSaveStrategy, PlanEverySave, SavePlanning
from nemo_offload_rl.mcore.checkpoint.optimizer_loading import (
    converting,
    keep_hyperparameters,
    read_as_saved,
    require_same_schedule,
)
from nemo_offload_rl.mcore.distributed import ParallelSizes, gather
from nemo_offload_rl.mcore.optimizer.cpu_optimizer import cpu_optimizers
from nemo_offload_rl.mcore.optimizer.init_optimizer_state import init_optimizer_state, torch_adams
from nemo_offload_rl.mcore.patches.optimizers import reload_masters
from nemo_offload_rl.mcore.weights import HF_CONFIG_DIR, hf_config_of, save_hf_config
from nemo_offload_rl.storage.disk import write_whole
from nemo_offload_rl.storage.manifest import CheckpointError, FileSum

logger = logging.getLogger(__name__)

LAYOUT_FILE = "layout.json"
PLAN_EVERY_SAVE = PlanEverySave()
METADATA = {"distrib_optim_sharding_type": "dp_reshardable", "chained_optim_avoid_prefix": True}


def _rng_state() -> dict[str, Any]:
    return {
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def _restore_rng(rng: dict[str, Any]) -> None:
    torch.set_rng_state(rng["cpu"])
    torch.cuda.set_rng_state(rng["cuda"])
    tensor_parallel.get_cuda_rng_tracker().set_states(rng["tracker"])


def _sharded_rng(rng: dict[str, Any] | None) -> ShardedObject:
    shape = (
        mpu.get_pipeline_model_parallel_world_size(),
        mpu.get_tensor_model_parallel_world_size(),
        mpu.get_data_parallel_world_size(with_context_parallel=True),
    )
    offset = (
        mpu.get_pipeline_model_parallel_rank(),
        mpu.get_tensor_model_parallel_rank(),
        mpu.get_data_parallel_rank(with_context_parallel=True),
    )
    return ShardedObject("rng_state", rng, shape, offset, replica_id=0)


def _restore_torch_steps(state: TrainingState) -> None:
    """Give every parameter its own step count again.

    The distributed optimizer of megatron-core 0.19.2 keeps the count in the param groups, loads one tensor shared by
    all parameters (each would advance it) and then copies the count from before the load over it.
    """
    assert state.optimizer is not None
    for adam in torch_adams(state.optimizer):
        for group in adam.param_groups:
            if "step" in group:  # only the distributed optimizer writes it; the others restore the counts themselves
                for parameter in group["params"]:
                    adam.state[parameter]["step"] = torch.tensor(float(group["step"]))


def _make_nothing(*_: Any) -> None:
    """Replaces what megatron-core calls in a load to make state, which is None for SGD: all state is there."""


def _sharded_state(state: TrainingState, *, with_optimizer: bool, is_loading: bool) -> dict[str, Any]:
    metadata = dict(METADATA)  # megatron-core adds the data-parallel group, which the process's next policy has not
    chunks = unwrap_model(state.model)
    keys = ["model"] if len(chunks) == 1 else [f"model{index}" for index in range(len(chunks))]
    sharded: dict[str, Any] = {
        key: chunk.sharded_state_dict(metadata=metadata) for key, chunk in zip(keys, chunks, strict=True)
    }
    if with_optimizer:
        assert state.optimizer is not None and state.scheduler is not None
        init_optimizer_state(state.optimizer)  # megatron-core asserts that torch's Adam has its state
        for part in state.optimizer.chained_optimizers:
            part.init_state_fn = _make_nothing
        model_only = sharded["model"] if len(chunks) == 1 else dict(sharded)
        sharded["optimizer"] = state.optimizer.sharded_state_dict(model_only, is_loading=is_loading, metadata=metadata)
        sharded["scheduler"] = state.scheduler.state_dict()
        sharded["rng_state"] = _sharded_rng(_rng_state())
    return sharded


def readable_state(
    state: TrainingState, *, with_optimizer: bool, read: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, Any]:
    """Returns the sharded state that `save` passes to megatron-core, with tensors that `read` returns."""
    sharded = _sharded_state(state, with_optimizer=with_optimizer, is_loading=False)
    for entry in nested_values(sharded):
        # Replace the entries' tensors, and not the parameters' own data: for a parameter that changes its device torch
        # makes a new gradient accumulator, without the hooks of DistributedDataParallel.
        if isinstance(entry, (ShardedTensor, ShardedTensorFactory)) and entry.data is not None:
            entry.data = read(entry.data)
    return sharded


def save(
    state: TrainingState,
    folder: Path,
    sizes: ParallelSizes,
    *,
    with_optimizer: bool,
    read: Callable[[torch.Tensor], torch.Tensor],
    plans: SavePlanning = PLAN_EVERY_SAVE,
) -> dict[str, FileSum]:
    """Write the training state; collective over all ranks.

    Files are hashed while they are written. A disk error on one rank is raised on every rank, and all can go on.

    Args:
        state: what to write.
        folder: made if missing; must hold nothing yet.
        sizes: written beside the state, so that `load` can refuse another layout.
        with_optimizer: also write optimizer, scheduler and random states, which resuming needs.
        read: returns a readable tensor with the contents of one of the state's tensors, on the CPU or the GPU.
        plans: decides whether the plan of the last save is reused.

    Returns:
        Size and checksum of every file of the folder, by path relative to it.

    Raises:
        ValueError: if the optimizer is wanted and this state has none.
        DiskFullError: there is no space; found out before anything is written if the disk reports its free space.
        OSError: the disk has failed.
    """
    require_optimizer(state, folder, with_optimizer=with_optimizer)
    strategy = HashingSaveStrategy(folder, plans)
    strategy.make_folder()
    sharded = readable_state(state, with_optimizer=with_optimizer, read=read)
    failure = strategy.run(lambda: dist_checkpointing.save(sharded, str(folder), strategy, content_metadata=METADATA))
    write_hf_config(state, strategy, folder)
    return finish_files(strategy, folder, sizes, failure, with_optimizer=with_optimizer)


def require_optimizer(state: TrainingState, folder: Path, *, with_optimizer: bool) -> None:
    """Check that the state has an optimizer if one is to be saved.

    Raises:
        ValueError: it has none.
    """
    if with_optimizer and state.optimizer is None:
        raise ValueError(
            f"Cannot save an optimizer to {folder}: this policy was built without one (init_optimizer=False)."
        )


def write_hf_config(state: TrainingState, strategy: HashingSaveStrategy, folder: Path) -> None:
    """Write the model's Hugging Face configs on rank 0; `finish_files` raises a disk error of it."""
    if torch.distributed.get_rank() == 0:
        config = hf_config_of(state.bridge)
        strategy.keeping_errors(lambda: save_hf_config(config, state.generation_config, folder / HF_CONFIG_DIR))


def finish_files(
    strategy: HashingSaveStrategy,
    folder: Path,
    sizes: ParallelSizes,
    failure: CheckpointException | None,
    *,
    with_optimizer: bool,
) -> dict[str, FileSum]:
    """Complete a checkpoint after the state was saved: write its layout file, and settle all ranks; collective.

    Args:
        strategy: the strategy that has saved the state.
        folder: the checkpoint's folder.
        sizes: see `save`.
        failure: what `strategy.run` has returned.
        with_optimizer: see `save`.

    Returns:
        Size and checksum of every file of the folder, by path relative to it.

    Raises:
        DiskFullError, OSError: see `save`.
    """
    if torch.distributed.get_rank() > 0:
        return strategy.settle([], failure)
    layout = {
        "parallel": dataclasses.asdict(sizes),
        "world_size": torch.distributed.get_world_size(),
        "with_optimizer": with_optimizer,
        "megatron_core": megatron.core.__version__,
    }
    strategy.keeping_errors(lambda: write_whole(folder / LAYOUT_FILE, json.dumps(layout, indent=2)))
    written_by_ranks = {path for path in folder.rglob("*") if path.suffix == ".distcp"}
    return strategy.settle(
        [path for path in folder.rglob("*") if path.is_file() and path not in written_by_ranks], failure
    )


def _unreadable(folder: Path, what: str, error: BaseException) -> CheckpointError:
    reason = (str(error).strip().splitlines() or ["no details"])[0]
    return CheckpointError(f"Checkpoint {folder} cannot be loaded: {what} ({type(error).__name__}: {reason}).")


def _require_json(folder: Path, name: str) -> None:
    try:
        content = json.loads((folder / name).read_text())
    except (OSError, ValueError) as error:
        raise _unreadable(folder, f"{name} cannot be read", error) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"Checkpoint {folder} cannot be loaded: {name} does not hold a JSON object.")


def check_layout(folder: Path, sizes: ParallelSizes, *, with_optimizer: bool) -> int:
    """Check that a run with these parallel sizes can read a checkpoint.

    Returns:
        The number of ranks that wrote it.

    Raises:
        CheckpointError: its layout cannot be read.
        ValueError: if it is no checkpoint; or, where the optimizer is wanted, if it has none or another TP, PP or EP
        size.
    """
    path = folder / LAYOUT_FILE
    if not path.is_file():
        raise ValueError(
            f"{folder} is not a complete policy checkpoint: it has no {LAYOUT_FILE}; give a step folder's policy/."
        )
    wanted = dataclasses.asdict(sizes)
    for name in (LAYOUT_FILE, CONFIG_FNAME):
        _require_json(folder, name)
    layout = json.loads(path.read_text())
    try:
        found = {key: layout["parallel"][key] for key in wanted}
        has_optimizer, num_ranks = layout["with_optimizer"], int(layout["world_size"])
    except (KeyError, TypeError, ValueError) as error:
        raise _unreadable(folder, f"{LAYOUT_FILE} does not have the expected keys", error) from error
    if not with_optimizer:  # weights alone can be read in any layout
        return num_ranks
    # Context-parallel ranks share the optimizer as data-parallel ranks do, whose number may change.
    wrong = {key: (found[key], value) for key, value in wanted.items() if found[key] != value and key != "context"}
    if wrong:
        listed = ", ".join(
            f"{key} parallel size {was} in the checkpoint and {now} in this run" for key, (was, now) in wrong.items()
        )
        raise ValueError(
            f"Checkpoint {folder} cannot be resumed: {listed}; its optimizer is sharded by that layout. Resume with "
            "the sizes it was written with, or start a new run from an export (nemo-offload-rl export)."
        )
    if not has_optimizer:
        raise ValueError(
            f"Checkpoint {folder} has no optimizer state (checkpointing.save_optimizer was false), so training cannot "
            "resume from it; start a new run from an export (nemo-offload-rl export)."
        )
    return num_ranks


def _require_same_shapes(sharded: dict[str, Any], saved: Mapping[str, STORAGE_TYPES], folder: Path) -> None:
    """Check that a checkpoint has all tensors that are to be read, in their shapes; collective.

    The shapes of optimizer state are those of DDP's buckets: another division would otherwise be read as this run's.

    Raises:
        CheckpointError: on every rank, if one misses a tensor.
    """
    model = {part: state for part, state in sharded.items() if part.startswith("model")}
    # With the optimizer, which resumes at one tensor-parallel size, no vocabulary is padded otherwise.
    here = (
        _difference(model, saved, exact="optimizer" in sharded),
        _difference(sharded.get("optimizer", {}), saved, exact=True),
    )
    of_ranks = gather(here)
    of_model, of_optimizer = (next((one for one in found if one), None) for found in zip(*of_ranks, strict=True))
    if of_model:
        raise CheckpointError(
            f"Checkpoint {folder} cannot be loaded: it is of another model, {of_model}; to train this one, give "
            "another checkpointing.checkpoint_dir."
        )
    if of_optimizer:
        raise CheckpointError(
            f"Checkpoint {folder} cannot be resumed: its optimizer state is divided otherwise than this run's, "
            f"{of_optimizer}; resume with the precision, optimizer and distributed_data_parallel_config that it was "
            "written with (for more than 40 data-parallel ranks set bucket_size there, since its default grows with "
            "their number), or start a new run from an export (nemo-offload-rl export)."
        )


def _difference(sharded: Any, saved: Mapping[str, STORAGE_TYPES], *, exact: bool) -> str | None:
    for entry in nested_values(sharded):
        if isinstance(entry, ShardedTensor):
            found = saved.get(entry.key)
            if not isinstance(found, TensorStorageMetadata):
                return f"without the tensor {entry.key} of this run"
            if (exact or not entry.allow_shape_mismatch) and tuple(found.size) != tuple(entry.global_shape):
                return f"in which {entry.key} has the shape {[*found.size]}, and {[*entry.global_shape]} in this run"
    return None


def load(state: TrainingState, folder: Path, sizes: ParallelSizes, *, with_optimizer: bool) -> None:
    """Read a training state in place; collective over all ranks.

    The learning-rate schedule and other hyperparameters stay those of this run's recipe; of the checkpoint's schedule
    only the step count is read. Random states belong to ranks, and stay as they are if another number of ranks wrote
    the checkpoint.

    Args:
        state: built with the same model and parallel sizes.
        folder: what `save` wrote.
        sizes: the parallel sizes of this run.
        with_optimizer: also read optimizer, scheduler and random states.

    Raises:
        CheckpointError: a file cannot be read, or is of another model; only the manifest's checksums find damage.
        ValueError: see `check_layout` and `keep_hyperparameters`.
    """
    num_ranks = check_layout(folder, sizes, with_optimizer=with_optimizer)
    sharded = _sharded_state(state, with_optimizer=with_optimizer, is_loading=True)
    if with_optimizer and num_ranks != torch.distributed.get_world_size():
        del sharded["rng_state"]
        if torch.distributed.get_rank() == 0:
            logger.info(
                "Checkpoint %s is of another number of ranks (%d, now %d): their random states are not restored.",
                folder,
                num_ranks,
                torch.distributed.get_world_size(),
            )
    try:
        saved = FileSystemReader(str(folder)).read_metadata().state_dict_metadata
        _require_same_shapes(sharded, saved, folder)
        has_other_masters = with_optimizer and read_as_saved(sharded["optimizer"], saved)
        loaded = dist_checkpointing.load(sharded, str(folder), strict=StrictHandling.RAISE_UNEXPECTED)
    except CheckpointException as error:  # of torch's reader, with each rank's error
        met = next((found[0] for found in error.failures.values()), error)
        raise _unreadable(folder, "its files cannot be read", met) from error
    except (CheckpointingException, OSError, EOFError, pickle.UnpicklingError) as error:
        raise _unreadable(folder, "its files cannot be read", error) from error
    if with_optimizer and state.scheduler is not None:
        require_same_schedule(state.scheduler, loaded["scheduler"], folder)
    chunks = unwrap_model(state.model)
    for index, chunk in enumerate(chunks):
        chunk.load_state_dict(loaded["model" if len(chunks) == 1 else f"model{index}"])
    if with_optimizer:
        assert state.optimizer is not None and state.scheduler is not None
        keep_hyperparameters(state.optimizer, loaded["optimizer"], folder)
        with torch.no_grad(), converting(state.optimizer, has_other_masters):  # it copies into parameters
            state.optimizer.load_state_dict(loaded["optimizer"])
        for optimizer in cpu_optimizers(state.optimizer):
            optimizer.finish_load()
        _restore_torch_steps(state)
        state.scheduler.num_steps = 0  # megatron-core adds the steps of the checkpoint to this count
        state.scheduler.load_state_dict(loaded["scheduler"])
        if "rng_state" in sharded:
            _restore_rng(loaded["rng_state"])
    elif state.optimizer is not None:
        reload_masters(state.optimizer)
