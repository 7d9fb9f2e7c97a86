"""Tests asynchronous GRPO: rollouts of later steps are sampled in a thread while a step trains."""

import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support.toy_policy import ToyGeneration

from nemo_offload_rl.algorithms import rollout_queue
from nemo_offload_rl.data.problem import DataError
from nemo_offload_rl.environments import Reward, RewardError
from nemo_offload_rl.environments.judge_pool import JudgePool
from nemo_offload_rl.environments.pooled_reward import PooledReward
from nemo_offload_rl.generation.interface import GenerationError
from nemo_offload_rl.metrics.timer import Timer
from nemo_offload_rl.run.checkpoints import CheckpointFolder, RunState
from tests.unit.algorithms.test_grpo import EXACT_MATCH, SCHEDULE, SETTINGS, Setting
from tests.unit.algorithms.test_saved_rollouts import HARD
from tests.unit.environments.test_judge_pool import JUDGE

BOTH = ("training", "generation")
AGE = "train/avg_trajectory_age"
LIMIT_S = 20


class Apart(ToyGeneration):
    """Stays awake, as engines on GPUs of their own do; may be slow, fail or wait."""

    def __init__(self, slow_s=0.0, before=lambda request: None):
        super().__init__()
        self.slow_s, self.before = slow_s, before

    def prepare_for_generation(self, tags):
        self.awake -= {"weights", "kv_cache"} if "weights" in tags else {"kv_cache"}
        return super().prepare_for_generation(tags)

    def finish_generation(self):
        pass

    def generate(self, request):
        self.before(request)
        time.sleep(self.slow_s)
        return super().generate(request)


class InFlight(Apart):
    """Counts for each token the loads of weights since its call began, as engines do whose weights are in flight."""

    num_loads = 0

    def prepare_for_generation(self, tags):
        self.awake |= set(tags)  # and stays so: a call may come while weights are being loaded

    def load_weights(self, named_tensors):
        ((_, tensor),) = named_tensors
        self.table = tensor.clone()
        self.num_loads += 1

    def generate(self, request):
        self.before(request)
        before = self.num_loads
        output = ToyGeneration.generate(self, request)
        output.num_updates = [[self.num_loads - before] * len(row) for row in output.output_ids]
        return output


OPEN = []


@pytest.fixture(autouse=True)
def close_queues():
    yield
    while OPEN:
        OPEN.pop().close()


def ahead(max_age, *, slow_s=0.0, before=lambda request: None, train_s=0.0, fills=False, engine=Apart, **arguments):
    """Returns a setting whose training takes so long, or until all is sampled that may be (`fills`)."""
    setting = Setting(max_age=max_age, generation=engine(slow_s, before), **arguments)
    OPEN.append(setting.grpo._sample)
    train = setting.policy.train

    def slow_train(*args, **kwargs):
        time.sleep(train_s)
        queue = setting.grpo._sample
        with queue._changed:
            may_go_on = lambda: fills and not queue._has_ended and (queue._is_sampling or queue._may_sample)  # noqa: E731
            assert queue._changed.wait_for(lambda: not may_go_on(), LIMIT_S)
        return train(*args, **kwargs)

    setting.policy.train = slow_train
    return setting


UNVALIDATED = replace(SCHEDULE, val_period=0, val_at_start=False, val_at_end=False)


def dies(at, error):
    """Returns what raises an error in the engine at a step."""

    def before(request):
        if request.step == at:
            raise error

    return before


DEAD = GenerationError("generate", RuntimeError("the engine died"), "")


def without_queue(outputs):
    rows = outputs.without_timings()
    return {step: {name: row[name] for name in row.keys() - {AGE}} for step, row in rows.items()}


def prompts_by_step(setting):
    """The prompts of the training requests, which sample several answers to each; validation has one."""
    training = [request for request in setting.generation.requests if max(request.sample_ids) > 0]
    return {request.step: request.prompt_ids[:: max(request.sample_ids) + 1] for request in training}


@pytest.mark.parametrize("arguments", [{}, HARD], ids=["plain", "hard"])
def test_no_step_ahead_is_the_synchronous_run_bit_for_bit(arguments):
    synchronous, queued = Setting(**arguments), ahead(0, **arguments)
    _, wanted, _ = synchronous.run()
    _, found, _ = queued.run()
    assert without_queue(found) == wanted.without_timings()
    assert torch.equal(queued.policy.table, synchronous.policy.table)
    assert {row[AGE] for step, row in found.rows.items() if step} == {0.0}


