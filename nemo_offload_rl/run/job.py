"""Runs one recipe, with its folder, checkpoints, metrics and final message; also runs the warm start."""

from __future__ import annotations

import copy
import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from nemo_offload_rl.config import Recipe, ValidatedRecipe
from nemo_offload_rl.config.algorithms import ALGORITHMS
from nemo_offload_rl.config.schema import MasterConfig
from nemo_offload_rl.config.schema.run import LoggerConfig
from nemo_offload_rl.data.tokenizer import save_tokenizer
from nemo_offload_rl.metrics.logger import METRICS_FILE, RunLogger, read_metrics
from nemo_offload_rl.metrics.moves import moves_table
from nemo_offload_rl.metrics.names import logged_name
from nemo_offload_rl.metrics.page import update_facts
from nemo_offload_rl.metrics.report import LiveProgress, log_peaks, phase_table
from nemo_offload_rl.metrics.samples import JudgedAnswer, as_plain_text, samples_markdown, samples_table
from nemo_offload_rl.placement.cluster import Cluster
from nemo_offload_rl.placement.gpu_monitor import GpuMetrics, NoGpuMetrics, watch_gpus
from nemo_offload_rl.plan.decisions import Machine, Resolved
from nemo_offload_rl.plan.row_tokens import resolve_auto, restore_auto
from nemo_offload_rl.run.algorithm import Algorithm
from nemo_offload_rl.run.checkpoints import (
    CheckpointFolder,
    Checkpoints,
    CheckpointWriter,
    NoCheckpoints,
    RunState,
    WriteAtOnce,
)
from nemo_offload_rl.run.folder import (
    HF_FOLDER,
    PROFILE_FOLDER,
    changed_keys,
    draw_results,
    lock_run_folder,
    logged_to,
    new_run_folder,
    read_recipe,
    tell,
    write_end,
    write_recipe,
    write_start,
)
from nemo_offload_rl.run.interrupt import Interrupt, Progress
from nemo_offload_rl.run.preflight import resolve_for
from nemo_offload_rl.run.resume import (
    OnDamaged,
    branch_run_folder,
    choose,
    damage_seen_by_driver,
    run_folder_of,
)
from nemo_offload_rl.run.setup import Preparation, with_run_length
from nemo_offload_rl.run.step_profile import step_profile
from nemo_offload_rl.run.train_loop import Run, StopReason, TimeLimit
from nemo_offload_rl.storage.disk import HF_FILES, replacing, translate_disk_full
from nemo_offload_rl.storage.lock import LockedError
from nemo_offload_rl.storage.manifest import CheckpointError, FileSum, read_manifest

logger = logging.getLogger(__name__)

_FOLDERS = {"model": HF_FOLDER, "profile": PROFILE_FOLDER}


@dataclass(frozen=True)
class Session:
    """Holds the objects that the runs of one command share.

    Attributes:
        cluster: the Ray cluster that processes run on.
        interrupt: says whether a signal has asked the run to stop.
        console: the user's terminal.
        limit: the command's time limit, which a restart does not extend.
    """

    cluster: Cluster
    interrupt: Interrupt
    console: Console
    limit: TimeLimit = field(default_factory=TimeLimit)


@dataclass(frozen=True)
class Ending:
    """Describes how a run ended.

    Attributes:
        reason: why the run ended.
        is_saved: whether the run's metrics are on disk and, with checkpoints on, also its last state.
    """

    reason: StopReason
    is_saved: bool


