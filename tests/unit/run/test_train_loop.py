import os
import signal
import time
from dataclasses import replace

import pytest
from support import recorded_runs
from support.recorded_runs import SIX_STEPS

from nemo_offload_rl.data.loader import DataPosition
from nemo_offload_rl.data.problem import DataError
from nemo_offload_rl.environments import RewardError
from nemo_offload_rl.metrics.names import logged_name
from nemo_offload_rl.metrics.samples import JudgedAnswer
from nemo_offload_rl.run.checkpoints import CheckpointFolder, NoCheckpoints, RunState
from nemo_offload_rl.run.interrupt import Interrupt, Progress, Stopped
from nemo_offload_rl.run.train_loop import StopReason, StopTarget, TimeLimit
from nemo_offload_rl.storage.disk import DiskFullError

SCHEDULE = replace(SIX_STEPS, max_num_steps=10, val_period=4, val_at_start=False, val_at_end=False, save_period=3)


class Countdown:
    """Reports an accuracy of its step over ten, with four steps an epoch.

    Calls `at_step` at the end of each step, and `at_validation` before each validation. The attempts to save of
    `full_at`, the first being 1, find no space.
    """

    validation_answers = ()
    num_skipped = 0
    num_done = 0

    def __init__(self, at_step=lambda step: None, at_validation=lambda step: None, full_at=()):
        self.position = DataPosition(0, 0)
        self.validated = []
        self.at_step, self.at_validation = at_step, at_validation
        self.full_at = full_at
        self.num_saves = 0

    def step(self, step, timer):
        self.num_done = step
        with timer.phase("training"):
            self.position = DataPosition(step // 4, step % 4)
        self.at_step(step)
        return {"train/loss": 1.0 / step, "train/num_tokens": 100.0}

    def validate(self, step):
        self.at_validation(step)
        self.validated.append(step)
        return {"validation/accuracy": step / 10}

    def save(self, folder):
        self.num_saves += 1
        if self.num_saves in self.full_at:
            raise DiskFullError(str(folder), "No space left on device", 18_200_000_000, 3_100_000)
        (folder / "weights").write_text("w")
        return {}


def folder_of(path, keep_top_k=None):
    return CheckpointFolder(path, None, higher_is_better=True, keep_top_k=keep_top_k)


def make_run(path, algorithm, *, interrupt=None, checkpoints=None, state=None, limit=None, writer=None, **changes):
    limit = limit or TimeLimit(getattr(algorithm, "clock", time.monotonic))
    started = checkpoints or folder_of(path), state or RunState("run")
    schedule = replace(SCHEDULE, **changes)
    return recorded_runs.make_run(algorithm, schedule, *started, interrupt=interrupt, limit=limit, writer=writer)


def run(path, algorithm=None, **settings):
    algorithm = algorithm or Countdown()
    made, outputs = make_run(path, algorithm, **settings)
    reason = made.train()
    assert made.is_saved or algorithm.full_at
    return reason, algorithm, outputs


def saved(tmp_path):
    return sorted(int(path.name.removeprefix("step_")) for path in tmp_path.iterdir())


ACCURATE = StopTarget("validation/accuracy", 0.4)


SCHEDULES = [
    ({}, StopReason.STEPS, [4, 8], [3, 6, 9, 10]),  # the last step is saved, too
    ({"ft_save_period": 4}, StopReason.STEPS, [4, 8], [3, 4, 6, 8, 9, 10]),
    ({"val_period": 0, "val_at_start": True, "val_at_end": True}, StopReason.STEPS, [0, 10], [3, 6, 9, 10]),
    ({"val_period": 5, "val_at_end": True}, StopReason.STEPS, [5, 10], [3, 6, 9, 10]),
    ({"max_num_epochs": 1, "val_at_end": True}, StopReason.EPOCHS, [4], [3, 4]),
    ({"val_period": 2, "target": ACCURATE}, StopReason.TARGET, [2, 4], [3, 4]),
]


@pytest.mark.parametrize(("changes", "reason", "validated", "saved_steps"), SCHEDULES)
def test_all_is_where_the_schedule_has_it(tmp_path, changes, reason, validated, saved_steps):
    found, algorithm, outputs = run(tmp_path, **changes)
    assert found is reason
    assert list(outputs.rows) == outputs.shown == [*range(0 if 0 in validated else 1, saved_steps[-1] + 1)]
    assert algorithm.validated == validated
    accuracies = {step: row.get("validation/accuracy") for step, row in outputs.rows.items()}
    assert accuracies == {step: step / 10 if step in validated else None for step in outputs.rows}
    assert saved(tmp_path) == outputs.synced == saved_steps


def test_timings_are_logged(tmp_path):
    row = run(tmp_path)[2].rows[4]
    assert row["timing/train/training"] >= 0
    assert row["timing/train/validation"] >= 0
    assert row["timing/train/total_step_time"] >= row["timing/train/training"] + row["timing/train/validation"]
    assert row["performance/tokens_per_sec"] > 0
    assert "timing/train/checkpointing" not in row
    assert "timing/train/checkpointing" in run(tmp_path / "again")[2].rows[3]


def test_answers_of_a_validation_are_shown_once(tmp_path):
    def answer(step):
        algorithm.validation_answers = [JudgedAnswer("1+1=", str(step), "2", float(step == 2))]

    algorithm = Countdown(at_validation=answer)
    _, _, outputs = run(tmp_path, algorithm, val_at_start=True, max_num_steps=5)
    assert [(step, answers[0].answer) for step, answers in outputs.answers] == [(0, "0"), (4, "4")]
    assert run(tmp_path / "none", val_at_start=True)[2].answers == []


def test_a_finished_run_has_nothing_left_to_do(tmp_path):
    run(tmp_path, target=ACCURATE, val_period=2)
    state = RunState.read(tmp_path / "step_4")
    reason, algorithm, outputs = run(tmp_path, target=ACCURATE, val_period=2, state=state, val_at_start=True)
    assert (reason, algorithm.validated, outputs.rows) == (StopReason.TARGET, [], {})


def test_an_interrupt_finishes_the_step_and_saves_and_before_the_first_step_nothing(tmp_path):
    def request(step):
        interrupt.requested = step == 5

    interrupt, algorithm = Interrupt(), Countdown(at_step=request)
    reason, _, outputs = run(tmp_path, algorithm, interrupt=interrupt, val_at_end=True)
    assert (reason, max(outputs.rows), saved(tmp_path)) == (StopReason.INTERRUPTED, 5, [3, 5])
    assert algorithm.validated == [4]
    assert RunState.read(tmp_path / "step_5").position == DataPosition(1, 1)
    reason, _, outputs = run(tmp_path / "again", interrupt=interrupt)
    assert (reason, outputs.rows) == (StopReason.INTERRUPTED, {})
    assert not (tmp_path / "again").exists()


def test_a_checkpoint_has_its_steps_in_the_log_already(tmp_path):
    class Dies(CheckpointFolder):
        def start(self, state, metrics, writer):
            raise OSError("killed while saving")

    dies = Dies(tmp_path, None, higher_is_better=True, keep_top_k=None)
    made, outputs = make_run(tmp_path, Countdown(), checkpoints=dies)
    with pytest.raises(OSError, match="killed"):
        made.train()
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
    reason, _, outputs = run(tmp_path, Countdown(full_at=(2, 4)))
    assert reason is StopReason.STEPS
    assert list(outputs.rows) == list(range(1, 11))
    assert saved(tmp_path) == [3, 9, 10]  # 10 at the second attempt, at the end
    assert [record.getMessage() for record in caplog.records] == [
        f"Step {step} is not saved: {tmp_path}/tmp_step_{step} cannot be written: No space left on device "
        "(18.2 GB needed, 3.1 MB free). Free some space: the next save tries again."
        for step in (6, 10)
    ]


def test_a_last_state_that_is_not_on_disk_is_told(tmp_path, caplog):
    last, _ = make_run(tmp_path, Countdown(full_at=(4, 5)))
    assert last.train() is StopReason.STEPS
    assert not last.is_saved
    text = "The run ends without a checkpoint of its last step, 10: the newest checkpoint is of step 9."
    assert caplog.messages[-1] == text


def test_targets_and_names_of_metrics():
    for target, metrics, is_reached in (
        (StopTarget("validation/accuracy", 0.9), {"validation/accuracy": 0.9}, True),
        (StopTarget("validation/accuracy", 0.9), {"validation/accuracy": 0.89}, False),
        (StopTarget("validation/accuracy", 0.9), {"validation/reward": 1.0}, False),
        (StopTarget("validation/val_loss", 0.5), {"validation/val_loss": 0.4}, True),
        (StopTarget("validation/val_loss", 0.5), {"validation/val_loss": 0.6}, False),
    ):
        assert target.is_reached(metrics) is is_reached, metrics
    assert logged_name("val:accuracy") == "validation/accuracy"
    assert logged_name("train:reward") == "train/reward"
    for wrong in ("accuracy", "validation:accuracy", "val/accuracy"):
        with pytest.raises(ValueError, match="val:NAME or train:NAME"):
            logged_name(wrong)


def test_what_is_done_and_what_is_saved_is_known_wherever_a_run_stops(tmp_path):
    interrupt = Interrupt()
    with pytest.raises(Stopped):
        run(tmp_path, FailsAt(Stopped(), step=5), interrupt=interrupt)
    assert interrupt.progress == Progress("run", 4, in_step=True, num_saved=3, checkpoint=tmp_path / "step_3")
    assert interrupt.progress.num_lost == 2


def test_a_signal_is_noted_in_a_step_and_stops_before_the_first(tmp_path):
    def signalled(step):
        os.kill(os.getpid(), signal.SIGTERM)

    with Interrupt() as interrupt:
        reason, _, _ = run(tmp_path, Countdown(at_step=signalled), interrupt=interrupt)
    assert reason is StopReason.INTERRUPTED
    assert saved(tmp_path) == [1]
    with Interrupt() as interrupt, pytest.raises(Stopped):
        run(tmp_path / "again", Countdown(at_validation=signalled), interrupt=interrupt, val_at_start=True)
    assert interrupt.progress.num_lost == 0


class Timed(Countdown):
    """Takes 10 s for a step, 20 s for the third, 5 s for a validation, 7 s for a checkpoint, by its own clock."""

    def __init__(self, third_s=20, validation_s=5):
        super().__init__()
        self.now, self.third_s, self.validation_s = 1000.0, third_s, validation_s

    def clock(self):
        return self.now

    def step(self, step, timer):
        self.now += self.third_s if step == 3 else 10
        return super().step(step, timer)

    def validate(self, step):
        self.now += self.validation_s
        return super().validate(step)

    def save(self, folder):
        self.now += 7
        return super().save(folder)


TIME_LIMITS = [
    (1000, 10, None),  # never reached
    (1, 1, 17),  # one step is made in any case
    (20, 1, 17),  # a second step would end at 20, with no time left to save
    (21, 2, 27),  # a checkpoint's duration is not known before the first one
    (60, 3, 47),  # after 47 s: a step may take 20, with its checkpoint 27
    (75, 4, 69),  # after 62 s, the fourth one's validation included: no further step of 20 with a checkpoint of 7
    (96, 5, 79),
]


@pytest.mark.parametrize(("limit_s", "last", "at_end_s"), TIME_LIMITS)
def test_a_run_has_saved_and_ended_by_its_time_limit(tmp_path, limit_s, last, at_end_s):
    algorithm = Timed()
    reason, _, outputs = run(tmp_path, algorithm, must_save_by_s=limit_s)
    assert max(outputs.rows) == last == max(saved(tmp_path))
    assert reason is (StopReason.STEPS if at_end_s is None else StopReason.TIME)
    if at_end_s is not None:
        assert algorithm.now - 1000 == at_end_s
        assert at_end_s <= limit_s or last <= 2


def test_the_next_start_goes_on_and_has_its_own_time(tmp_path):
    run(tmp_path, Timed(), must_save_by_s=60)
    state = RunState.read(tmp_path / "step_3")
    reason, _, outputs = run(tmp_path, Timed(), must_save_by_s=25, state=state, val_period=0)
    assert reason is StopReason.TIME
    assert list(outputs.rows) == [4, 5]
    assert not reason.is_done and StopReason.STEPS.is_done


def test_a_run_that_starts_again_after_a_failure_has_what_is_left_of_the_time(tmp_path):
    class Dies(Timed):
        def step(self, step, timer):
            if step == 5:
                raise RuntimeError("a node is gone")
            return super().step(step, timer)

    dies = Dies()
    limit = TimeLimit(dies.clock)
    with pytest.raises(RuntimeError, match="a node is gone"):
        run(tmp_path, algorithm=dies, limit=limit, must_save_by_s=150, val_period=0)
    assert (dies.now - 1000, saved(tmp_path)) == (57, [3])
    again = Timed()
    again.now = dies.now + 30  # a new node joins
    limit._clock = again.clock
    state = RunState.read(tmp_path / "step_3")
    reason, _, outputs = run(tmp_path, algorithm=again, limit=limit, must_save_by_s=150, val_period=0, state=state)
    assert reason is StopReason.TIME
    assert list(outputs.rows) == [4, 5, 6]  # after 124 s: a step may take 20, with its checkpoint 27
    assert again.now - 1000 == 124


def test_the_steps_of_a_warm_start_are_none_of_the_run_behind_it(tmp_path):
    algorithm = Timed()
    limit = TimeLimit(algorithm.clock)
    run(tmp_path / "warm start", algorithm, limit=limit, checkpoints=NoCheckpoints(), max_num_steps=3)
    begin = algorithm.now
    reason, _, _ = run(tmp_path / "run", algorithm, limit=limit, must_save_by_s=30, val_period=0)
    assert reason is StopReason.TIME
    assert saved(tmp_path / "run") == [2]  # after the first step there is time for one of 10 s, not of 20 s
    assert algorithm.now - begin == 27


class Background:
    """Writes beside the run, for some steps, the weights from when it started."""

    def __init__(self, algorithm, num_steps, full_at=(), full_in="finish"):
        self.algorithm, self.num_steps = algorithm, num_steps
        self.full_at = [(full_in, name) for name in full_at]
        self.under_way = None
        self.events = []

    def find_space(self, call, folder):
        if (call, folder.name) in self.full_at:
            raise DiskFullError(str(folder), "No space left on device", 18_200_000_000, 3_100_000)

    def start(self, folder):
        assert self.under_way is None, "the last one is waited for"
        self.find_space("start", folder)
        self.under_way = self.algorithm.position, self.algorithm.num_done
        self.events.append(f"start {folder.name}")

    def is_written(self):
        return self.algorithm.num_done - self.under_way[1] >= self.num_steps

    def finish(self, folder):
        (position, num_done), self.under_way = self.under_way, None
        self.events.append(f"finish {folder.name} after {self.algorithm.num_done - num_done} steps")
        self.find_space("finish", folder)
        (folder / "weights").write_text(f"{num_done} {position}")
        return {}


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 5])
def test_checkpoints_are_written_beside_the_run_each_with_its_own_state(tmp_path, num_steps):
    algorithm = Countdown()
    writer = Background(algorithm, num_steps)
    reason, _, outputs = run(tmp_path, algorithm, writer=writer)
    assert reason is StopReason.STEPS
    assert saved(tmp_path) == [3, 6, 9, 10]
    for step in (3, 6, 9, 10):
        folder = tmp_path / f"step_{step}"
        position = DataPosition(step // 4, step % 4)
        assert (folder / "weights").read_text() == f"{step} {position}"
        state = RunState.read(folder)
        assert (state.step, state.position) == (step, position)
        assert [validation.step for validation in state.validations] == [at for at in (4, 8) if at <= step]
    taken = min(num_steps, 3)  # the next save waits for the last one
    of_step = [[f"start tmp_step_{step}", f"finish tmp_step_{step} after {taken} steps"] for step in (3, 6)]
    assert writer.events[:4] == [*of_step[0], *of_step[1]]
    assert writer.events[-1] == "finish tmp_step_10 after 0 steps"  # so does the end of the run
    assert "timing/train/checkpointing" in outputs.rows[3]


class Beside:
    """Writes beside the run for 40 s by an algorithm's clock."""

    def __init__(self, algorithm):
        self.algorithm = algorithm

    def start(self, folder):
        self.end = self.algorithm.now + 40

    def is_written(self):
        return self.algorithm.now >= self.end

    def finish(self, folder):
        self.algorithm.now = max(self.algorithm.now, self.end)
        return {}


@pytest.mark.parametrize(
    ("limit_s", "last", "at_end_s"),
    [
        # Checkpoints begin after 40 s and 80 s. With a step beside the second, the next one would be on disk after 160.
        (161, 12, 160),
        (160, 8, 120),
    ],
)
def test_the_last_checkpoint_has_time_behind_one_that_is_still_being_written(tmp_path, limit_s, last, at_end_s):
    algorithm = Timed(third_s=10, validation_s=0)
    sizes = {"must_save_by_s": limit_s, "save_period": 4, "max_num_steps": 20}
    reason, _, _ = run(tmp_path, algorithm, writer=Beside(algorithm), **sizes)
    assert reason is StopReason.TIME
    assert max(saved(tmp_path)) == last
    assert algorithm.now - 1000 == at_end_s <= limit_s


def test_a_first_checkpoint_takes_at_least_as_long_as_it_has_been_written_for():
    now = [0.0]
    limit = TimeLimit(lambda: now[0])
    limit.begin(100)
    limit.start_save()
    now[0] = 49
    assert not limit.is_over  # a second one would end at 98
    now[0] = 50
    assert limit.is_over
    limit.end_save(is_on_disk=False)
    assert not limit.is_over


def test_a_crash_while_one_is_written_leaves_the_one_before_whole(tmp_path):
    interrupt, algorithm = Interrupt(), FailsAt(RuntimeError("a worker died"), step=8)
    own = {"writer": Background(algorithm, 3), "interrupt": interrupt, "checkpoints": folder_of(tmp_path, keep_top_k=1)}
    with pytest.raises(RuntimeError, match="a worker died"):
        run(tmp_path, algorithm, **own)
    assert own["checkpoints"].newest_first() == [tmp_path / "step_3"]
    assert (tmp_path / "tmp_step_6").is_dir()
    newest = f"{tmp_path}/step_3"
    lost = f"Steps 4 to 8 since {newest} (8 unfinished) are lost."
    assert str(interrupt.progress) == f"{lost} The same command resumes from {newest}."
    own["checkpoints"].remove_unfinished()
    assert saved(tmp_path) == [3]


@pytest.mark.parametrize("full_in", ["start", "finish"])
def test_a_full_disk_beside_the_run_is_met_and_the_next_save_tries_again(tmp_path, caplog, full_in):
    algorithm = Countdown()
    writer = Background(algorithm, 2, full_at=("tmp_step_6", "tmp_step_10"), full_in=full_in)
    last, _ = make_run(tmp_path, algorithm, writer=writer)
    assert last.train() is StopReason.STEPS
    assert saved(tmp_path) == [3, 9]
    assert not last.is_saved
    said = [record.getMessage().split(":")[0] for record in caplog.records]
    assert said == ["Step 6 is not saved", "Step 10 is not saved", "Step 10 is not saved", said[-1]]
    assert "without a checkpoint of its last step, 10" in said[-1]


class FailsAt(Countdown):
    """Raises an error in a step, before or after its training, or in a validation, until it is mended."""

    def __init__(self, error, *, step=None, validation=None, has_trained=False):
        super().__init__()
        self.error, self.failing_step, self.failing_validation, self.has_trained = error, step, validation, has_trained
        self.abandoned = 0

    def step(self, step, timer):
        if step != self.failing_step:
            return super().step(step, timer)
        self.position = DataPosition(9, 9)  # rows of this step have been drawn
        with timer.phase("training" if self.has_trained else "rewards"):
            raise self.error

    def validate(self, step):
        if step == self.failing_validation:
            raise self.error
        return super().validate(step)

    def abandon_step(self):
        self.abandoned += 1


@pytest.mark.parametrize("error", [DataError("a row"), RewardError("a reward")])
@pytest.mark.parametrize("num_steps_beside", [None, 1, 3])
def test_finished_steps_are_saved_before_an_error_that_the_user_can_mend(tmp_path, error, num_steps_beside):
    algorithm, interrupt = FailsAt(error, step=6), Interrupt()
    writer = None if num_steps_beside is None else Background(algorithm, num_steps_beside)
    with pytest.raises(type(error), match=str(error)):
        run(tmp_path, algorithm, interrupt=interrupt, writer=writer)
    assert saved(tmp_path) == [3, 5]
    assert RunState.read(tmp_path / "step_5").position == DataPosition(1, 1)
    assert algorithm.abandoned == 1
    assert interrupt.progress == Progress("run", 5, in_step=True, num_saved=5, checkpoint=tmp_path / "step_5")
    _, _, outputs = run(tmp_path, state=RunState.read(tmp_path / "step_5"))
    assert list(outputs.rows) == [6, 7, 8, 9, 10]


def test_a_validation_that_fails_is_made_again_after_its_step_has_been_saved(tmp_path):
    failed, outputs = make_run(tmp_path, FailsAt(RewardError("a reward"), validation=8))
    with pytest.raises(RewardError):
        failed.train()
    assert saved(tmp_path) == [3, 6, 8]
    assert outputs.rows[8]["train/loss"] == 1 / 8
    assert outputs.synced == [3, 6, 8]
    _, algorithm, outputs = run(tmp_path, state=RunState.read(tmp_path / "step_8"))
    assert algorithm.validated == [8]
    assert outputs.rows[8]["validation/accuracy"] == 0.8
    assert [validation.step for validation in RunState.read(tmp_path / "step_10").validations] == [4, 8]


@pytest.mark.parametrize(
    ("error", "has_trained"), [(DataError("behind the training"), True), (RuntimeError("a worker died"), False)]
)
def test_nothing_is_saved_where_the_policy_may_not_be_whole(tmp_path, error, has_trained):
    with pytest.raises(type(error)):
        run(tmp_path, algorithm=FailsAt(error, step=6, has_trained=has_trained))
    assert saved(tmp_path) == [3]


def test_an_error_in_the_first_step_or_right_after_a_checkpoint_saves_nothing_more(tmp_path):
    for step in (1, 7):
        algorithm = FailsAt(DataError("a row"), step=step)
        with pytest.raises(DataError):
            run(tmp_path / str(step), algorithm)
        assert algorithm.abandoned == 0
    assert saved(tmp_path / "7") == [3, 6]
