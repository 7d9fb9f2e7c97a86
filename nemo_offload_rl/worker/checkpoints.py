"""Saves and loads one rank's part of checkpoints, as the recipe configures them."""

from functools import cached_property
from pathlib import Path

import torch

from nemo_offload_rl.mcore.build import TrainingState
from nemo_offload_rl.mcore.checkpoint import checkpoint
from nemo_offload_rl.mcore.checkpoint.background_save import BackgroundSave, HostSnapshot, start_save
from nemo_offload_rl.mcore.checkpoint.checkpoint_writer import PlanEverySave, ReusePlans, SavePlanning
from nemo_offload_rl.mcore.distributed import ParallelSizes
from nemo_offload_rl.mcore.patches.torch_distributed import make_group, objects_through
from nemo_offload_rl.residency.attach import Offloader
from nemo_offload_rl.residency.table import Placement, Target
from nemo_offload_rl.storage.manifest import FileSum


class PolicyCheckpoints:
    """Writes and reads the training state, whether the residency offloader has it on the GPU or on the host.

    Args:
        state: the rank's training state.
        offloader: the residency offloader, which knows where the state is.
        sizes: the model's parallel sizes.
        reuses_plans: whether saves after the first one reuse its plan (checkpoint.ckpt_assume_constant_structure).
    """

    def __init__(self, state: TrainingState, offloader: Offloader, sizes: ParallelSizes, *, reuses_plans: bool) -> None:
        self._state = state
        self._offloader = offloader
        self._sizes = sizes
        self._plans: SavePlanning = ReusePlans() if reuses_plans else PlanEverySave()
        self._snapshot = HostSnapshot(offloader.context.arena, offloader.context.device)
        self._under_way: BackgroundSave | None = None

    def save(self, folder: str, save_optimizer: bool) -> dict[str, FileSum]:
        """Write the state into a folder that holds nothing yet; collective. See `checkpoint.save`."""
        read = self._offloader.checkpoint_reader()  # state on the host is read there
        return checkpoint.save(
            self._state, Path(folder), self._sizes, with_optimizer=save_optimizer, read=read, plans=self._plans
        )

    def start(self, folder: str, save_optimizer: bool) -> None:
        """Start to write the current state; `finish` completes the checkpoint; collective. See `start_save`.

        Optimizer state is moved to its own host memory, where the residency offloader would offload it anyway, and is
        read there, so that no second copy is made. All other state is copied. Both run while megatron-core plans, and
        have ended when this returns.
        """
        assert self._under_way is None, "a checkpoint is being written"
        residency = self._offloader.residency
        if save_optimizer and self._can_offload_optimizer_state():
            residency.place({Target.OPTIMIZER_STATE: Placement.HOST})
        lent: set[int] = set()
        with objects_through(self._host_group):
            save = start_save(
                self._state,
                Path(folder),
                self._sizes,
                with_optimizer=save_optimizer,
                read=self._offloader.checkpoint_reader(lent),
                plans=self._plans,
                snapshot=self._snapshot,
                lent=lent,
                wait_for_lent=residency.wait_until_released,
            )
        if lent:
            residency.lend(Target.OPTIMIZER_STATE, save.wait)
        self._under_way = save

    @property
    def is_written(self) -> bool:
        """Returns whether this rank has written its files of the checkpoint under way."""
        assert self._under_way is not None, "no checkpoint is being written"
        return self._under_way.is_written

    def finish(self) -> dict[str, FileSum]:
        """Complete the checkpoint that `start` has begun; collective. See `BackgroundSave.finish`."""
        assert self._under_way is not None, "no checkpoint is being written"
        save, self._under_way = self._under_way, None
        save.wait()
        self._offloader.residency.take_back(Target.OPTIMIZER_STATE)
        with objects_through(self._host_group):
            return save.finish()

    def load(self, folder: str) -> None:
        """Read a checkpoint that `save` or `start` wrote; collective. See `checkpoint.load`."""
        assert self._under_way is None, "a checkpoint is being written"
        self._offloader.load_all_to_gpu()
        has_optimizer = self._state.optimizer is not None
        with self._offloader.streamed_state_on_host():
            checkpoint.load(self._state, Path(folder), self._sizes, with_optimizer=has_optimizer)
        self._offloader.adopt_new_tensors()
        # The loaded tensors were allocated there; a generation engine that was built meanwhile may be awake.
        self._offloader.meter.give_back_cache()

    def close(self) -> None:
        """Wait for this rank's files of a checkpoint under way, which stays unfinished, and release the host memory."""
        if self._under_way is not None:
            save, self._under_way = self._under_way, None
            save.wait()
        self._snapshot.close()

    @cached_property
    def _host_group(self) -> torch.distributed.ProcessGroup:
        """A group of all ranks with collectives in host memory, so that planning a checkpoint waits for no GPU copy."""
        return make_group()

    def _can_offload_optimizer_state(self) -> bool:
        state = self._offloader.targets.get(Target.OPTIMIZER_STATE)
        if state is None or state.needs_gpu_to_save:
            return False
        return Placement.HOST in state.placements
