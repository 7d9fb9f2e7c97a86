import errno
import json
import math
import os
import sys
import types
from contextlib import closing
from unittest import mock

import pytest
from support.limits import files_of_at_most
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from nemo_offload_rl.metrics.logger import RunLogger, read_metrics
from nemo_offload_rl.storage.disk import DiskFullError


def test_metrics_of_a_step_are_one_object_on_disk_at_once(tmp_path):
    write(tmp_path / "run", {7: {"train/loss": 0.0}})  # a new run starts a new history
    logger = RunLogger(tmp_path / "run", tensorboard=False)
    logger.log(0, {"validation/accuracy": 0.25})
    logger.log(1, {"train/reward": 0.5, "train/num_tokens": 12})
    logger.log(1, {"train/reward": 0.75, "train/loss": float("nan"), "train/grad_norm": float("inf")})
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()  # before close
    assert [json.loads(line) for line in lines] == [
        {"step": 0, "validation/accuracy": 0.25},
        {"step": 1, "train/reward": 0.75, "train/num_tokens": 12, "train/loss": None, "train/grad_norm": None},
    ]
    with pytest.raises(AssertionError, match="step 0 after those of step 1"):
        logger.log(0, {"train/loss": 1.0})
    logger.close()


def write(folder, rows, **options):
    """Logs metrics by step; returns all rows of the file."""
    with closing(RunLogger(folder, **{"tensorboard": False} | options)) as logger:
        for step, metrics in rows.items():
            logger.log(step, metrics)
    return read_metrics(folder / "metrics.jsonl")


def test_tensorboard_of_a_branch_has_the_history_and_each_value_of_a_step_once(tmp_path):
    write(tmp_path, {1: {"a": 0.5, "b": math.nan}, 2: {"a": 1.0}, 3: {"a": 1.5}})  # copied, without TensorBoard's files
    with closing(RunLogger(tmp_path, tensorboard=True, resumed_step=2)) as branch:
        branch.log(3, {"a": 2.0})
        branch.log(3, {"a": 2.0, "c": 3.0})  # a step's metrics, and again with those of its end
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    found = {name: [(event.step, event.value) for event in events.Scalars(name)] for name in ("a", "b", "c")}
    assert found["a"] == [(1, 0.5), (2, 1.0), (3, 2.0)] and found["c"] == [(3, 3.0)]
    [(step, value)] = found["b"]
    assert step == 1 and math.isnan(value)


@pytest.mark.parametrize("resumed_step", [0, 3, 9])
def test_a_resumed_run_has_the_history_of_an_uninterrupted_one(tmp_path, resumed_step):
    before = {step: {"train/loss": 10.0 + step} for step in range(6)}
    after = {step: {"train/loss": 20.0 + step} for step in range(resumed_step + 1, 12)}
    write(tmp_path, before)
    kept = [{"step": step, **before[step]} for step in range(min(resumed_step, 5) + 1)]
    assert write(tmp_path, {}, resumed_step=resumed_step) == kept
    rows = write(tmp_path, after, resumed_step=resumed_step)
    assert rows == kept + [{"step": step, **metrics} for step, metrics in after.items()]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    rows = write(tmp_path, {4: {"validation/accuracy": 0.5}}, resumed_step=4)  # the step itself can be added to
    assert rows[-1].items() >= {"step": 4, "validation/accuracy": 0.5}.items()


def test_tensorboard_has_every_scalar_and_every_text_and_forgets_steps_after_a_resume(tmp_path):
    write(tmp_path, {step: {"train/reward": step / 10} for step in range(1, 5)}, tensorboard=True)
    with closing(RunLogger(tmp_path, tensorboard=True, resumed_step=2)) as resumed:
        resumed.log(3, {"train/reward": 0.9})
        resumed.log_text(3, "validation/answers", "| prompt |")
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    scalars = [(event.step, round(event.value, 3)) for event in events.Scalars("train/reward")]
    assert scalars == [(1, 0.1), (2, 0.2), (3, 0.9)]
    (event,) = events.Tensors("validation/answers/text_summary")
    assert (event.step, event.tensor_proto.string_val[0]) == (3, b"| prompt |")
    assert read_metrics(tmp_path / "metrics.jsonl")[-1] == {"step": 3, "train/reward": 0.9}


def test_wandb_without_its_package_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed, wherever the test runs
    with pytest.raises(ValueError, match=r"logger.wandb_enabled.*make setup EXTRAS=wandb"):
        RunLogger(tmp_path, tensorboard=False, wandb={"project": "p"})


@pytest.fixture
def wandb(monkeypatch):
    """Puts a module in place of the package wandb that keeps runs as its server does: by id, each with its config."""
    module, runs = types.ModuleType("wandb"), {}

    class Config(dict):
        def update(self, values, *, allow_val_change):
            assert allow_val_change
            super().update(values)

    class Run:
        def __init__(self, settings):
            self.settings, self.config, self.rows = settings, Config(), []

        def log(self, metrics, step):
            self.rows.append((step, metrics))

        def finish(self):
            self.rows.append("finished")

    def init(*, id, resume, **settings):
        assert resume == "allow"
        return runs.setdefault(id, Run(settings))

    module.init, module.runs = init, runs
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)
    return module


