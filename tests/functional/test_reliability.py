"""Tests that a run that is killed or asked to end leaves nothing behind, and resumes as if uninterrupted.

`--reliability` runs the whole matrix of docs/reliability.md. Without it, one run is asked to end, and another is
killed, resumes, is asked to end, and resumes again.
"""

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from support import reliability
from support.examples import command, environment
from support.forked_python import forked_python

from nemo_offload_rl.run.checkpoints import CheckpointFolder
from nemo_offload_rl.storage.lock import LOCK_FILE
from nemo_offload_rl.storage.manifest import find_damage, read_manifest

pytestmark = pytest.mark.slow

DEATHS = ("kill_policy", "kill_generation")


@pytest.fixture(scope="module")
def asked_to_end(tmp_path_factory) -> tuple[reliability.LiveRun, subprocess.CompletedProcess]:
    """Presses Ctrl-C in an endless run after some steps; meanwhile starts the same command a second time."""
    endless = ["grpo.max_num_steps=100000"]
    python = forked_python()  # for the second start, which ends by itself; prepared before the run begins
    with reliability.running(tmp_path_factory.mktemp("asked_to_end"), endless) as run:
        run.wait_until(lambda: run.num_rows() >= reliability.NUM_STEPS)
        second = subprocess.run(
            command("run_grpo.py", run.folder, [*reliability.TINIEST, *endless], python=python), env=environment(),
            capture_output=True, text=True, timeout=run.timeout_s, check=False,
        )  # fmt: skip
        reliability.in_generation(run, run.num_rows() + 1)
        reliability.EVENTS["ctrl_c"][0](run)
        run.end()
    return run, second


@pytest.fixture(scope="module")
def undisturbed(asked_to_end) -> dict[int, dict[str, float]]:
    """Returns the metrics of the first steps, before the interruption."""
    run, _ = asked_to_end
    metrics = run.metrics()
    return {step: metrics[step] for step in range(1, reliability.NUM_STEPS + 1)}


def newest(run: reliability.LiveRun) -> int:
    """Returns the step of the newest checkpoint; 0 if there is none."""
    folders = CheckpointFolder(run.checkpoints, None, higher_is_better=True, keep_top_k=None).newest_first()
    if not folders:
        return 0
    manifest = read_manifest(folders[0])
    assert manifest is not None
    assert not find_damage(folders[0], manifest.files)
    return int(folders[0].name.removeprefix("step_"))


def require_nothing_left(run: reliability.LiveRun, event: str) -> float:
    seconds = reliability.seconds_until_gone(run.family)
    output = run.output
    assert ("Traceback" in output) == (event in DEATHS), output
    assert "*** SIG" not in output, output  # the native stacks that a library prints for a signal it takes for a crash
    reliability.require_no_shared_memory(run.shared_memory)
    for folder in reliability.session_folders(run.process.pid):
        assert event in DEATHS, "only of dead workers the output is kept"
        assert f"{folder}/logs" in output
        shutil.rmtree(folder)
    if event != "kill_driver":  # a killed driver has no time to remove it; the next start does
        assert not list(run.checkpoints.glob("tmp_*")), output
    return seconds


def require_words(run: reliability.LiveRun, event: str, saved: int) -> None:
    """Checks that the last lines say what happened, what is lost, and from where the run resumes."""
    if event == "kill_driver":
        return
    *_, first, last = run.output.splitlines()
    if event in DEATHS:
        assert first.startswith("The run failed: "), run.output
        assert "its process ended without an error of its own: it was killed" in first
        assert " lost." in last
    else:
        assert "No step is lost." in last, run.output
    goes_on = f"resumes from {run.checkpoints / f'step_{saved}'}." if saved else "starts the run from the beginning."
    assert last.endswith(f"The same command {goes_on}"), run.output


def hit(folder: Path, event: str, phase: str) -> float:
    """Starts or resumes a run and interrupts it; returns the seconds until everything was gone."""
    strike, status = reliability.EVENTS[event]
    with reliability.running(folder) as run:
        (reliability.PHASES | reliability.START_PHASES)[phase](run)
        strike(run)
        assert run.end() == status, run.output
        seconds = require_nothing_left(run, event)
        require_words(run, event, newest(run))
    return seconds


def require_equal_to(undisturbed: dict[int, dict[str, float]], folder: Path) -> None:
    """Checks that the resumed run ends as the undisturbed one did."""
    done = reliability.to_the_end(folder)
    assert done.metrics() == undisturbed
    assert not list((folder / "checkpoints").glob("tmp_*"))


