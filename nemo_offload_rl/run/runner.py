"""Runs a recipe from its path to the exit status; examples/run_grpo.py and run_sft.py call it.

It validates recipes before it imports torch or Ray, so that mistakes are reported at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_offload_rl.config.schema import MasterConfig
from nemo_offload_rl.run.interrupt import Interrupt
from nemo_offload_rl.storage.output import lasting_output

# Slow imports follow once the signal handlers are installed: see `run`.
if TYPE_CHECKING:
    from rich.console import Console

    from nemo_offload_rl.config import ValidatedRecipe
    from nemo_offload_rl.placement.cluster import Cluster
    from nemo_offload_rl.plan.decisions import Machine
    from nemo_offload_rl.run.failures import Restarts
    from nemo_offload_rl.run.job import Ending, Job, Session
    from nemo_offload_rl.run.train_loop import TimeLimit

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_WRONG_RECIPE = 2


def run(recipe_path: str | Path, overrides: Sequence[str], algorithm: str) -> int:
    """Runs a recipe, after its warm start where it names one.

    Args:
        recipe_path: the YAML file.
        overrides: overrides of the recipe in Hydra's grammar, such as ``grpo.max_num_steps=10``.
        algorithm: a key of `ALGORITHMS`, the section that the recipe must have.

    Returns:
        The exit status: 0 done, 1 failed, 2 a mistake in the recipe or in a file that it names; 130, 143 or 129 if
        SIGINT, SIGTERM or SIGHUP ended the run, but 1 after a SIGINT that lost steps.
    """
    with lasting_output(), Interrupt() as interrupt:
        try:
            return _run(recipe_path, overrides, algorithm, interrupt)
        except BaseException as error:
            if interrupt.stopped:  # a library may have turned `Stopped` into another exception
                sys.stderr.write(f"{interrupt.progress}\n")
                return interrupt.exit_status
            if isinstance(error, Exception):
                error.add_note(str(interrupt.progress))
            raise


def _run(recipe_path: str | Path, overrides: Sequence[str], algorithm: str, interrupt: Interrupt) -> int:
    from rich.console import Console

    from nemo_offload_rl.config import RecipeError
    from nemo_offload_rl.config.model.hf_check import ModelFolderError
    from nemo_offload_rl.data.problem import DataError
    from nemo_offload_rl.environments import RewardError
    from nemo_offload_rl.run.folder import lock_folders, tell
    from nemo_offload_rl.storage.lock import LockedError
    from nemo_offload_rl.storage.manifest import CheckpointError

    errors, console = Console(stderr=True), Console()
    with ExitStack() as stack:
        try:
            recipe = _load(recipe_path, overrides, algorithm)
            release_warm_start = stack.enter_context(lock_folders(recipe, console))
            jobs = _prepare(recipe)
            jobs[-1].check_checkpoint(console)
        except (
            RecipeError, LockedError, DataError, RewardError, ModelFolderError, CheckpointError, _CommandError,
        ) as error:  # fmt: skip
            _print_error(errors, error)
            return EXIT_WRONG_RECIPE
        interrupt.check()

        from nemo_offload_rl.generation.interface import GenerationError
        from nemo_offload_rl.run.failures import Restarts
        from nemo_offload_rl.run.train_loop import TimeLimit
        from nemo_offload_rl.worker.errors import WorkerError

        interrupt.grace_period_s = recipe.config["checkpointing"]["grace_period_s"]
        restarts, limit = Restarts(recipe.config["cluster"]["max_restarts"]), TimeLimit()
        # A restart reads the warm start's model again.
        release = release_warm_start if restarts.at_most == 0 else lambda: None
        while True:
            try:
                return _attempt(jobs, release, restarts, interrupt, limit, console, errors)
            except (WorkerError, GenerationError) as error:
                if not restarts.take(error):
                    raise
                for line in [*error.__notes__, interrupt.progress]:
                    _print_error(errors, line)
            tell(console, f"{restarts}.")
            interrupt.reopen()
            jobs = _prepare(recipe)


def _attempt(
    jobs: Sequence[Job],
    release_warm_start: Callable[[], None],
    restarts: Restarts,
    interrupt: Interrupt,
    limit: TimeLimit,
    console: Console,
    errors: Console,
) -> int:
    """Runs the jobs once, on a cluster of their own.

    Returns:
        The exit status.

    Raises:
        WorkerError, GenerationError: a process has failed or died; the error's notes say what to do.
    """
    from nemo_offload_rl.data.problem import DataError
    from nemo_offload_rl.environments import RewardError
    from nemo_offload_rl.generation.interface import GenerationError
    from nemo_offload_rl.run.failures import add_failure_summary, gcs_failure
    from nemo_offload_rl.run.folder import tell
    from nemo_offload_rl.run.job import Session
    from nemo_offload_rl.run.train_loop import StopReason
    from nemo_offload_rl.storage.disk import DiskFullError
    from nemo_offload_rl.storage.lock import LockedError
    from nemo_offload_rl.storage.manifest import CheckpointError
    from nemo_offload_rl.worker.errors import WorkerError

    with ExitStack() as stack:
        try:
            cluster, jobs = stack.enter_context(_start_cluster(jobs, restarts))
        # Memory does not suffice, RAY_ADDRESS cannot be used, or there are fewer GPUs or nodes than asked for.
        except ValueError as error:
            _print_error(errors, error)
            if restarts.num_done == 0:
                return EXIT_WRONG_RECIPE
            _print_error(errors, interrupt.progress)
            return EXIT_FAILED
        stack.enter_context(cluster.gcs_watch(lambda address: gcs_failure(address, interrupt.progress)))
        stack.callback(interrupt.close)
        try:
            ending = _run_jobs(jobs, release_warm_start, Session(cluster, interrupt, console, limit))
        # The run folder is locked; the checkpoint cannot be used; the disk is full; a row, or a reward, cannot be used.
        except (LockedError, CheckpointError, DiskFullError, DataError, RewardError) as error:
            _print_error(errors, error)
            # Of a checkpoint that cannot be used the message itself says what to do; the same command ends as this one.
            if not isinstance(error, CheckpointError) or interrupt.progress.num_lost:
                _print_error(errors, interrupt.progress)
            return EXIT_FAILED
        except (WorkerError, GenerationError) as error:
            if not isinstance(error.cause, ValueError):
                add_failure_summary(error, cluster.logs_folder)
                raise
            _print_error(errors, error.cause)
            if interrupt.progress.num_lost:
                _print_error(errors, interrupt.progress)
            return EXIT_FAILED
        if ending.reason is StopReason.INTERRUPTED:
            tell(console, str(interrupt.progress))
            return interrupt.exit_status if ending.is_saved else EXIT_FAILED
        return EXIT_DONE if ending.is_saved else EXIT_FAILED


class _CommandError(ValueError):
    """Says that a recipe is of another algorithm, or names a folder that cannot be used, or differs between nodes."""


def _load(recipe_path: str | Path, overrides: Sequence[str], algorithm: str) -> ValidatedRecipe:
    from nemo_offload_rl.config import check_named_files, load
    from nemo_offload_rl.config.model.hf_check import check_model_folder
    from nemo_offload_rl.storage.disk import require_writable

    recipe = load(recipe_path, overrides)
    if recipe.algorithm != algorithm:
        raise _CommandError(
            f"{recipe_path} is a recipe of {recipe.algorithm}, not of {algorithm}: run it with "
            f"examples/run_{recipe.algorithm}.py."
        )
    if _starts_ray_here():  # the machines of a joined cluster may have other folders
        for one in (recipe.warm_start, recipe):
            if one is not None:
                check_model_folder(one.config)
    if "RAY_ADDRESS" in os.environ:
        _require_absolute_folders(recipe.config)
    check_named_files(recipe)
    try:
        require_writable(Path(recipe.config["logger"]["log_dir"]))
    except ValueError as error:
        raise _CommandError(f"logger.log_dir: {error}") from error
    return recipe


def _require_absolute_folders(config: MasterConfig) -> None:
    folders = {"logger.log_dir": config["logger"]["log_dir"]}
    if config["checkpointing"]["enabled"]:
        folders["checkpointing.checkpoint_dir"] = config["checkpointing"]["checkpoint_dir"]
    sections: Mapping[str, Any] = config
    debug = sections["grpo"]["debug"] if "grpo" in sections else {}
    folders |= {f"grpo.debug.{name}": folder for name, folder in debug.items() if folder is not None}
    for key, folder in folders.items():
        if not Path(folder).is_absolute():
            raise _CommandError(
                f"{key} is {folder}, but a run on a Ray cluster (RAY_ADDRESS) has another working directory on each "
                "node, and Ray deletes that of a submitted job: give an absolute path on storage that all nodes share."
            )


def _starts_ray_here() -> bool:
    """Returns `placement.cluster.starts_ray_here()`, without importing Ray, which takes seconds."""
    if "ray" not in sys.modules:
        return "RAY_ADDRESS" not in os.environ
    from nemo_offload_rl.placement.cluster import starts_ray_here

    return starts_ray_here()


def _prepare(recipe: ValidatedRecipe) -> list[Job]:
    """Returns the jobs of a recipe in the order in which they run: its warm start, if it names one, and its own."""
    from nemo_offload_rl.run.job import Job

    job = Job.prepare(recipe)
    return [job] if recipe.warm_start is None else [Job.prepare(recipe.warm_start), job]


@contextmanager
def _start_cluster(jobs: Sequence[Job], restarts: Restarts) -> Iterator[tuple[Cluster, Sequence[Job]]]:
    """Starts or joins the cluster of the last job, and resolves all jobs for it.

    It resolves them before Ray starts on this machine; for a joined cluster, whose nodes are not known before, after.

    Args:
        jobs: the jobs to run.
        restarts: the command's restarts; a restart waits for the replacement of lost nodes, and stays on GPUs.
    """
    from nemo_offload_rl.config.megatron import split_devices
    from nemo_offload_rl.placement.cluster import Cluster, starts_ray_here
    from nemo_offload_rl.run.failures import NODE_REPLACEMENT_S
    from nemo_offload_rl.run.preflight import check_environment, machine_here, machine_of

    starts_here = starts_ray_here()
    if starts_here:
        jobs = _for_machine(jobs, machine_here())
        for job in jobs:
            assert job.resolved is not None
            check_environment(job.resolved.config["policy"])
    section = jobs[-1].config["cluster"]
    low, high = section.get("master_port_range_low"), section.get("master_port_range_high")
    with Cluster(
        num_nodes=section["num_nodes"],
        gpus_per_node=section["gpus_per_node"],
        num_engine_devices=split_devices(section, jobs[-1].config["policy"]).num_engine_devices,
        master_port_range=None if low is None or high is None else (low, high),
        segment_size=section["segment_size"],
        wait_for_nodes_s=NODE_REPLACEMENT_S if restarts.num_done and not starts_here else 0.0,
        needs_gpus=restarts.need_gpus,
    ) as cluster:
        restarts.need_gpus = cluster.has_gpus
        if not starts_here:
            jobs = _for_machine(jobs, machine_of(cluster))
        yield cluster, jobs


def _for_machine(jobs: Sequence[Job], machine: Machine) -> list[Job]:
    """Returns the jobs resolved for a machine; what a warm start cannot do there is said of its recipe."""
    *before, job = jobs
    resolved = []
    for warm_start in before:
        try:
            resolved.append(warm_start.for_machine(machine))
        except ValueError as error:
            raise ValueError(f"{error} This concerns the warm start: set its keys in warm_start.overrides.") from error
    return [*resolved, job.for_machine(machine)]


def _run_jobs(jobs: Sequence[Job], release_warm_start: Callable[[], None], session: Session) -> Ending:
    from nemo_offload_rl.run.folder import warm_start_folder
    from nemo_offload_rl.run.job import Ending
    from nemo_offload_rl.run.train_loop import StopReason
    from nemo_offload_rl.run.warm_start import run_warm_start

    *before, job = jobs
    for warm_start in before:
        model = run_warm_start(warm_start, warm_start_folder(job.config), session)
        if model is None:
            return Ending(StopReason.INTERRUPTED, is_saved=True)
        job = job.starting_from(model, release_warm_start)
    return job.run(session)


def _print_error(console: Console, error: object) -> None:
    from nemo_offload_rl.run.folder import tell

    tell(console, str(error), style="red")
