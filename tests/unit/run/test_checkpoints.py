"""Tests checkpoints and the run folder."""

import json
import logging
from concurrent.futures import ThreadPoolExecutor
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from support.limits import files_of_at_most

from nemo_offload_rl.data.loader import DataPosition
from nemo_offload_rl.run.checkpoints import (
    CheckpointFolder,
    NoCheckpoints,
    RunState,
    ValidationResult,
    WriteAtOnce,
    read_metrics_of,
)
from nemo_offload_rl.run.folder import changed_keys, logged_to, new_run_folder, read_recipe, write_recipe
from nemo_offload_rl.storage.disk import DiskFullError
from nemo_offload_rl.storage.manifest import file_sum, find_damage, read_manifest

ACCURACY, NAN = "validation/accuracy", float("nan")


def folder(path, metric=ACCURACY, higher_is_better=True, keep_top_k=2, **newest) -> CheckpointFolder:
    return CheckpointFolder(path, metric, higher_is_better, keep_top_k, **newest)


def save(checkpoints, step, **metrics):
    named = {f"validation/{name}": value for name, value in metrics.items()}
    return write_at_once(checkpoints, RunState("run", step=step), named, weights)


def write_at_once(checkpoints, state, metrics, write):
    started = checkpoints.start(state, metrics, WriteAtOnce(write))
    return None if started is None else checkpoints.finish(started)


def weights(path):
    (path / "weights").write_text("w")
    return {}


def steps(path):
    return sorted(int(checkpoint.name.removeprefix("step_")) for checkpoint in path.iterdir())


def test_a_checkpoint_holds_what_was_written_and_the_state(tmp_path):
    state = RunState("logs/exp_001", 7, DataPosition(1, 30), [ValidationResult(5, {ACCURACY: 0.5})])
    written = write_at_once(folder(tmp_path / "new"), state, {ACCURACY: 0.6}, weights)
    assert written == tmp_path / "new" / "step_7"
    assert (written / "weights").read_text() == "w"
    assert RunState.read(written) == state
    assert read_metrics_of(written) == {ACCURACY: 0.6}


KEPT = [
    (2, [0.9, 0.3, 0.5, 0.1], [1, 3, 4]),  # the best and the newest
    (1, [0.9, 0.3, 0.9, 0.1, 0.2], [3, 5]),
    (3, [-0.9, -0.3, -0.5, -0.7, None, -0.8], [2, 3, 4, 6]),
    # One without the metric ranks last, and the older of equals goes first.
    (3, [0.0, None, 0.0, 0.0, None], [1, 3, 4, 5]),
    (3, [0.0, None, 0.0, 0.0, None, 0.0], [3, 4, 6]),
    (2, [0.5, 0.9, NAN, 0.1, 0.2], [1, 2, 5]),
    (2, [None, None, None], [2, 3]),
    (None, [None, None, None], [1, 2, 3]),
]


@pytest.mark.parametrize(("keep_top_k", "metrics", "kept"), KEPT)
@pytest.mark.parametrize("higher_is_better", [True, False])
def test_the_best_and_the_newest_are_kept(tmp_path, keep_top_k, metrics, kept, higher_is_better):
    checkpoints = folder(tmp_path, higher_is_better=higher_is_better, keep_top_k=keep_top_k)
    for step, value in enumerate(metrics, start=1):
        signed = None if value is None else value if higher_is_better else -value
        save(checkpoints, step, **{} if signed is None else {"accuracy": signed})
    assert steps(tmp_path) == kept
    assert checkpoints.newest_first()[0] == tmp_path / f"step_{len(metrics)}"


# Steps 1 to 8, of which 3 divides two; the accuracy falls, except at step 6. Worked out from NeMo-RL's definition.
KEPT_BETWEEN_PERIODS = [
    (1, None, [6, 8]), (2, None, [3, 6, 8]), (0, None, [8]), (1, 3, [6, 7, 8]), (1, 0, [6, 8]),
    (None, 2, [3, 6, 7, 8]), (None, 0, [3, 6, 8]), (None, None, [1, 2, 3, 4, 5, 6, 7, 8]),
]  # fmt: skip


