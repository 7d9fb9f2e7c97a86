"""Full disks, second starts and damaged checkpoints, of runs as a user starts them."""

import json
import os
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from support.examples import command, environment, run_example

pytestmark = pytest.mark.slow

SFT = ["checkpointing.enabled=true", "sft.val_period=1000000", "sft.val_at_start=false", "sft.val_at_end=false"]


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 3 MB, which holds no checkpoint of the tiny model."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "none", str(folder)], capture_output=True, text=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_run_on_a_full_disk_trains_on_and_says_what_is_not_saved(tmp_path, small_disk):
    overrides = [*SFT, "sft.max_num_steps=4", "checkpointing.save_period=2"]
    folder = small_disk / "checkpoints"
    done = run_example("run_sft.py", tmp_path, [*overrides, f"checkpointing.checkpoint_dir={folder}"])
    assert done.status == 1, done.output
    told = "".join(done.output.split())  # the console's lines end anywhere in a path
    for step in (2, 4):
        place = f"{folder}/tmp_step_{step}/policy"
        assert f"Step{step}isnotsaved:{place}cannotbewritten:Nospaceleftondevice(1" in told
    assert "itslaststate,ofstep4,isnotondisk:noneisthere" in told
    assert "Traceback" not in done.output
    assert list(done.metrics()) == [1, 2, 3, 4]
    assert not list(small_disk.iterdir())


def test_a_second_start_is_told_and_the_next_one_takes_over_from_a_killed_run_and_a_damaged_checkpoint(tmp_path):
    long = [*SFT, "sft.max_num_steps=100000", "checkpointing.save_period=2"]
    first = subprocess.Popen(
        command("run_sft.py", tmp_path, long), cwd=tmp_path, env=environment(), stdout=subprocess.DEVNULL
    )
    checkpoints = tmp_path / "checkpoints"
    deadline = time.monotonic() + 200
    while not (checkpoints / "step_4").is_dir():
        assert first.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    second = run_example("run_sft.py", tmp_path, long)
    assert second.status == 2
    assert f"{checkpoints} is in use by process {first.pid} of host" in " ".join(second.output.split())
    family = [first, *psutil.Process(first.pid).children(recursive=True)]
    first.kill()
    first.wait()
    psutil.wait_procs([psutil.Process(one.pid) for one in family[1:] if psutil.pid_exists(one.pid)], timeout=60)

    for unfinished in checkpoints.glob("tmp_step_*"):
        unfinished.rename(tmp_path / unfinished.name)
    newest, *older = sorted((int(path.name[5:]) for path in checkpoints.glob("step_*")), reverse=True)
    damaged = checkpoints / f"step_{newest}" / "policy" / "__0_0.distcp"
    flip_a_bit(damaged)
    logged = rows(tmp_path)
    overrides = [*long, f"sft.max_num_steps={newest + 1}", "checkpointing.on_damaged=previous"]
    third = run_example("run_sft.py", tmp_path, overrides)
    assert third.status == 0, third.output
    told = " ".join(third.output.split())
    assert f"of process {first.pid} of host" in told
    assert "which has ended, is taken over." in told
    assert f"step_{newest} is damaged: policy/__0_0.distcp has other contents than were written" in told
    assert f"the run goes on from step_{older[0]}." in told
    again = rows(tmp_path)
    assert list(again) == list(range(1, newest + 2))
    assert {step: again[step] for step in range(1, newest + 1)} == {step: logged[step] for step in range(1, newest + 1)}


def flip_a_bit(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(os.path.getsize(path) // 2)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def rows(folder: Path) -> dict[int, float]:
    """The loss of each step."""
    lines = (folder / "logs" / "exp_001" / "metrics.jsonl").read_text().splitlines()
    return {row["step"]: row["train/loss"] for row in map(json.loads, lines)}