def test_one_step_ahead_gives_the_same_numbers_whatever_is_slower():
    runs = [ahead(1, **slower) for slower in ({}, {"slow_s": 0.05}, {"train_s": 0.05})]
    (first, *others), rows = runs, [setting.run()[1] for setting in runs]
    ages = [rows[0].rows[step][AGE] for step in range(1, 7)]
    assert ages == [0, 1, 1, 1, 1, 1]
    for other, found in zip(others, rows[1:], strict=True):
        assert found.without_timings() == rows[0].without_timings()
        assert torch.equal(other.policy.table, first.policy.table)
    shares = [[[found.rows[s][f"performance/{who}_busy_share"] for s in range(2, 7)] for who in BOTH] for found in rows]
    least = [[min(of_steps) for of_steps in of_run] for of_run in shares]
    assert all(0 <= share <= 1 for shares in least for share in shares)
    assert least[1][0] < least[1][1] and least[2][0] > least[2][1]  # slow engines, slow training
    synchronous = Setting()
    synchronous.run()
    assert prompts_by_step(first) == prompts_by_step(synchronous)
    errors = [rows[0].rows[step]["train/token_mult_prob_error"] for step in range(3, 7)]
    assert min(errors) > 1.005  # the engine's weights are older than the policy's


@pytest.mark.parametrize("waits", ["validation", "checkpoint"])
def test_training_is_not_busy_while_a_validation_or_a_checkpoint_waits_for_rollouts(waits, tmp_path):
    setting = ahead(1, before=lambda request: time.sleep(0.05 * (max(request.sample_ids) > 0)))  # validations are fast
    folder = CheckpointFolder(tmp_path, None, higher_is_better=True, keep_top_k=None)
    schedule = replace(UNVALIDATED, **{"val_period" if waits == "validation" else "save_period": 1})
    _, outputs, _ = setting.run(schedule, folder)
    training, generation = (
        min(outputs.rows[step][f"performance/{who}_busy_share"] for step in range(3, 7)) for who in BOTH
    )
    assert training < generation


@pytest.mark.parametrize("slower", [{"slow_s": 0.03}, {"fills": True}], ids=str)
def test_more_steps_ahead_stay_within_the_limit_and_use_each_prompt_once(slower):
    setting = ahead(3, **slower)
    _, outputs, _ = setting.run(replace(SCHEDULE, val_period=0, val_at_start=False))
    ages = [outputs.rows[step][AGE] for step in range(1, 7)]
    assert all(age <= min(3, step) for step, age in enumerate(ages))
    if "fills" in slower:
        assert ages == [0, 1, 2, 3, 3, 3]
        ready = [outputs.rows[step]["performance/steps_sampled_ahead"] for step in range(1, 7)]
        assert ready[-3:] == [2, 1, 0]
    synchronous = Setting()
    synchronous.run()
    assert prompts_by_step(setting) == prompts_by_step(synchronous)


def test_the_next_step_is_sampled_while_a_step_trains():
    sampled = {step: threading.Event() for step in range(1, 8)}
    setting = ahead(1, before=lambda request: sampled[request.step].set())
    train, steps = setting.policy.train, iter(range(1, 7))

    def waiting_train(*args, **kwargs):
        step = next(steps)
        if step < 6:
            assert sampled[step + 1].wait(LIMIT_S)
        return train(*args, **kwargs)

    setting.policy.train = waiting_train
    _, outputs, _ = setting.run(UNVALIDATED)
    assert not sampled[7].is_set()  # the run has six steps
    timings = {"timing/train/wait_for_rollouts", "timing/rollouts/sampling", "timing/rollouts/waiting"}
    assert timings <= outputs.rows[1].keys()


def test_a_step_behind_a_validation_trains_while_the_next_is_sampled():
    samples, trains, trained_meanwhile = threading.Event(), threading.Event(), []

    def before(request):
        if request.step == 2:
            samples.set()
            trained_meanwhile.append(trains.wait(5))

    setting = ahead(1, before=before)
    train = setting.policy.train
    setting.policy.train = lambda *args, **kwargs: trains.set() or train(*args, **kwargs)
    setting.grpo.validate(0)
    assert samples.wait(LIMIT_S)
    setting.grpo.step(1, Timer())
    setting.grpo.shutdown()
    assert trained_meanwhile == [True]


def test_no_prompts_are_drawn_after_the_last_epoch():
    setting = ahead(4, num_epochs=1)
    _, _, run = setting.run(replace(SCHEDULE, max_num_epochs=1, val_period=0, val_at_start=False, val_at_end=False))
    assert (run.state.step, run.state.position.epoch) == (2, 1)
    assert sorted(prompts_by_step(setting)) == [1, 2]


