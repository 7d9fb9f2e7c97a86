"""Interrupts runs from outside at a known place, and checks what they leave behind.

The package has no hooks for this: the place is recognised by metrics, folders, rewards and the processes' CPU time.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from support.examples import Finished, command, environment, run_example

NUM_STEPS = 6
SAVE_PERIOD = 2
ROWS_PER_STEP = 16

# A model of 70,000 parameters. Answers are long, and rows are trained one by one, so that both take time to hit.
TINIEST = [
    "~warm_start", "policy.hf_config.hidden_size=64", "policy.hf_config.num_hidden_layers=2",
    "policy.hf_config.num_attention_heads=2", "policy.hf_config.num_key_value_heads=1",
    "policy.hf_config.intermediate_size=128", "policy.hf_config.max_position_embeddings=256",
    "policy.max_total_sequence_length=256", "policy.generation.max_new_tokens=200",
    "policy.generation.stop_token_ids=[]", "policy.train_global_batch_size=16", "policy.train_micro_batch_size=1",
    "policy.megatron_cfg.scheduler.lr_decay_iters=10", "grpo.num_prompts_per_step=4",
    "grpo.num_generations_per_prompt=4", f"grpo.max_num_steps={NUM_STEPS}", "grpo.val_period=3",
    "grpo.max_val_samples=8", "grpo.val_at_start=false", "grpo.val_at_end=false", "env.arithmetic.reward=python",
    "++env.arithmetic.reward_function=support.rewards:noted", "logger.tensorboard_enabled=false",
    f"checkpointing.save_period={SAVE_PERIOD}",
]  # fmt: skip

_TIMEOUT_S = 240
_SHARED_MEMORY = "/dev/shm"
_POLICY, _GENERATOR = "ray::WorkerActor", "ray::GeneratorActor"


@dataclass
class LiveRun:
    """Controls a running examples/run_grpo.py, whose output goes to a file."""

    folder: Path
    process: subprocess.Popen
    timeout_s: float
    shared_memory: frozenset[str]
    family: list[psutil.Process] = field(default_factory=list)

    @property
    def output(self) -> str:
        """Returns everything that the run has printed since it started."""
        return (self.folder / "output.txt").read_text()

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def metrics(self) -> dict[int, dict[str, float]]:
        """Returns the logged metrics, as `Finished.metrics` does."""
        return Finished(self.folder, 0, "").metrics()

    def num_rows(self) -> int:
        path = self.folder / "logs" / "exp_001" / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def num_rewards(self) -> int:
        path = rewards_file(self.folder)
        return path.stat().st_size if path.exists() else 0

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Polls a condition every two milliseconds; fails if the run ends first."""
        deadline = time.monotonic() + self.timeout_s
        while not condition():
            assert self.process.poll() is None, self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.002)

    def look_at_family(self) -> list[psutil.Process]:
        driver = psutil.Process(self.process.pid)
        self.family = [driver, *driver.children(recursive=True)]
        return self.family

    def actor(self, title: str) -> psutil.Process:
        (found,) = [one for one in self.look_at_family() if _title(one).startswith(title)]
        return found

    def end(self) -> int:
        return self.process.wait(timeout=self.timeout_s)


def rewards_file(folder: Path) -> Path:
    return folder / "rewards"


