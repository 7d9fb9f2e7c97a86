"""Tests the judging processes: a job that hangs or dies loses its own reward, and nothing else."""

import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.waiting import wait_until

from nemo_offload_rl.environments.judge_pool import JudgePool, Verdict
from nemo_offload_rl.environments.rewards import RewardError

# Judges by what the response asks for: a number, to hang, to die, to raise, or the number of its process.
JUDGE = """
import os, signal, time
from nemo_offload_rl.environments.math_worker import serve

def judge(response, answer):
    print("noise on standard output")
    if response == "hang":
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGALRM})
        time.sleep(600)
    if response == "die":
        os.kill(os.getpid(), signal.SIGSEGV)
    if response == "exit":
        os._exit(0)
    if response == "grow":
        return len(bytearray(64 * 2**30))
    return os.getpid() if response == "pid" else float(response)

serve(lambda: judge)
"""


@pytest.fixture
def make_pool():
    pools = []

    def make(num_workers=2, time_limit_s=30.0, code=JUDGE, **options):
        pools.append(JudgePool([sys.executable, "-c", code], num_workers, time_limit_s, os.environ, **options))
        return pools[-1]

    yield make
    for pool in pools:
        pool.shutdown()


def pids_of(pool):
    return {int(verdict.reward) for verdict in pool.judge([("pid", "")] * 8)}


def test_every_answer_gets_its_own_reward_whoever_judges_it(make_pool):
    pool = make_pool(num_workers=3)
    for count in (0, 1, 2, 50):
        assert pool.judge([(str(n), "") for n in range(count)]) == [Verdict(float(n)) for n in range(count)]
    long = "0" * 1_000_000 + "7"
    assert pool.judge([(long, long)] * 4) == [Verdict(7.0)] * 4


def test_one_that_hangs_costs_its_reward_alone(make_pool):
    pool = make_pool(time_limit_s=1.0)
    start = time.monotonic()
    verdicts = pool.judge([("1", ""), ("hang", ""), *[("2", "")] * 20])
    assert time.monotonic() - start < 10
    assert verdicts == [Verdict(1.0), Verdict(0.0, "took longer than 1 s"), *[Verdict(2.0)] * 20]
    assert pool.judge([("3", "")] * 4) == [Verdict(3.0)] * 4


@pytest.mark.parametrize(
    ("how", "failure"),
    [
        ("die", "ended the process that judged it"),
        ("exit", "ended the process that judged it"),
        ("grow", "MemoryError: "),
        ("no number", "ValueError: could not convert string to float: 'no number'"),
    ],
)
def test_one_that_kills_its_process_takes_all_memory_or_raises_costs_its_reward_alone(how, failure, make_pool):
    pool = make_pool(num_workers=1)
    before = pids_of(pool)
    failed = Verdict(0.0, failure)
    assert pool.judge([("1", ""), (how, ""), ("2", ""), (how, "")]) == [Verdict(1.0), failed, Verdict(2.0), failed]
    assert (pids_of(pool) == before) == (how not in ("die", "exit"))


def test_a_process_that_died_between_two_calls_costs_nothing(make_pool):
    pool = make_pool(num_workers=2)
    for pid in pids_of(pool):
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    verdicts = pool.judge([(str(n), "") for n in range(6)])
    assert [verdict.reward for verdict in verdicts if verdict.failure is None] != []
    assert pool.judge([("1", "")] * 4) == [Verdict(1.0)] * 4


def test_a_process_that_cannot_start_ends_the_run_with_its_last_words(make_pool):
    with pytest.raises(RewardError, match=r"did not start: ModuleNotFoundError: No module named 'no_such_module'$"):
        make_pool(code="import no_such_module").judge([("1", "")])
    with pytest.raises(RewardError, match=r"did not start: it printed nothing and ended with exit status -?\d+$"):
        make_pool(code="").judge([("1", "")])
    with pytest.raises(RewardError, match=r"did not start: it took longer than 0\.2 s$"):
        make_pool(code="import time; time.sleep(60)", start_limit_s=0.2).judge([("1", "")])


def test_ctrl_c_in_a_judge_that_hangs_ends_its_process_and_those_that_it_has_started(make_pool, tmp_path):
    code = f"""
import os, pathlib, signal, subprocess, time
from nemo_offload_rl.environments.math_worker import serve

def judge(response, answer):
    child = subprocess.Popen(["sleep", "600"])
    pathlib.Path({str(tmp_path / "pids")!r}).write_text(f"{{os.getpid()}} {{child.pid}}")
    os.kill(os.getppid(), signal.SIGINT)
    time.sleep(600)

serve(lambda: judge)
"""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            make_pool(num_workers=1, code=code).judge([("1", "")])
    finally:
        signal.signal(signal.SIGINT, before)
    processes = [Path(f"/proc/{pid}/exe") for pid in (tmp_path / "pids").read_text().split()]
    wait_until(lambda: not any(exe.exists() for exe in processes))  # once the kernel gets to it


def test_another_thread_ends_a_pool_that_judges(make_pool):
    pool, given = make_pool(num_workers=3), threading.Event()
    pids_of(pool)
    jobs = [_Job(given.set) for _ in range(20)]
    with ThreadPoolExecutor(1) as judging:
        judged = judging.submit(pool.judge, jobs)
        assert given.wait(20)
        pids = [worker._process.pid for worker in pool._workers]
        pool.shutdown()
        with pytest.raises(RewardError, match="have been ended"):
            judged.result(20)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    with pytest.raises(RewardError, match="have been ended"):  # by a thread that does not know yet
        pool.judge([("1", "")])


class _Job(list):
    """Hangs; says when it is sent to a process."""

    def __init__(self, on_sent):
        super().__init__(["hang", ""])
        self._on_sent = on_sent

    def __iter__(self):
        self._on_sent()
        return super().__iter__()
