"""Tests a run that has no disk space for its checkpoints."""

import subprocess

import pytest
from support.examples import run_example

pytestmark = pytest.mark.slow

SFT = ["checkpointing.enabled=true", "sft.val_period=1000000", "sft.val_at_start=false", "sft.val_at_end=false"]


@pytest.fixture
def small_disk(tmp_path):
    """Mounts a disk of 3 MB, which is too small for a checkpoint of the tiny model."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=3m", "none", str(folder)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_run_on_a_full_disk_trains_on_and_says_what_is_not_saved(tmp_path, small_disk):
    overrides = [*SFT, "sft.max_num_steps=4", "checkpointing.save_period=2"]
    folder = small_disk / "checkpoints"
    done = run_example("run_sft.py", tmp_path, [*overrides, f"checkpointing.checkpoint_dir={folder}"], status=1)
    told = "".join(done.output.split())  # the console may wrap inside a path
    for step in (2, 4):
        place = f"{folder}/tmp_step_{step}/policy"
        assert f"Step{step}isnotsaved:{place}cannotbewritten:Nospaceleftondevice(1" in told
    assert "Therunendswithoutacheckpointofitslaststep,4:thereisnocheckpoint" in told
    assert "Traceback" not in done.output
    assert list(done.metrics()) == [1, 2, 3, 4]
    assert not list(small_disk.iterdir())