@contextmanager
def running(
    folder: Path, overrides: Iterable[str] = (), timeout_s: float = _TIMEOUT_S, **variables: str
) -> Iterator[LiveRun]:
    """Starts a run, or resumes the one that has left checkpoints in the folder; kills all of it when the block ends."""
    rewards_file(folder).unlink(missing_ok=True)
    shared_memory = frozenset(os.listdir(_SHARED_MEMORY))
    with open(folder / "output.txt", "w") as output:
        process = subprocess.Popen(
            command("run_grpo.py", folder, [*TINIEST, *overrides]), cwd=folder,
            env=environment() | variables | {"REWARDS_FILE": str(rewards_file(folder))}, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    run = LiveRun(folder, process, timeout_s, shared_memory)
    try:
        yield run
    finally:
        if process.poll() is None:
            for one in run.look_at_family():
                one.kill()
            process.wait()


def to_the_end(folder: Path, overrides: Iterable[str] = ()) -> Finished:
    """Runs until the end, from the newest checkpoint if there is one; may fork, since no test interrupts it."""
    return run_example("run_grpo.py", folder, [*TINIEST, *overrides], REWARDS_FILE=str(rewards_file(folder)))


# ---- where a run is


def in_generation(run: LiveRun, step: int) -> None:
    """Waits until the generation worker samples for a step: it has computed for a while since the step before ended."""
    run.wait_until(lambda: run.num_rows() >= step - 1)
    _wait_for_work(run, run.actor(_GENERATOR), 0.15)


def in_long_generation(run: LiveRun) -> None:
    """Waits until the generation worker samples for minutes; all its other calls are brief."""
    run.wait_until(lambda: any(_title(one).startswith(f"{_GENERATOR}.call") for one in run.look_at_family()))
    _wait_for_work(run, run.actor(_GENERATOR), 2)
    run.wait_until(lambda: _title(run.actor(_GENERATOR)).startswith(f"{_GENERATOR}.call"))


def in_training(run: LiveRun, step: int) -> None:
    """Waits until the policy trains for a step: it has computed for a while since the last answer was judged."""
    run.wait_until(lambda: run.num_rows() >= step - 1)
    judged = run.num_rewards()
    run.wait_until(lambda: run.num_rewards() >= judged + ROWS_PER_STEP)
    _wait_for_work(run, run.actor(_POLICY), 0.04)


def in_saving(run: LiveRun, step: int) -> None:
    """Waits until the checkpoint of a step is being written."""
    run.wait_until((run.checkpoints / f"tmp_step_{step}").exists)


def with_ray_starting(run: LiveRun) -> None:
    """Waits until Ray's first process runs."""
    run.wait_until(lambda: len(session_folders(run.process.pid)) == 1 and len(run.look_at_family()) > 2)


def in_building(run: LiveRun) -> None:
    """Waits until the policy's process imports what it needs to build the model."""
    run.wait_until(lambda: any(_title(one).startswith(_POLICY) for one in run.look_at_family()))
    _wait_for_work(run, run.actor(_POLICY), 0.5)


# Where a run can be interrupted -> how to wait for that place.
PHASES: dict[str, Callable[[LiveRun], None]] = {
    "generation": lambda run: in_generation(run, 4),
    "training": lambda run: in_training(run, 4),
    "saving": lambda run: in_saving(run, 4),
}
START_PHASES: dict[str, Callable[[LiveRun], None]] = {"ray_start": with_ray_starting, "building": in_building}

# ---- what interrupts it


def kill_driver(run: LiveRun) -> None:
    run.look_at_family()
    run.process.kill()


def kill_policy(run: LiveRun) -> None:
    run.actor(_POLICY).kill()


def kill_generation(run: LiveRun) -> None:
    run.actor(_GENERATOR).kill()


def terminate(run: LiveRun) -> None:
    """Sends SIGTERM to every process of the job, as a scheduler does."""
    for one in reversed(run.look_at_family()):
        one.send_signal(signal.SIGTERM)


def press_ctrl_c(run: LiveRun) -> None:
    """Sends SIGINT to every process of the group, as a terminal does."""
    run.look_at_family()
    os.killpg(run.process.pid, signal.SIGINT)


# What can interrupt a run -> (how, the driver's exit status then).
EVENTS: dict[str, tuple[Callable[[LiveRun], None], int]] = {
    "kill_driver": (kill_driver, -signal.SIGKILL),
    "kill_policy": (kill_policy, 1),
    "kill_generation": (kill_generation, 1),
    "sigterm": (terminate, 143),
    "ctrl_c": (press_ctrl_c, 130),
}

# ---- what remains


def seconds_until_gone(family: Iterable[psutil.Process], timeout_s: float = 30) -> float:
    """Waits until all processes have ended; returns the seconds."""
    start = time.monotonic()
    while left := [one for one in family if _is_alive(one)]:
        assert time.monotonic() - start < timeout_s, f"still there: {[str(one) for one in left]}"
        time.sleep(0.02)
    return time.monotonic() - start


def require_no_shared_memory(before: frozenset[str], timeout_s: float = 30) -> None:
    """Checks that the run left no new shared-memory file; other runs may create and remove theirs meanwhile."""
    deadline = time.monotonic() + timeout_s
    new = set(os.listdir(_SHARED_MEMORY)) - before
    while new:
        assert time.monotonic() < deadline, f"left in {_SHARED_MEMORY}: {sorted(new)}"
        time.sleep(0.2)
        new &= set(os.listdir(_SHARED_MEMORY))


def listening_addresses(family: Iterable[psutil.Process]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for one in family:
        try:
            connections = one.net_connections("inet")
        except psutil.NoSuchProcess:
            continue
        listening = {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN or c.type == 2}
        found.setdefault(_title(one), set()).update(listening)
    return found


def session_folders(driver: int) -> list[Path]:
    return sorted(Path("/tmp/ray").glob(f"session_*_{driver}"))


def _wait_for_work(run: LiveRun, worker: psutil.Process, seconds: float) -> None:
    begin = _cpu_seconds(worker)
    run.wait_until(lambda: _cpu_seconds(worker) >= begin + seconds)


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())[:80]
    except psutil.NoSuchProcess:
        return "gone"