@dataclass(frozen=True)
class Job:
    """Runs a validated recipe whose data, tokenizer and reward have been read.

    Attributes:
        algorithm: a key of `ALGORITHMS`.
        config: the validated recipe.
        notes: lines about the recipe for the user.
        preparation: the algorithm's preparation.
        recipe: the recipe as it was read.
        resolved: the recipe as it runs on the machine; None until `for_machine`.
        when_built: called once the policy has been built, and so has read the model.
    """

    algorithm: str
    config: MasterConfig
    notes: list[str]
    preparation: Preparation
    recipe: Recipe
    resolved: Resolved | None = None
    when_built: Callable[[], None] = lambda: None

    @classmethod
    def prepare(cls, recipe: ValidatedRecipe) -> Job:
        """Reads the data, tokenizer and reward that a recipe names; starts no process.

        Raises:
            DataError: the data, a template or the tokenizer cannot be used.
            RewardError: the reward cannot be used.
        """
        module = importlib.import_module(ALGORITHMS[recipe.algorithm].module)
        preparation = module.prepare(recipe.config)
        return cls(recipe.algorithm, recipe.config, [*recipe.notes, *preparation.notes], preparation, recipe.recipe)

    def starting_from(self, model: Path, when_built: Callable[[], None]) -> Job:
        """Returns the same job with a Hugging Face folder's weights; it calls `when_built` once they have been read."""

        def with_model(config: MasterConfig) -> MasterConfig:
            given = copy.deepcopy(config)
            given["policy"]["model_name"], given["policy"]["hf_config"] = str(model), None
            return given

        assert self.resolved is not None, "the machine is known before anything runs"
        resolved = replace(self.resolved, config=with_model(self.resolved.config))
        return replace(self, config=with_model(self.config), resolved=resolved, when_built=when_built)

    def for_machine(self, machine: Machine) -> Job:
        """Returns the same job, resolved for a machine; raises the errors of `preflight.resolve_for`."""
        return replace(self, resolved=resolve_for(machine, self.config, self.algorithm))

    def check_checkpoint(self, console: Console) -> None:
        """Checks the checkpoint to resume from, as far as the driver alone can, and the lock on its run folder.

        Raises:
            CheckpointError: the checkpoint cannot be used, or a file has the name of one.
            LockedError: another run holds its run folder.
        """
        newest = self._choose(self._checkpoints(), damage_seen_by_driver, console)
        run_dir = None if newest is None else run_folder_of(newest, self.config)
        if run_dir is not None:
            with lock_run_folder(run_dir, console):
                pass

    def run(self, session: Session) -> Ending:
        """Runs in a new folder under logger.log_dir, or resumes from the newest checkpoint; see `run_folder_of`.

        Raises:
            CheckpointError: that checkpoint cannot be used.
            DiskFullError: there is no space for the metrics so far, or for the export.
            LockedError: another run holds that folder.
        """
        checkpoints = self._checkpoints()
        checkpoints.remove_unfinished()
        newest = self._choose(checkpoints, damage_seen_by_driver, session.console)
        log_dir, say = Path(self.config["logger"]["log_dir"]), partial(tell, session.console)
        if newest is None:
            run_dir = new_run_folder(log_dir)
        else:
            run_dir = run_folder_of(newest, self.config) or branch_run_folder(newest, log_dir, say)
            written = read_recipe(newest)
            changed = changed_keys({} if written is None else restore_auto(written, self.config), self.config)
            suffix = f", with other values than before: {', '.join(changed)}" if changed else ""
            say(f"Resuming from {newest}{suffix}.")
        try:
            ending = self.run_in(run_dir, session, checkpoints, newest)
        except LockedError:  # the folder is another run's
            raise
        except Exception as error:
            reason = f"failed: {type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
            with suppress(OSError, ValueError):  # such as metrics that cannot be read, which may be this error
                write_end(run_dir, reason)
                say(_named(draw_results(run_dir, self.algorithm, session.console)))
            raise
        self._report(run_dir, ending.reason, session.console)
        return ending

    def run_in(
        self, run_dir: Path, session: Session, checkpoints: Checkpoints, newest: Path | None, name: str = "run"
    ) -> Ending:
        """Runs with metrics, log and export in a folder, which is locked meanwhile.

        Args:
            run_dir: the folder; made where it is missing.
            session: the command's cluster, interrupt, console and time limit.
            checkpoints: where checkpoints go.
            newest: the checkpoint to resume from, or None to start afresh.
            name: the run's name in messages.

        Raises:
            CheckpointError: that checkpoint cannot be used.
            DiskFullError: there is no space for the export.
            LockedError: another run holds the folder.
        """
        run_dir.mkdir(parents=True, exist_ok=True)
        session.interrupt.progress = Progress(name, checkpoint=newest, saves=not isinstance(checkpoints, NoCheckpoints))
        with ExitStack() as stack:
            stack.enter_context(lock_run_folder(run_dir, session.console))
            stack.enter_context(logged_to(run_dir, session.console))
            assert self.resolved is not None, "the machine is known before anything runs"
            write_start(run_dir, self.algorithm, self.recipe, self.resolved)
            for note in [*self.notes, *self.resolved.lines]:
                tell(session.console, note, style="dim")
            policy = with_run_length(self.resolved.config["policy"], self.preparation.schedule.num_steps)
            session.interrupt.check()
            algorithm = self.preparation.build(policy, session.cluster)
            # After an immediate stop the workers may be in the middle of a step, so the cluster kills them.
            stack.callback(lambda: algorithm.stop() if session.interrupt.stopped else algorithm.shutdown())
            self.when_built()
            gpus = _gpu_metrics(self.resolved.config["logger"], session.cluster)
            stack.callback(gpus.close)
            job = replace(self, config=resolve_auto(self.config, self.resolved.config))  # checkpoints save this config
            ending = job._train(algorithm, run_dir, session, checkpoints, newest, gpus)
            logger.info("%s ends: %s", self.algorithm, ending.reason.value)
            if ending.reason is not StopReason.INTERRUPTED:
                session.interrupt.check()  # a signal may have arrived after the last step
            sections: Mapping[str, Any] = self.config
            if sections[self.algorithm].get("export_hf") and ending.reason.is_done:
                folder = run_dir / HF_FOLDER
                with translate_disk_full(folder), replacing(folder, HF_FILES) as new:
                    algorithm.export_hf(new)
                    save_tokenizer(self.preparation.tokenizer, new)
            write_end(run_dir, ending.reason.value)
        return ending

    def _choose(self, checkpoints: Checkpoints, look: Callable[[Path], list[str]], console: Console) -> Path | None:
        on_damaged: OnDamaged = self.config["checkpointing"]["on_damaged"]

        def look_at_own(checkpoint: Path) -> list[str]:  # before damaged ones are set aside
            lines = look(checkpoint)
            if not lines and self.algorithm not in (read_recipe(checkpoint) or ()):
                raise CheckpointError(
                    f"Checkpoint {checkpoint} is not of a run of {self.algorithm}: give another checkpointing."
                    "checkpoint_dir. To start from its model, write that with nemo-offload-rl export, and set "
                    "policy.model_name to it."
                )
            return lines

        return choose(checkpoints, on_damaged, look_at_own, partial(tell, console))

    def _checkpoints(self) -> Checkpoints:
        section = self.config["checkpointing"]
        if not section["enabled"]:
            return NoCheckpoints()
        metric = section["metric_name"]
        return CheckpointFolder(
            Path(section["checkpoint_dir"]),
            None if metric is None else logged_name(metric),
            section["higher_is_better"],
            section["keep_top_k"],
            section["save_period"],
            section["ft_keep_latest_k"],
        )

    def _train(
        self,
        algorithm: Algorithm,
        run_dir: Path,
        session: Session,
        checkpoints: Checkpoints,
        newest: Path | None,
        gpus: GpuMetrics,
    ) -> Ending:
        writer = self._checkpoint_writer(algorithm)
        schedule = self.preparation.schedule
        state = RunState(str(run_dir))
        if newest is not None:
            newest = self._choose_by_contents(algorithm, checkpoints, session.console)
            state = replace(RunState.read(newest), run_dir=str(run_dir))
            done = session.interrupt.progress
            done.num_done, done.num_saved, done.checkpoint = state.step, state.step, newest
            algorithm.position = state.position
            algorithm.load(newest, state.step, state.num_skipped)
        section = self.config["logger"]
        metrics = RunLogger(
            run_dir,
            section["tensorboard_enabled"],
            section["wandb"] if section["wandb_enabled"] else None,
            self.config,
            None if newest is None else state.step,
        )
        assert self.resolved is not None
        steps, folder = range(state.step + 1, schedule.num_steps + 1), run_dir / PROFILE_FOLDER
        profile = step_profile(self.resolved.config["logger"]["profile"], folder, algorithm, steps)
        progress = LiveProgress(self.algorithm.upper(), schedule.num_steps, session.console)
        resumed_step = state.step
        try:
            with closing(metrics), progress:
                outputs = _Outputs(metrics, progress, gpus, session.console)
                run = Run(
                    algorithm, schedule, state, checkpoints, writer, outputs, session.interrupt, session.limit, profile
                )
                reason = run.train()
        finally:
            rows = [row for row in read_metrics(run_dir / METRICS_FILE) if (row["step"] or 0) > resumed_step]
            log_peaks(rows, self.resolved.peaks_gib)
        return Ending(reason, run.is_saved and metrics.is_whole)

    def _checkpoint_writer(self, algorithm: Algorithm) -> CheckpointWriter:
        def write_beside_policy(folder: Path) -> None:
            save_tokenizer(self.preparation.tokenizer, folder / "tokenizer")
            write_recipe(folder, self.config)

        if self.config["policy"]["megatron_cfg"]["checkpoint"]["async_save"]:
            return _WriteBesideRun(algorithm, write_beside_policy)

        def write(folder: Path) -> Mapping[str, FileSum]:
            files = algorithm.save(folder)
            write_beside_policy(folder)
            return files

        return WriteAtOnce(write)

    def _choose_by_contents(self, algorithm: Algorithm, checkpoints: Checkpoints, console: Console) -> Path:
        def look(checkpoint: Path) -> list[str]:
            return damage_seen_by_driver(checkpoint) or algorithm.find_damage(checkpoint, read_manifest(checkpoint))

        newest = self._choose(checkpoints, look, console)
        assert newest is not None  # there was one when the run began
        return newest

    def _report(self, run_dir: Path, reason: StopReason, console: Console) -> None:
        rows = read_metrics(run_dir / METRICS_FILE)
        if rows:
            console.print(phase_table(rows))
        if (moves := moves_table(rows)) is not None:
            console.print(moves)
        console.print(f"{self.algorithm.upper()} ended after step {rows[-1]['step'] if rows else 0}: {reason.value}.")
        places = draw_results(run_dir, self.algorithm, console)
        section = self.config["checkpointing"]
        if section["enabled"]:
            places["checkpoints"] = Path(section["checkpoint_dir"])
        places |= {what: run_dir / name for what, name in _FOLDERS.items() if (run_dir / name).exists()}
        tell(console, _named(places))