@pytest.mark.parametrize(("keep_top_k", "ft_keep_latest_k", "kept"), KEPT_BETWEEN_PERIODS)
def test_steps_between_periods_are_kept_only_as_the_newest(tmp_path, keep_top_k, ft_keep_latest_k, kept):
    checkpoints = folder(tmp_path, keep_top_k=keep_top_k, save_period=3, ft_keep_latest_k=ft_keep_latest_k)
    for step in range(1, 9):
        save(checkpoints, step, accuracy=0.9 if step == 6 else 0.8 - step / 10)
    assert steps(tmp_path) == kept


def test_the_newest_is_that_of_the_highest_number(tmp_path):
    checkpoints = folder(tmp_path, metric=None)
    for step in (9, 10):
        save(checkpoints, step)
    assert checkpoints.newest_first()[0].name == "step_10"


@pytest.mark.parametrize("error", [OSError("disk full"), RuntimeError(), KeyboardInterrupt()])
def test_a_checkpoint_that_fails_half_way_or_is_stopped_is_not_one(tmp_path, error):
    checkpoints = folder(tmp_path)
    save(checkpoints, 1)

    def fail(path):
        (path / "weights").write_text("half")
        raise error

    with pytest.raises(type(error)):
        write_at_once(checkpoints, RunState("run", step=2), {}, fail)
    assert steps(tmp_path) == [1]
    (tmp_path / "tmp_step_2").mkdir()  # a killed run leaves this
    checkpoints.remove_unfinished()
    assert steps(tmp_path) == [1]
    save(checkpoints, 2)
    assert checkpoints.newest_first()[0].name == "step_2"


@pytest.mark.parametrize("full", ["no space", "a file is too long"])
def test_where_the_disk_is_full_nothing_of_the_checkpoint_stays_and_the_next_one_is_whole(tmp_path, full):
    checkpoints = folder(tmp_path)
    save(checkpoints, 1)

    def fill(path):
        if full == "no space":
            (path / "weights").write_text("half")
            Path("/dev/full").write_text("more")
        with files_of_at_most(1000):
            (path / "weights").write_text("w" * 2000)

    reason = "No space left on device" if full == "no space" else "File too large"
    with pytest.raises(DiskFullError, match=f"tmp_step_2 cannot be written: {reason} .* free"):
        write_at_once(checkpoints, RunState("run", step=2), {}, fill)
    assert steps(tmp_path) == [1]
    assert save(checkpoints, 2).name == "step_2"


def test_the_manifest_is_written_last_and_lists_every_file(tmp_path):
    known = {}

    def write(path):
        (path / "policy").mkdir()
        (path / "policy" / "weights").write_text("w")
        known["policy/weights"] = file_sum(path / "policy" / "weights", rank=3)
        return known

    checkpoint = write_at_once(folder(tmp_path), RunState("run", step=1), {}, write)
    files = read_manifest(checkpoint).files
    assert set(files) == {"policy/weights", "training_state.json"}
    assert files["policy/weights"] == known["policy/weights"]
    assert files["training_state.json"].rank is None
    assert find_damage(checkpoint, files) == []


def test_a_damaged_checkpoint_can_be_set_aside_again_and_again(tmp_path):
    checkpoints = folder(tmp_path)
    for name in ("damaged_step_3", "damaged_step_3_1"):
        assert checkpoints.set_aside(save(checkpoints, 3)).name == name
    assert checkpoints.newest_first() == []
    assert save(checkpoints, 3).exists()


def test_one_whose_state_cannot_be_read_counts_as_the_worst(tmp_path, caplog):
    checkpoints = folder(tmp_path)
    best = save(checkpoints, 1, accuracy=0.9)
    (best / "training_state.json").write_text("{")
    for step in (2, 3):
        save(checkpoints, step, accuracy=0.1)
    assert steps(tmp_path) == [2, 3]
    assert "training_state.json is not what a run writes (JSONDecodeError" in caplog.text


