import json
from pathlib import Path

import pytest
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
from nemo_offload_rl.storage.disk import DiskFullError
from nemo_offload_rl.storage.manifest import file_sum, find_damage, read_manifest

ACCURACY = "validation/accuracy"


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


def test_the_best_and_the_newest_are_kept(tmp_path):
    checkpoints = folder(tmp_path)
    for step, accuracy in ((1, 0.9), (2, 0.3), (3, 0.5), (4, 0.1)):
        save(checkpoints, step, accuracy=accuracy)
    assert steps(tmp_path) == [1, 3, 4]
    assert checkpoints.newest_first()[0] == tmp_path / "step_4"


def test_the_best_is_kept_also_where_one_is_kept(tmp_path):
    checkpoints = folder(tmp_path, keep_top_k=1)
    for step, accuracy in ((1, 0.9), (2, 0.3), (3, 0.9), (4, 0.1), (5, 0.2)):
        save(checkpoints, step, accuracy=accuracy)
    assert steps(tmp_path) == [3, 5]
    assert [path.name for path in tmp_path.iterdir() if read_metrics_of(path)[ACCURACY] == 0.9] == ["step_3"]


# Steps 1 to 8, of which 3 divides two; the accuracy falls, except at step 6. Worked out from NeMo-RL's definition.
@pytest.mark.parametrize(
    ("keep_top_k", "ft_keep_latest_k", "kept"),
    [
        (1, None, [6, 8]),
        (2, None, [3, 6, 8]),
        (0, None, [8]),
        (1, 3, [6, 7, 8]),
        (1, 0, [6, 8]),
        (None, 2, [3, 6, 7, 8]),
        (None, 0, [3, 6, 8]),
        (None, None, [1, 2, 3, 4, 5, 6, 7, 8]),
    ],
)
def test_steps_between_periods_are_kept_only_as_the_newest(tmp_path, keep_top_k, ft_keep_latest_k, kept):
    checkpoints = folder(tmp_path, keep_top_k=keep_top_k, save_period=3, ft_keep_latest_k=ft_keep_latest_k)
    for step in range(1, 9):
        save(checkpoints, step, accuracy=0.9 if step == 6 else 0.8 - step / 10)
    assert steps(tmp_path) == kept


def test_lower_can_be_better(tmp_path):
    checkpoints = folder(tmp_path, "validation/val_loss", higher_is_better=False, keep_top_k=3)
    for step, loss in ((1, 0.9), (2, 0.3), (3, 0.5), (4, 0.7), (10, 0.8)):
        save(checkpoints, step, val_loss=loss)
    assert steps(tmp_path) == [2, 3, 4, 10]
    assert checkpoints.newest_first()[0].name == "step_10"


def test_one_without_the_metric_ranks_last_and_the_older_of_equals_goes_first(tmp_path):
    checkpoints = folder(tmp_path, keep_top_k=3)
    for step, metrics in ((1, {"accuracy": 0.0}), (2, {}), (3, {"accuracy": 0.0}), (4, {"accuracy": 0.0}), (5, {})):
        save(checkpoints, step, **metrics)
    assert steps(tmp_path) == [1, 3, 4, 5]
    save(checkpoints, 6, accuracy=0.0)
    assert steps(tmp_path) == [3, 4, 6]


@pytest.mark.parametrize("higher_is_better", [True, False])
def test_one_whose_metric_is_nan_ranks_last(tmp_path, higher_is_better):
    checkpoints = folder(tmp_path, higher_is_better=higher_is_better, keep_top_k=2)
    sign = 1 if higher_is_better else -1
    for step, accuracy in enumerate((0.5, 0.9, float("nan"), 0.1, 0.2), start=1):
        save(checkpoints, step, accuracy=sign * accuracy)
    assert steps(tmp_path) == [1, 2, 5]


def test_without_a_metric_age_counts(tmp_path):
    checkpoints = folder(tmp_path, metric=None)
    for step in (1, 2, 3):
        save(checkpoints, step, accuracy=1.0 / step)
    assert steps(tmp_path) == [2, 3]


def test_null_keeps_all(tmp_path):
    checkpoints = folder(tmp_path, keep_top_k=None)
    for step in (1, 2, 3):
        save(checkpoints, step)
    assert steps(tmp_path) == [1, 2, 3]


def test_a_checkpoint_that_fails_half_way_is_not_one(tmp_path):
    checkpoints = folder(tmp_path)
    save(checkpoints, 1)

    def fail(path):
        (path / "weights").write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_at_once(checkpoints, RunState("run", step=2), {}, fail)
    assert checkpoints.newest_first()[0].name == "step_1"
    assert not (tmp_path / "tmp_step_2").exists()
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


def test_other_files_and_folders_are_left_alone(tmp_path):
    (tmp_path / "step_best").mkdir()
    (tmp_path / "step_9").write_text("a file")
    checkpoints = folder(tmp_path, keep_top_k=1)
    assert checkpoints.newest_first() == []
    save(checkpoints, 1)
    save(checkpoints, 2)
    assert {path.name for path in tmp_path.iterdir()} == {"step_best", "step_9", "step_2"}


def test_nothing_is_found_where_nothing_is(tmp_path):
    checkpoints = folder(tmp_path / "absent")
    checkpoints.remove_unfinished()
    assert checkpoints.newest_first() == []


def test_the_state_is_readable_json(tmp_path):
    path = save(folder(tmp_path), 3, accuracy=0.25)
    content = json.loads((path / "training_state.json").read_text())
    assert content["step"] == 3
    assert content["position"] == {"epoch": 0, "samples": 0}
    assert content["metrics"] == {ACCURACY: 0.25}


def test_off_means_nothing_is_written(tmp_path):
    checkpoints = NoCheckpoints()
    write_at_once(checkpoints, RunState("run", step=1), {}, lambda path: pytest.fail("was called"))
    checkpoints.remove_unfinished()
    assert checkpoints.newest_first() == []


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_save_that_fails_or_is_stopped_leaves_no_partial_folder(tmp_path, error):
    def write(folder):
        (folder / "half").write_text("written")
        raise error

    folder = CheckpointFolder(tmp_path, None, higher_is_better=True, keep_top_k=None)
    with pytest.raises(error):
        write_at_once(folder, RunState("run", step=3), {}, write)
    assert list(tmp_path.iterdir()) == []