class Broken:
    """Judges like `exact_match`, but raises once it has judged so many times."""

    def __init__(self, times):
        self.times = times

    def judge_all(self, cases):
        self.times -= 1
        if self.times < 0:
            raise RewardError("the reward is broken")
        return EXACT_MATCH.judge_all(cases)

    def shutdown(self):
        pass


@pytest.mark.parametrize("arguments", [{"reward": Broken(3)}, {"before": dies(4, DEAD)}], ids=["reward", "engine"])
def test_a_failure_is_raised_by_the_step_that_needs_the_rollouts(arguments, tmp_path):
    folder = CheckpointFolder(tmp_path, None, higher_is_better=True, keep_top_k=9)
    setting = ahead(2, train_s=0.05, **arguments)
    with pytest.raises((RewardError, GenerationError), match=r"broken|died"):
        setting.run(replace(SCHEDULE, save_period=1, val_period=0, val_at_start=False), folder)
    assert setting.policy.calls.count("train") == 3
    assert RunState.read(folder.newest_first()[0]).step == 3
    setting.grpo.shutdown()


@pytest.mark.parametrize("dies_at", [5, 99])
def test_a_checkpoint_says_that_it_lacks_rollouts_of_the_next_step(dies_at, tmp_path, caplog):
    setting = ahead(1, before=dies(dies_at, DEAD))
    folder = CheckpointFolder(tmp_path, None, higher_is_better=True, keep_top_k=9)
    with pytest.raises(GenerationError) if dies_at == 5 else nullcontext():
        setting.run(replace(UNVALIDATED, save_period=2), folder)
    steps = {path.parent.name for path in tmp_path.glob(f"step_*/{rollout_queue.ROLLOUTS_FILE}")}
    assert steps == ({"step_2"} if dies_at == 5 else {"step_2", "step_4"})
    assert RunState.read(folder.newest_first()[0]).step == (4 if dies_at == 5 else 6)
    assert [record.levelname for record in caplog.records if "newer weights" in record.message] == (
        ["WARNING"] if dies_at == 5 else []
    )


@pytest.mark.parametrize("next_use", [lambda grpo: grpo.step(2, Timer()), lambda grpo: grpo.validate(1)])
def test_engines_that_have_failed_get_no_weights(next_use):
    setting = ahead(1, before=dies(2, DEAD))
    setting.grpo.step(1, Timer())
    with pytest.raises(GenerationError):  # a broadcast to a dead engine would wait for it
        within_limit(next_use, setting.grpo)
    assert setting.policy.calls.count("send_weights") == 1


def test_sampling_that_does_not_end_is_reported(monkeypatch, caplog):
    ended = threading.Event()
    setting = ahead(1, before=lambda request: request.step == 2 and ended.wait(LIMIT_S))
    setting.grpo.step(1, Timer())
    monkeypatch.setattr(rollout_queue, "_CLOSE_S", 0.01)
    setting.grpo.shutdown()
    ended.set()
    assert "has not ended within 0.01 s" in caplog.text


def test_a_run_ends_while_an_engine_generates():
    ended = threading.Event()

    def hangs(request):
        if request.step == 2:
            ended.wait()
            raise GenerationError("generate", RuntimeError("the actor was ended"), "")

    setting = ahead(1, before=hangs)
    setting.generation.shutdown = ended.set
    setting.grpo.step(1, Timer())
    setting.grpo.shutdown()
    assert not setting.grpo._sample._thread.is_alive()


def test_dynamic_sampling_that_finds_too_few_prompts_ends_the_run():
    nothing_new = replace(HARD["settings"], dynamic_sampling_max_gen_batches=1)
    same = Reward("same", lambda response, answer: 1.0)
    setting = ahead(1, **HARD | {"settings": nothing_new, "reward": same})
    with pytest.raises(DataError, match="2 generation batches of step 1 did not give"):
        setting.run()


def within_limit(function, *arguments):
    """Calls a function in a thread, so that a deadlock fails the test."""
    with_result = ThreadPoolExecutor(1)
    try:
        return with_result.submit(function, *arguments).result(LIMIT_S)
    finally:
        with_result.shutdown(wait=False)


class Watched(threading.Condition):
    """Says when the loop, which waits in a thread of this name, waits for the queue."""

    def __init__(self):
        super().__init__()
        self.waits = threading.Event()

    def wait_for(self, predicate, timeout=None):
        if threading.current_thread().name != "rollouts" and not predicate():
            self.waits.set()
        return super().wait_for(predicate, timeout)