def test_a_folder_has_one_run_in_wandb_with_the_newest_recipe(tmp_path, wandb, monkeypatch):
    names = {"project": "p", "name": "n", "entity": "e"}

    def log(folder, step, lr):
        recipe = {"policy": {"lr": lr}}
        with closing(RunLogger(tmp_path / folder, False, names, recipe, resumed_step=step - 1)) as logger:
            logger.log(step, {"train/loss": 0.5})

    log("a", 1, 0.1)
    log("a", 2, 0.2)
    log("b", 1, 0.3)
    (a, run), (_, other) = wandb.runs.items()
    assert run.settings == names | {"dir": str(tmp_path / "a")}
    assert run.rows == [(1, {"train/loss": 0.5}), "finished", (2, {"train/loss": 0.5}), "finished"]
    assert (run.config, other.config) == ({"policy": {"lr": 0.2}}, {"policy": {"lr": 0.3}})
    assert (tmp_path / "a" / "wandb_run_id").read_text() == a
    monkeypatch.setenv("WANDB_RUN_ID", "of-a-sweep")
    log("a", 3, 0.2)
    assert list(wandb.runs)[2:] == ["of-a-sweep"]


@pytest.mark.parametrize("rest", ['{\n{"step": 3}', "3", '{"train/loss": 1.0}'])
def test_a_broken_history_names_its_line(tmp_path, rest):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{rest}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2"):
        read_metrics(path)


@pytest.mark.parametrize("torn", [b'{"step": 3, "tr', b'{"step": 3}\xff\n', bytes(9)])
def test_a_torn_last_line_is_left_out_with_a_warning_and_its_step_is_written_again(tmp_path, torn, caplog):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n' + torn)
    resumed = RunLogger(tmp_path, tensorboard=False, resumed_step=3)
    assert caplog.messages == [f"{path}:3 was not written to its end, and is left out."]
    resumed.log(3, {"train/loss": 1.0})
    resumed.close()
    assert read_metrics(path) == [{"step": 1}, {"step": 2}, {"step": 3, "train/loss": 1.0}]


def test_syncing_writes_all_rows_to_the_disk(tmp_path, monkeypatch):
    logger, synced = RunLogger(tmp_path, tensorboard=False), []
    logger.log(1, {"train/loss": 1.0})
    monkeypatch.setattr("os.fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    logger.sync()
    assert synced == [str(tmp_path / "metrics.jsonl")]
    monkeypatch.setattr("os.fsync", mock.Mock(side_effect=OSError(errno.ENOSPC, "full")))
    with pytest.raises(DiskFullError, match=r"metrics\.jsonl cannot be written: No space left"):
        logger.sync()
    logger.close()


def test_metrics_that_find_no_space_are_kept_and_written_later(tmp_path, caplog):
    logger = RunLogger(tmp_path, tensorboard=False)
    path = tmp_path / "metrics.jsonl"
    for step in range(3):
        logger.log(step, {"train/loss": float(step)})
    with files_of_at_most(path.stat().st_size + 20):
        for step in range(3, 6):
            logger.log(step, {"train/loss": float(step)})
            logger.log(step, {"train/lr": 0.5})
        assert not logger.is_whole
        assert [row["step"] for row in read_metrics(path)] == [0, 1, 2]  # only complete rows
    assert len(caplog.records) == 1
    assert "File too large" in caplog.text
    logger.log(5, {"train/grad_norm": 2.0})
    assert logger.is_whole
    rows = read_metrics(path)
    assert [row["step"] for row in rows] == list(range(6))
    assert rows[-1] == {"step": 5, "train/loss": 5.0, "train/lr": 0.5, "train/grad_norm": 2.0}
    logger.log(6, {"train/loss": 6.0})
    logger.close()
    assert [row["step"] for row in read_metrics(path)] == list(range(7))


def test_metrics_that_find_no_space_to_the_end_are_told(tmp_path, caplog):
    logger = RunLogger(tmp_path, tensorboard=False)
    logger.log(0, {"train/loss": 0.0})
    with files_of_at_most(40):
        logger.log(1, {"train/loss": 1.0})
        logger.log(2, {"train/loss": 2.0})
        logger.close()
    assert caplog.messages[-1] == f"Metrics of step 1 to 2 are lost: {tmp_path}/metrics.jsonl is on a full disk."
    assert not logger.is_whole
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [0]


def test_history_stays_where_there_is_no_space_to_write_it_again(tmp_path):
    write(tmp_path, {step: {"train/loss": 0.0} for step in range(5)})
    with files_of_at_most(40), pytest.raises(DiskFullError, match=r"metrics\.jsonl cannot be written: File too large"):
        RunLogger(tmp_path, tensorboard=False, resumed_step=4)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 5


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard's thread may raise
def test_tensorboard_ends_where_there_is_no_space_and_metrics_go_on(tmp_path, caplog):
    logger = RunLogger(tmp_path, tensorboard=True)
    with files_of_at_most(2000):
        for step in range(5):
            logger.log(step, {f"train/{number}": 0.0 for number in range(40)})
    assert caplog.text.count("TensorBoard gets no more metrics of this run") == 1
    logger.log(5, {"train/loss": 1.0})
    logger.close()
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == list(range(6))
