import os
import signal
from dataclasses import replace

import pytest
from support.toy_policy import Recorded

from nemo_offload_rl.data.loader import DataPosition
from nemo_offload_rl.metrics.names import logged_name
from nemo_offload_rl.run.checkpoints import CheckpointFolder, NoCheckpoints, RunState
from nemo_offload_rl.run.interrupt import Interrupt, Progress, Stopped
from nemo_offload_rl.run.train_loop import Run, Schedule, StopReason, StopTarget
from nemo_offload_rl.storage.disk import DiskFullError

SCHEDULE = Schedule(
    max_num_steps=10, max_num_epochs=5, val_period=4, val_at_start=False, val_at_end=False, save_period=3, target=None
)


class Countdown:
    """An algorithm whose accuracy is its step over ten, with four steps an epoch."""

    def __init__(self, interrupt=None, interrupt_at=None):
        self.position = DataPosition(0, 0)
        self.validated = []
        self.interrupt = interrupt
        self.interrupt_at = interrupt_at

    def step(self, step, timer):
        with timer.phase("training"):
            self.position = DataPosition(step // 4, step % 4)
        if step == self.interrupt_at:
            self.interrupt.requested = True
        return {"train/loss": 1.0 / step, "train/num_tokens": 100.0}

    def validate(self, step):
        self.validated.append(step)
        return {"validation/accuracy": step / 10}

    def save(self, folder):
        (folder / "weights").write_text("w")
        return {}


class FullAt(Countdown):
    """Finds no space at some attempts to save, the first being 1."""

    def __init__(self, *attempts):
        super().__init__()
        self.attempts = attempts
        self.num_saves = 0

    def save(self, folder):
        self.num_saves += 1
        if self.num_saves in self.attempts:
            raise DiskFullError(str(folder), "No space left on device", 18_200_000_000, 3_100_000)
        return super().save(folder)


def run(tmp_path, *, algorithm=None, interrupt=None, checkpoints=None, state=None, **changes):
    algorithm = algorithm or Countdown()
    outputs = Recorded()
    run = Run(
        algorithm,
        replace(SCHEDULE, **changes),
        state or RunState("run"),
        checkpoints or CheckpointFolder(tmp_path, None, higher_is_better=True, keep_top_k=None),
        algorithm.save,
        outputs,
        interrupt or Interrupt(),
    )
    reason = run.train()
    assert run.is_saved or isinstance(algorithm, FullAt)
    return reason, algorithm, outputs


def saved(tmp_path):
    return sorted(int(path.name.removeprefix("step_")) for path in tmp_path.iterdir())


def test_steps_validations_and_checkpoints_are_where_the_schedule_has_them(tmp_path):
    reason, algorithm, outputs = run(tmp_path)
    assert reason is StopReason.STEPS
    assert list(outputs.rows) == outputs.shown == list(range(1, 11))
    assert algorithm.validated == [4, 8]
    assert saved(tmp_path) == [3, 6, 9, 10]  # the last step is saved, too
    assert outputs.rows[4]["validation/accuracy"] == 0.4
    assert "validation/accuracy" not in outputs.rows[5]


def test_timings_are_logged(tmp_path):
    row = run(tmp_path)[2].rows[4]
    assert row["timing/train/training"] >= 0
    assert row["timing/train/validation"] >= 0
    assert row["timing/train/total_step_time"] >= row["timing/train/training"] + row["timing/train/validation"]
    assert row["performance/tokens_per_sec"] > 0
    assert "timing/train/checkpointing" not in row
    assert "timing/train/checkpointing" in run(tmp_path / "again")[2].rows[3]


def test_validation_at_start_and_end(tmp_path):
    _, algorithm, outputs = run(tmp_path, val_period=0, val_at_start=True, val_at_end=True)
    assert algorithm.validated == [0, 10]
    assert outputs.rows[0]["validation/accuracy"] == 0.0
    _, algorithm, _ = run(tmp_path / "again", val_period=5, val_at_end=True)
    assert algorithm.validated == [5, 10]


def test_epochs_end_a_run(tmp_path):
    reason, algorithm, outputs = run(tmp_path, max_num_epochs=1, val_at_end=True)
    assert reason is StopReason.EPOCHS
    assert max(outputs.rows) == 4
    assert algorithm.validated == [4]
    assert saved(tmp_path) == [3, 4]


def test_a_target_ends_a_run(tmp_path):
    target = StopTarget("validation/accuracy", 0.4)
    reason, _, outputs = run(tmp_path, target=target, val_period=2)
    assert reason is StopReason.TARGET
    assert max(outputs.rows) == 4
    assert saved(tmp_path) == [3, 4]


def test_a_finished_run_has_nothing_left_to_do(tmp_path):
    target = StopTarget("validation/accuracy", 0.4)
    run(tmp_path, target=target, val_period=2)
    state = RunState.read(tmp_path / "step_4")
    reason, algorithm, outputs = run(tmp_path, target=target, val_period=2, state=state, val_at_start=True)
    assert reason is StopReason.TARGET
    assert (algorithm.validated, outputs.rows) == ([], {})


def test_an_interrupt_finishes_the_step_and_saves(tmp_path):
    interrupt = Interrupt()
    reason, algorithm, outputs = run(
        tmp_path, algorithm=Countdown(interrupt, interrupt_at=5), interrupt=interrupt, val_at_end=True
    )
    assert reason is StopReason.INTERRUPTED
    assert max(outputs.rows) == 5
    assert saved(tmp_path) == [3, 5]
    assert algorithm.validated == [4]
    assert RunState.read(tmp_path / "step_5").position == DataPosition(1, 1)


def test_an_interrupt_before_the_first_step_saves_nothing(tmp_path):
    interrupt = Interrupt()
    interrupt.requested = True
    reason, _, outputs = run(tmp_path, interrupt=interrupt)
    assert reason is StopReason.INTERRUPTED
    assert outputs.rows == {}
    assert saved(tmp_path) == []


def test_a_checkpoint_has_its_steps_in_the_log_already(tmp_path):
    class Dies(CheckpointFolder):
        def save(self, state, metrics, write):
            raise OSError("killed while saving")

    outputs = Recorded()
    algorithm = Countdown()
    checkpoints = Dies(tmp_path, None, higher_is_better=True, keep_top_k=None)
    with pytest.raises(OSError, match="killed"):
        Run(algorithm, SCHEDULE, RunState("run"), checkpoints, algorithm.save, outputs, Interrupt()).train()
    assert outputs.rows[3]["train/loss"] == pytest.approx(1 / 3)


def test_a_resumed_run_starts_where_the_other_stopped(tmp_path):
    run(tmp_path, max_num_steps=5)
    state = RunState.read(tmp_path / "step_5")
    assert (state.step, state.position) == (5, DataPosition(1, 1))
    _, algorithm, outputs = run(tmp_path, state=state, val_at_start=True)
    assert list(outputs.rows) == [6, 7, 8, 9, 10]
    assert algorithm.validated == [8]
    assert [validation.step for validation in RunState.read(tmp_path / "step_10").validations] == [4, 8]


def test_training_goes_on_where_the_disk_is_full_and_the_next_save_tries_again(tmp_path, caplog):
    reason, _, outputs = run(tmp_path, algorithm=FullAt(2, 4))
    assert reason is StopReason.STEPS
    assert list(outputs.rows) == list(range(1, 11))
    assert saved(tmp_path) == [3, 9, 10]  # 10 at the second attempt, at the end
    assert [record.getMessage() for record in caplog.records] == [
        f"Step {step} is not saved: {tmp_path}/tmp_step_{step} cannot be written: No space left on device "
        "(18.2 GB needed, 3.1 MB free). Free some space: the next save tries again."
        for step in (6, 10)
    ]


def test_a_last_state_that_is_not_on_disk_is_told(tmp_path, caplog):
    algorithm = FullAt(4, 5)
    last = Run(
        algorithm, SCHEDULE, RunState("run"), CheckpointFolder(tmp_path, None, True, None), algorithm.save,
        Recorded(), Interrupt(),
    )  # fmt: skip
    assert last.train() is StopReason.STEPS
    assert not last.is_saved
    text = "The run ends, and its last state, of step 10, is not on disk: the newest that is there is of step 9."
    assert caplog.messages[-1] == text


def test_off_checkpoints_do_not_disturb(tmp_path):
    reason, _, _ = run(tmp_path, checkpoints=NoCheckpoints())
    assert reason is StopReason.STEPS
    assert saved(tmp_path) == []


def test_targets():
    assert StopTarget("validation/accuracy", 0.9).is_reached({"validation/accuracy": 0.9})
    assert not StopTarget("validation/accuracy", 0.9).is_reached({"validation/accuracy": 0.89})
    assert not StopTarget("validation/accuracy", 0.9).is_reached({"validation/reward": 1.0})
    assert StopTarget("validation/val_loss", 0.5).is_reached({"validation/val_loss": 0.4})
    assert not StopTarget("validation/val_loss", 0.5).is_reached({"validation/val_loss": 0.6})


def test_metric_names():
    assert logged_name("val:accuracy") == "validation/accuracy"
    assert logged_name("train:reward") == "train/reward"
    for wrong in ("accuracy", "validation:accuracy", "val/accuracy"):
        with pytest.raises(ValueError, match="val:NAME or train:NAME"):
            logged_name(wrong)


def test_what_is_done_and_what_is_saved_is_known_wherever_a_run_stops(tmp_path):
    class StoppedInStep5(Countdown):
        def step(self, step, timer):
            if step == 5:
                raise Stopped
            return super().step(step, timer)

    interrupt = Interrupt()
    with pytest.raises(Stopped):
        run(tmp_path, algorithm=StoppedInStep5(), interrupt=interrupt)
    assert interrupt.progress == Progress("run", 4, in_step=True, num_saved=3, checkpoint=tmp_path / "step_3")
    assert interrupt.progress.num_lost == 2


def test_a_signal_is_noted_in_a_step_and_stops_before_the_first(tmp_path):
    class Signalled(Countdown):
        def step(self, step, timer):
            os.kill(os.getpid(), signal.SIGTERM)
            return super().step(step, timer)

        def validate(self, step):
            os.kill(os.getpid(), signal.SIGTERM)

    with Interrupt() as interrupt:
        reason, _, _ = run(tmp_path, algorithm=Signalled(), interrupt=interrupt)
    assert reason is StopReason.INTERRUPTED
    assert saved(tmp_path) == [1]
    with Interrupt() as interrupt, pytest.raises(Stopped):
        run(tmp_path / "again", algorithm=Signalled(), interrupt=interrupt, val_at_start=True)
    assert interrupt.progress.num_lost == 0