def test_a_validation_behind_the_last_epoch_does_not_wait_for_rollouts_that_will_not_come(monkeypatch):
    setting = ahead(1, num_epochs=1)
    setting.grpo._sample._changed = changed = Watched()
    times, validates = iter(range(1, 9)), threading.Event()

    def late():  # after two steps the thread finds the epoch done only once the validation waits
        if threading.current_thread().name == "rollouts" and next(times) == 5:
            changed.waits.clear()
            validates.set()
            changed.waits.wait(LIMIT_S)
        return time.monotonic()

    monkeypatch.setattr(rollout_queue, "time", SimpleNamespace(perf_counter=late))
    validate = setting.grpo.validate
    setting.grpo.validate = lambda step: validates.wait(LIMIT_S) and validate(step)
    schedule = replace(SCHEDULE, max_num_epochs=1, val_period=0, val_at_start=False)
    _, outputs, _ = within_limit(setting.run, schedule)
    assert "validation/accuracy" in outputs.rows[2]
    setting.grpo.shutdown()


class Panic(BaseException):
    """As pyo3 raises for a panic in Rust."""


def test_what_is_no_exception_ends_the_run_too():
    with pytest.raises(RuntimeError, match=r"Panic\('in the tokenizer'\)"):
        within_limit(ahead(1, before=dies(2, Panic("in the tokenizer"))).run)


def pooled(job_of):
    return PooledReward(JudgePool([sys.executable, "-c", JUDGE], 1, 60.0, os.environ), job_of)


def test_answers_of_a_later_batch_are_as_old_as_the_weights_in_flight_before_it():
    """Step 2 has two generation batches; the weights after step 1 come while the first one's answers are judged."""
    steps, tokens = [], []
    is_first_done, may_go_on = threading.Event(), threading.Event()

    def judge(response, answer):
        if steps[-1] == 2:
            is_first_done.set()
            assert may_go_on.wait(LIMIT_S)
        return float(sum(map(ord, response)))

    halves = replace(SETTINGS, num_prompts_per_step=4, use_dynamic_sampling=True, batch_multiplier=0.5)
    engine = InFlight(before=lambda request: steps.append(request.step))
    arguments = {"settings": halves, "reward": Reward("graded", judge), "train_global": 32, "train_micro": 32}
    setting = Setting(max_age=1, in_flight=True, generation=engine, **arguments)
    queue = setting.grpo._sample
    OPEN.append(queue)
    setting.grpo.step(1, Timer())
    assert is_first_done.wait(LIMIT_S)
    train = setting.policy.train

    def keeping_train(batch, *args, **kwargs):
        tokens.extend(half.sum() for half in batch["token_mask"].chunk(2))
        return train(batch, *args, **kwargs)

    setting.policy.train = keeping_train
    with queue.updating_weights(1, Timer()):
        setting.grpo._weights.refresh()
    may_go_on.set()
    metrics = setting.grpo.step(2, Timer())
    assert metrics["train/num_generation_batches"] == 2
    assert metrics[AGE] == pytest.approx(float(tokens[0] / sum(tokens)))


def test_processes_of_rewards_outlive_the_last_rollouts():
    reward = pooled(lambda case: (str(float(case.response == case.answer)), ""))
    setting = ahead(1, reward=reward, last_step=1)
    setting.grpo.step(1, Timer())
    (worker,) = reward.pool._workers
    setting.grpo._sample._thread.join(0.3)  # where it ends, the kernel ends those that it has started
    setting.grpo.validate(1)
    assert reward.pool._workers == [worker] and worker._process.poll() is None
    setting.grpo.shutdown()
    assert not setting.grpo._sample._thread.is_alive()


@pytest.mark.parametrize("end", ["shutdown", "stop"])
def test_a_run_ends_while_a_reward_hangs(end):
    num_jobs, hangs = iter(range(10**6)), threading.Event()

    def job_of(case):
        if next(num_jobs) < 40:
            return "1", ""
        hangs.set()
        return "hang", ""

    setting = ahead(1, reward=(reward := pooled(job_of)))
    setting.grpo.step(1, Timer())
    assert hangs.wait(LIMIT_S)
    (worker,) = reward.pool._workers
    thread = setting.grpo._sample._thread
    within_limit(getattr(setting.grpo, end))
    thread.join(LIMIT_S)
    assert not thread.is_alive() and reward.pool._workers == [] and worker._process.poll() is not None
    setting.grpo.shutdown()  # a second one does nothing
