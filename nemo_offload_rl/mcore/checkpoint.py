"""Saves and loads a rank's training state through megatron-core's dist_checkpointing.

The optimizer is written as `dp_reshardable`: `fully_reshardable` comes back silently wrong in megatron-core 0.19.2
when DDP has several buckets. The caller gives a folder that nobody else uses and renames it when every rank is done.
"""

import dataclasses
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import megatron.core
import torch
from megatron.core import dist_checkpointing, tensor_parallel
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.utils import unwrap_model

from nemo_offload_rl.mcore.build import TrainingState
from nemo_offload_rl.mcore.export import HF_CONFIG_DIR, hf_config_of
from nemo_offload_rl.mcore.parallel import ParallelSizes
from nemo_offload_rl.mcore.prime import prime_optimizer_state, torch_adams

LAYOUT_FILE = "layout.json"
_METADATA = {"distrib_optim_sharding_type": "dp_reshardable", "chained_optim_avoid_prefix": True}


def _rng_state() -> dict[str, Any]:
    return {
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


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
            if "step" in group:  # written by the distributed optimizer only; the others restore the counts themselves
                for parameter in group["params"]:
                    adam.state[parameter]["step"] = torch.tensor(float(group["step"]))


def _sharded_state(state: TrainingState, *, with_optimizer: bool, is_loading: bool) -> dict[str, Any]:
    chunks = unwrap_model(state.model)
    keys = ["model"] if len(chunks) == 1 else [f"model{index}" for index in range(len(chunks))]
    sharded: dict[str, Any] = {
        key: chunk.sharded_state_dict(metadata=_METADATA) for key, chunk in zip(keys, chunks, strict=True)
    }
    if with_optimizer:
        assert state.optimizer is not None and state.scheduler is not None
        prime_optimizer_state(state.optimizer)  # megatron-core asserts that torch's Adam has its state
        model_only = sharded["model"] if len(chunks) == 1 else dict(sharded)
        sharded["optimizer"] = state.optimizer.sharded_state_dict(model_only, is_loading=is_loading, metadata=_METADATA)
        sharded["scheduler"] = state.scheduler.state_dict()
        sharded["rng_state"] = _sharded_rng(_rng_state())
    return sharded


def save(
    state: TrainingState,
    folder: Path,
    sizes: ParallelSizes,
    *,
    with_optimizer: bool,
    read: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Write the training state; collective over all ranks.

    Args:
        state: what to write.
        folder: made if missing; must hold nothing yet.
        sizes: written beside the state, so that `load` can refuse another layout.
        with_optimizer: also write optimizer, scheduler and random states, which resuming needs.
        read: gives a tensor that holds what one of the state's does and can be read, wherever it is.

    Raises:
        ValueError: if the optimizer is wanted and this state has none.
    """
    if with_optimizer and state.optimizer is None:
        raise ValueError(
            f"Cannot save an optimizer to {folder}: this policy was built without one (init_optimizer=False)."
        )
    rank = torch.distributed.get_rank()
    if rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
    torch.distributed.barrier()
    sharded = _sharded_state(state, with_optimizer=with_optimizer, is_loading=False)
    for entry in nested_values(sharded):
        # Not the parameters themselves: torch makes a new gradient accumulator for one that changes its device, without
        # the hooks of DistributedDataParallel.
        if isinstance(entry, (ShardedTensor, ShardedTensorFactory)) and entry.data is not None:
            entry.data = read(entry.data)
    dist_checkpointing.save(sharded, str(folder), content_metadata=_METADATA)
    if rank == 0:
        hf_config_of(state.bridge).save_pretrained(folder / HF_CONFIG_DIR)
        layout = {
            "parallel": dataclasses.asdict(sizes),
            "world_size": torch.distributed.get_world_size(),
            "with_optimizer": with_optimizer,
            "megatron_core": megatron.core.__version__,
        }
        _write_durably(folder / LAYOUT_FILE, json.dumps(layout, indent=2))
    torch.distributed.barrier()


def _write_durably(path: Path, text: str) -> None:
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(file.name, path)


def check_layout(folder: Path, sizes: ParallelSizes, *, with_optimizer: bool) -> None:
    """Refuse a checkpoint that this layout cannot read.

    Raises:
        ValueError: if it is no checkpoint; or, where the optimizer is wanted, if it has none or another TP, PP or EP
        size.
    """
    path = folder / LAYOUT_FILE
    if not path.is_file():
        raise ValueError(
            f"{folder} is no complete policy checkpoint: it has no {LAYOUT_FILE}; give a step folder's policy/."
        )
    layout = json.loads(path.read_text())
    if not with_optimizer:  # weights alone can be read in any layout
        return
    found = layout["parallel"]
    wrong = {key: (found[key], value) for key, value in dataclasses.asdict(sizes).items() if found[key] != value}
    if wrong:
        listed = ", ".join(f"{key} parallel size {was} there and {now} here" for key, (was, now) in wrong.items())
        raise ValueError(
            f"Checkpoint {folder} cannot be resumed: {listed}; its optimizer is sharded by that layout. Resume with "
            "the sizes it was written with, or start a new run from an export (nemo-offload-rl export)."
        )
    if not layout["with_optimizer"]:
        raise ValueError(
            f"Checkpoint {folder} has no optimizer state (checkpointing.save_optimizer was false), so training cannot "
            "resume from it; start a new run from an export (nemo-offload-rl export)."
        )


def load(state: TrainingState, folder: Path, sizes: ParallelSizes, *, with_optimizer: bool) -> None:
    """Read a training state in place; collective over all ranks.

    Args:
        state: built with the same model and parallel sizes.
        folder: what `save` wrote.
        sizes: the parallel sizes of this run.
        with_optimizer: also read optimizer, scheduler and random states.

    Raises:
        ValueError: see `check_layout`.
    """
    check_layout(folder, sizes, with_optimizer=with_optimizer)
    sharded = _sharded_state(state, with_optimizer=with_optimizer, is_loading=True)
    loaded = dist_checkpointing.load(sharded, str(folder), strict=StrictHandling.RAISE_UNEXPECTED)
    chunks = unwrap_model(state.model)
    for index, chunk in enumerate(chunks):
        chunk.load_state_dict(loaded["model" if len(chunks) == 1 else f"model{index}"])
    if with_optimizer:
        assert state.optimizer is not None and state.scheduler is not None
        with torch.no_grad():  # it copies into parameters
            state.optimizer.load_state_dict(loaded["optimizer"])
        _restore_torch_steps(state)
        state.scheduler.load_state_dict(loaded["scheduler"])
        rng = loaded["rng_state"]
        torch.set_rng_state(rng["cpu"])
        torch.cuda.set_rng_state(rng["cuda"])
        tensor_parallel.get_cuda_rng_tracker().set_states(rng["tracker"])
    elif state.optimizer is not None:
        state.optimizer.reload_model_params()