def test_a_metric_that_no_step_has_is_told_with_the_nearest_that_there_is(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    checkpoints = folder(tmp_path, "train/los")
    write_at_once(checkpoints, RunState("run", 1), {"train/loss": 2.0, "train/lr": 1e-3}, weights)
    [record] = caplog.records
    assert record.message == (
        "Step 1 has no train:los, by which checkpointing.metric_name ranks checkpoints, so that this one counts as the "
        "worst; did you mean train:loss?"
    )
    caplog.clear()
    save(folder(tmp_path), 2)  # most steps have no validation
    write_at_once(checkpoints, RunState("run", 3), {"train/los": 2.0}, weights)
    assert not caplog.records


def test_other_files_and_folders_are_left_alone(tmp_path):
    (tmp_path / "step_best").mkdir()
    (tmp_path / "step_9").write_text("a file")
    checkpoints = folder(tmp_path, keep_top_k=1)
    assert checkpoints.newest_first() == []
    save(checkpoints, 1)
    save(checkpoints, 2)
    assert {path.name for path in tmp_path.iterdir()} == {"step_best", "step_9", "step_2"}


def test_one_that_cannot_be_removed_stays_and_the_run_goes_on(tmp_path, caplog):
    (tmp_path / "elsewhere").mkdir()
    checkpoints = folder(tmp_path / "run", keep_top_k=1)
    save(checkpoints, 1, accuracy=0.1).rename(tmp_path / "elsewhere" / "step_1")
    (tmp_path / "run" / "step_1").symlink_to(tmp_path / "elsewhere" / "step_1")
    save(checkpoints, 2, accuracy=0.2)
    assert steps(tmp_path / "run") == [1, 2]
    assert "step_1 cannot be removed, and stays: " in caplog.text
    assert (tmp_path / "elsewhere" / "step_1" / "weights").exists()


def test_nothing_is_found_where_nothing_is_or_checkpoints_are_off(tmp_path):
    off = NoCheckpoints()
    write_at_once(off, RunState("run", step=1), {}, lambda path: pytest.fail("was called"))
    for checkpoints in (folder(tmp_path / "absent"), off):
        checkpoints.remove_unfinished()
        assert checkpoints.newest_first() == []


def test_the_state_is_readable_json(tmp_path):
    path = save(folder(tmp_path), 3, accuracy=0.25)
    content = json.loads((path / "training_state.json").read_text())
    state = {"step": 3, "position": {"epoch": 0, "samples": 0}, "metrics": {ACCURACY: 0.25}}
    assert content.items() >= state.items()


def test_run_folders_are_numbered(tmp_path):
    assert new_run_folder(tmp_path / "logs").name == "exp_001"
    (tmp_path / "logs" / "exp_007").mkdir()
    (tmp_path / "logs" / "exp_best").mkdir()
    assert new_run_folder(tmp_path / "logs").name == "exp_008"


def test_runs_that_start_at_once_get_folders_of_their_own(tmp_path):
    with ThreadPoolExecutor(8) as threads:
        folders = list(threads.map(lambda _: new_run_folder(tmp_path), range(40)))
    assert len(set(folders)) == 40


def test_recipes_come_back_as_they_were(tmp_path):
    config = {"optimizer": {"lr": 1e-8, "metric": None, "on": True}, "names": ["a", "b"]}
    assert read_recipe(tmp_path) is None
    write_recipe(tmp_path, config)
    assert read_recipe(tmp_path) == config


def test_changed_keys_are_named_in_full():
    old = {"a": {"b": 1, "c": 2}, "d": [1], "gone": None}
    new = {"a": {"b": 1, "c": 3}, "d": [1], "e": {"f": 1}}
    assert changed_keys(old, new) == ["a.c", "e", "gone"]
    assert changed_keys(old, old) == []


def test_the_log_is_in_the_folder_and_warnings_are_shown(tmp_path):
    shown = StringIO()
    package, module = logging.getLogger("nemo_offload_rl"), logging.getLogger("nemo_offload_rl.some.module")
    before = package.handlers.copy(), package.level, package.propagate
    with logged_to(tmp_path, Console(file=shown, width=200)):
        module.info("a detail")
        module.warning("a warning")
    assert (package.handlers, package.level, package.propagate) == before
    log = (tmp_path / "run.log").read_text()
    assert "INFO nemo_offload_rl.some.module: a detail" in log
    assert "a warning" in log
    assert "a warning" in shown.getvalue()
    assert "a detail" not in shown.getvalue()


def test_a_log_that_finds_no_space_is_told_once_and_ends_no_run(tmp_path, capsys):
    shown = StringIO()
    log = logging.getLogger("nemo_offload_rl")
    with files_of_at_most(300), logged_to(tmp_path, Console(file=shown, width=500)):
        for _ in range(10):
            log.info("a line of sixty characters or so, which soon finds no space")
    assert shown.getvalue().count("run.log cannot be written: File too large") == 1
    assert capsys.readouterr().err == ""
    assert (tmp_path / "run.log").stat().st_size == 300