def flip_a_bit(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(os.path.getsize(path) // 2)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def test_ctrl_c_finishes_the_step_saves_it_and_leaves_nothing(asked_to_end):
    run, _ = asked_to_end
    assert run.end() == 130, run.output
    require_nothing_left(run, "ctrl_c")
    assert newest(run) == run.num_rows() > reliability.NUM_STEPS
    require_words(run, "ctrl_c", newest(run))


def test_a_second_start_is_told_who_has_the_folder(asked_to_end):
    run, second = asked_to_end
    assert second.returncode == 2
    told = " ".join((second.stdout + second.stderr).split())
    assert f"{run.checkpoints} is in use by process {run.process.pid} of host" in told


def test_after_sigkill_a_damaged_checkpoint_and_sigterm_a_run_goes_on_bit_for_bit(undisturbed, tmp_path):
    with reliability.running(tmp_path, ["checkpointing.save_period=1"]) as run:
        reliability.in_saving(run, 3)  # the checkpoint may be whole by then
        reliability.EVENTS["kill_driver"][0](run)
        assert run.end() == reliability.EVENTS["kill_driver"][1]
        require_nothing_left(run, "kill_driver")
    damaged, killed = newest(run), run.process.pid
    assert damaged >= 2
    flip_a_bit(run.checkpoints / f"step_{damaged}" / "policy" / "__0_0.distcp")
    with reliability.running(tmp_path, ["checkpointing.on_damaged=previous"]) as run:
        reliability.in_training(run, 5)
        told = " ".join(run.output.split())
        assert f"its owner, process {killed} of host" in told
        assert "Taking over the lock " in told
        assert f"step_{damaged} is damaged: policy/__0_0.distcp has changed since it was written" in told
        assert f"the run resumes from step_{damaged - 1}." in told
        addresses = reliability.listening_addresses(run.look_at_family())
        listening = set().union(*addresses.values())
        assert listening
        assert listening <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}, addresses
        reliability.EVENTS["sigterm"][0](run)
        assert run.end() == 143, run.output
        require_nothing_left(run, "sigterm")
        assert newest(run) == run.num_rows() >= 5  # SIGTERM may have arrived late
        require_words(run, "sigterm", newest(run))
    require_equal_to(undisturbed, tmp_path)


@pytest.mark.reliability
@pytest.mark.parametrize("phase", reliability.PHASES)
@pytest.mark.parametrize("event", reliability.EVENTS)
def test_whatever_hits_a_run_it_goes_on_bit_for_bit(undisturbed, tmp_path, event, phase, record_property):
    record_property("seconds_until_gone", round(hit(tmp_path, event, phase), 2))
    require_equal_to(undisturbed, tmp_path)


@pytest.mark.reliability
@pytest.mark.parametrize("phase", reliability.START_PHASES)
@pytest.mark.parametrize("event", ["kill_driver", "sigterm", "ctrl_c"])
def test_a_run_that_is_hit_while_it_starts_leaves_nothing(tmp_path, event, phase, record_property):
    record_property("seconds_until_gone", round(hit(tmp_path, event, phase), 2))
    folder = tmp_path / "checkpoints"
    if event == "kill_driver":
        assert [path.name for path in folder.iterdir()] == [LOCK_FILE]  # the next run takes the lock over
    else:
        assert not folder.exists()


# The step takes minutes, so that a run that waited for its end would time out.
ENDLESS = [
    "policy.generation.max_new_tokens=240", "grpo.num_prompts_per_step=1024", "grpo.num_generations_per_prompt=8",
]  # fmt: skip


@pytest.mark.reliability
@pytest.mark.parametrize("event", ["ctrl_c", "sigterm"])
def test_a_step_that_is_not_waited_for_is_said_to_be_lost(undisturbed, tmp_path, event):
    with reliability.running(tmp_path) as run:
        reliability.in_saving(run, 2)
        reliability.EVENTS["ctrl_c"][0](run)
        assert run.end() == 130, run.output
    overrides = [*ENDLESS, "policy.train_global_batch_size=8192", "++checkpointing.grace_period_s=2"]
    with reliability.running(tmp_path, overrides) as run:
        reliability.in_long_generation(run)
        reliability.EVENTS[event][0](run)
        if event == "ctrl_c":
            run.wait_until(lambda: "Press Ctrl-C again" in run.output)
            time.sleep(1)  # an earlier one would count as the same key press, passed on
            reliability.EVENTS[event][0](run)
        assert run.end() == {"ctrl_c": 1, "sigterm": 143}[event], run.output
        require_nothing_left(run, event)
        lost, folder = newest(run) + 1, run.checkpoints / f"step_{newest(run)}"
        last_line = f"Step {lost} since {folder} (unfinished) is lost. The same command resumes from {folder}."
        assert run.output.rstrip().endswith(last_line), run.output
    require_equal_to(undisturbed, tmp_path)
