"""Judges answers in a pool of processes with a time limit per answer; one that hangs or dies fails only its answer."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from nemo_offload_rl.environments.math_worker import READY
from nemo_offload_rl.environments.rewards import RewardError

_START_LIMIT_S = 120.0  # imports sympy, on a machine that may be busy
_EXIT_LIMIT_S = 10.0  # for the traceback of a process that has closed its output
_READ_BYTES = 65536
_LOOK_PERIOD_S = 0.1  # within which `judge` sees a shutdown by another thread


@dataclass(frozen=True)
class Verdict:
    """Holds the reward that a process of the pool gave an answer, or the reason why it gave none.

    Attributes:
        reward: the answer's reward; 0 if it could not be judged.
        failure: why the answer could not be judged; None if it was judged.
    """

    reward: float
    failure: str | None = None


class JudgePool:
    """Judges answers in worker processes, which are started at the first call.

    Args:
        command: the command of a worker process, with the protocol of ``math_worker``.
        num_workers: number of worker processes.
        time_limit_s: time limit for one answer, in seconds.
        environment: the processes' environment variables.
        shows_errors: whether the processes' standard error is this process's; otherwise it is kept until they have
            started, for the error if they do not.
        start_limit_s: time limit for the start of a process, in seconds.
    """

    def __init__(
        self,
        command: Sequence[str],
        num_workers: int,
        time_limit_s: float,
        environment: Mapping[str, str],
        *,
        shows_errors: bool = False,
        start_limit_s: float = _START_LIMIT_S,
    ) -> None:
        self._command = command
        self._num_workers = num_workers
        self._time_limit_s = time_limit_s
        self._environment = environment
        self._shows_errors = shows_errors
        self._start_limit_s = start_limit_s
        self._workers: list[_Worker] = []
        self._judging = threading.Lock()
        self._is_shut_down = False

    def judge(self, jobs: Sequence[Sequence[str]]) -> list[Verdict]:
        """Judges jobs, each the texts of an answer, such as the response and the known answer.

        Raises:
            RewardError: a process does not start, its judge raises this, or another thread shuts the pool down; the
                processes have been ended.
        """
        with self._judging:
            try:
                return self._judge(jobs)
            except BaseException:  # Ctrl-C, too: a process dies with the driver, but not those that it has started
                self._end_workers()
                raise

    def _judge(self, jobs: Sequence[Sequence[str]]) -> list[Verdict]:
        verdicts: dict[int, Verdict] = {}
        waiting = deque(range(len(jobs)))
        while len(verdicts) < len(jobs):
            if self._is_shut_down:
                raise RewardError("The processes that judge answers have been ended.")
            while len(self._workers) < self._num_workers:
                self._workers.append(self._new_worker())
            for index, worker in enumerate(self._workers):
                if worker.is_idle and waiting:
                    number = waiting.popleft()
                    if not worker.give(number, jobs[number], self._time_limit_s):  # it died in between
                        waiting.appendleft(number)
                        self._replace(index)
            for worker in self._wait():
                self._hear(worker, verdicts)
        return [verdicts[number] for number in range(len(jobs))]

    def shutdown(self) -> None:
        """Ends the processes for good; a call of `judge` in another thread raises its error first."""
        self._is_shut_down = True
        with self._judging:
            self._end_workers()

    def _end_workers(self) -> None:
        while self._workers:
            self._workers.pop().end()

    def _wait(self) -> list[_Worker]:
        """Waits for, and returns, the workers that have written output, have ended, or have run out of time.

        Returns none after `_LOOK_PERIOD_S`.
        """
        busy = [worker for worker in self._workers if not worker.is_idle]
        with selectors.DefaultSelector() as selector:
            for worker in busy:
                selector.register(worker.output, selectors.EVENT_READ, worker)
            first = min(worker.deadline for worker in busy)
            wait_s = min(max(first - time.monotonic(), 0), _LOOK_PERIOD_S)
            heard = [key.data for key, _ in selector.select(wait_s)]
        now = time.monotonic()
        return heard or [worker for worker in busy if worker.deadline <= now]

    def _hear(self, worker: _Worker, verdicts: dict[int, Verdict]) -> None:
        said = worker.read() if worker.deadline > time.monotonic() or worker.has_output() else None
        if said == b"":  # a part of a line
            return
        if not worker.is_ready:
            if said != READY:
                raise RewardError(f"A process that judges answers did not start: {self._why_not_started(worker, said)}")
            worker.is_ready = True
            return
        number = worker.job
        assert number is not None, "only a worker with a job is waited for"
        if said is None:
            is_late = worker.deadline <= time.monotonic()
            failure = f"took longer than {self._time_limit_s:g} s" if is_late else "ended the process that judged it"
            verdicts[number] = Verdict(0.0, failure)
            self._replace(self._workers.index(worker))
            return
        reply = json.loads(said)
        if "refused" in reply:
            raise RewardError(reply["refused"])
        verdicts[number] = Verdict(0.0, reply["error"]) if "error" in reply else Verdict(float(reply["reward"]))
        worker.job = None

    def _why_not_started(self, worker: _Worker, said: bytes | None) -> str:
        if said is not None:
            return str(json.loads(said)["refused"])
        if worker.deadline <= time.monotonic():
            return f"it took longer than {self._start_limit_s:g} s"
        status = worker.exit_status()
        if self._shows_errors:
            return f"it ended with exit status {status}; what it printed is above"
        return worker.last_words() or f"it printed nothing and ended with exit status {status}"

    def _replace(self, index: int) -> None:
        self._workers[index].end()
        self._workers[index] = self._new_worker()

    def _new_worker(self) -> _Worker:
        return _Worker(self._command, self._environment, self._shows_errors, self._start_limit_s)


class _Worker:
    """Holds a worker process and its current job.

    Attributes:
        is_ready: whether the process has started and takes jobs.
        job: the number of its current job; None without a job.
        deadline: time by which it has to write output, in seconds of the monotonic clock.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], shows_errors: bool, start_limit_s: float
    ) -> None:
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if shows_errors else self._complaints,
            env=environment,
            start_new_session=True,  # Ctrl-C is for the driver, which finishes its step
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        self._heard = b""
        self.is_ready = False
        self.job: int | None = None
        self.deadline = time.monotonic() + start_limit_s

    @property
    def is_idle(self) -> bool:
        """Whether the process can take a job."""
        return self.is_ready and self.job is None

    @property
    def output(self) -> int:
        """The file descriptor of the process's output."""
        return self._output.fileno()

    def give(self, number: int, job: Sequence[str], time_limit_s: float) -> bool:
        """Sends the process a job; returns False if the process has ended."""
        try:
            self._input.write(json.dumps(job).encode() + b"\n")
            self._input.flush()
        except BrokenPipeError:
            return False
        self.job, self.deadline = number, time.monotonic() + time_limit_s
        return True

    def has_output(self) -> bool:
        """Returns whether there is output to read, without waiting."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.output, selectors.EVENT_READ)
            return bool(selector.select(0))

    def read(self) -> bytes | None:
        """Returns the next line of output; empty if the line is not complete yet, None if the process has ended."""
        read = os.read(self.output, _READ_BYTES)
        if not read:
            return None
        self._heard += read
        line, end, rest = self._heard.partition(b"\n")
        if not end:
            return b""
        self._heard = rest
        return line + end

    def exit_status(self) -> int:
        """Returns the exit status of the process, which is ending; its own children are killed."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_LIMIT_S)
        self._kill()
        return self._process.returncode

    def last_words(self) -> str:
        """Returns the last line that the process wrote to standard error; empty if there is none."""
        self._complaints.seek(0)
        lines = self._complaints.read().decode(errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), "")[-500:]

    def end(self) -> None:
        """Kills the process and closes its files."""
        self._kill()
        for file in (self._output, self._complaints):
            file.close()
        with suppress(BrokenPipeError):  # close() flushes input that the process has not read
            self._input.close()

    def _kill(self) -> None:
        """Kills the process and those that it has started; its session is its process group."""
        if self._process.returncode is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