def _named(places: Mapping[str, Path]) -> str:
    return ", ".join(f"{what}: {place}" for what, place in places.items())


def _gpu_metrics(section: LoggerConfig, cluster: Cluster) -> GpuMetrics:
    if not section["monitor_gpus"]:
        return NoGpuMetrics()
    intervals = section["gpu_monitoring"]
    return watch_gpus(
        cluster.node_ids,
        collection_interval_s=intervals["collection_interval"],
        flush_interval_s=intervals["flush_interval"],
    )


@dataclass(frozen=True)
class _Outputs:
    """Implements ``train_loop.Outputs`` for the console, metrics files and GPU metrics."""

    metrics: RunLogger
    progress: LiveProgress
    gpus: GpuMetrics
    console: Console

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.metrics.log(step, {**metrics, **self.gpus.of_step(step)})

    def sync(self) -> None:
        self.metrics.sync()

    def show(self, step: int, metrics: Mapping[str, float]) -> None:
        self.progress.update(step, metrics)

    def show_answers(self, step: int, answers: Sequence[JudgedAnswer]) -> None:
        table = samples_table(step, answers)
        self.console.print(table)
        logger.info("%s", as_plain_text(table))
        self.metrics.log_text(step, "validation/answers", samples_markdown(answers))
        update_facts(self.metrics.run_dir, answers={"step": step, "judged": [asdict(answer) for answer in answers]})


class _WriteBesideRun:
    """Takes a snapshot of the policy, which ranks write while training goes on; see `CheckpointWriter`."""

    def __init__(self, algorithm: Algorithm, write_beside_policy: Callable[[Path], None]) -> None:
        self._algorithm = algorithm
        self._write_beside_policy = write_beside_policy

    def start(self, folder: Path) -> None:
        """Takes a snapshot of the policy's state."""
        self._algorithm.start_save(folder)

    def is_written(self) -> bool:
        """Returns whether all ranks have written their files."""
        return self._algorithm.is_save_written()

    def finish(self, folder: Path) -> Mapping[str, FileSum]:
        """Waits for the ranks to write their files, then writes the other files of the checkpoint."""
        files = self._algorithm.finish_save()
        self._write_beside_policy(folder)
        return files
