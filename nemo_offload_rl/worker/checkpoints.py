"""Checkpoints of one rank: how the recipe has them written, and read."""

from functools import cached_property
from pathlib import Path

import torch

from nemo_offload_rl.config.schema.megatron import MegatronConfig
from nemo_offload_rl.mcore.build import TrainingState
from nemo_offload_rl.mcore.checkpoint import checkpoint
from nemo_offload_rl.mcore.checkpoint.background_save import BackgroundSave, start_save
from nemo_offload_rl.mcore.checkpoint.host_snapshot import HostSnapshot
from nemo_offload_rl.mcore.checkpoint.save_plans import PlanEverySave, ReusePlans, SavePlanning
from nemo_offload_rl.mcore.model.model_config import parallel_sizes
from nemo_offload_rl.mcore.patches.object_collectives import make_group, objects_through
from nemo_offload_rl.residency.attach import Engine
from nemo_offload_rl.residency.table import Placement, Target
from nemo_offload_rl.storage.checksum import FileSum


class PolicyCheckpoints:
    """Writes and reads the training state, wherever residency has it.

    Args:
        state: of the rank.
        engine: the residency engine, which knows where the state is.
        config: the recipe's policy.megatron_cfg, in its resolved form.
    """

    def __init__(self, state: TrainingState, engine: Engine, config: MegatronConfig) -> None:
        self._state = state
        self._engine = engine
        self._sizes = parallel_sizes(config)
        reuses_plans = config["checkpoint"]["ckpt_assume_constant_structure"]
        self._plans: SavePlanning = ReusePlans() if reuses_plans else PlanEverySave()
        self._snapshot = HostSnapshot(engine.context.arena, engine.context.device)
        self._under_way: BackgroundSave | None = None

    def save(self, folder: str, save_optimizer: bool) -> dict[str, FileSum]:
        """Write the state into a folder that holds nothing yet; collective. See `checkpoint.save`."""
        read = self._engine.checkpoint_reader()  # what is on the host is read there
        return checkpoint.save(
            self._state, Path(folder), self._sizes, with_optimizer=save_optimizer, read=read, plans=self._plans
        )

    def start(self, folder: str, save_optimizer: bool) -> None:
        """Begin to write the state of now, which `finish` completes; collective. See `start_save`.

        Optimizer state goes to its own host memory, where residency would take it anyway, and is read there: it takes
        no second copy. All else is copied. Both happen while megatron-core plans, and have ended when this returns.
        """
        assert self._under_way is None, "a checkpoint is being written"
        residency = self._engine.residency
        if save_optimizer and self._state_can_leave():
            residency.place({Target.OPTIMIZER_STATE: Placement.HOST})
        lent: set[int] = set()
        with objects_through(self._host_group):
            save = start_save(
                self._state,
                Path(folder),
                self._sizes,
                with_optimizer=save_optimizer,
                read=self._engine.checkpoint_reader(lent),
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
        """Whether this rank has written its files of the checkpoint under way."""
        assert self._under_way is not None, "no checkpoint is being written"
        return self._under_way.is_written

    def finish(self) -> dict[str, FileSum]:
        """Complete what `start` has begun; collective. See `BackgroundSave.finish`."""
        assert self._under_way is not None, "no checkpoint is being written"
        save, self._under_way = self._under_way, None
        save.wait()
        self._engine.residency.take_back(Target.OPTIMIZER_STATE)
        with objects_through(self._host_group):
            return save.finish()

    def load(self, folder: str) -> None:
        """Read what `save` wrote; collective. See `checkpoint.load`."""
        assert self._under_way is None, "a checkpoint is being written"
        self._engine.load_all_to_gpu()
        has_optimizer = self._state.optimizer is not None
        with self._engine.streamed_state_on_host():
            checkpoint.load(self._state, Path(folder), self._sizes, with_optimizer=has_optimizer)
        self._engine.adopt_new_tensors()
        self._engine.meter.give_back_cache()  # what was read lived there; an engine that was built beside may be awake

    def close(self) -> None:
        """Wait until this rank's files are written, of a checkpoint that then stays unfinished; give memory back."""
        if self._under_way is not None:
            save, self._under_way = self._under_way, None
            save.wait()
        self._snapshot.close()

    @cached_property
    def _host_group(self) -> torch.distributed.ProcessGroup:
        """All ranks, through host memory: what a checkpoint's ranks tell each other waits for no copy of the GPU's."""
        return make_group()

    def _state_can_leave(self) -> bool:
        state = self._engine.targets.get(Target.OPTIMIZER_STATE)
        if state is None or state.needs_gpu_to_save:
            return False
        return Placement.HOST in state.placements
