"""Runs the comparison in a child process, which ends with its parent."""

import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import IO

import nemo_offload_rl
from nemo_offload_rl.config.schema.policy import PolicyConfig
from nemo_offload_rl.model_check.result import CheckResult

REQUEST_ON_STDIN = "--request-on-stdin"
TIMEOUT_S = 600.0
ENVIRONMENT = {
    "NVIDIA_TF32_OVERRIDE": "0",  # otherwise Transformer Engine multiplies float32 matrices in TF32
    "TORCHDYNAMO_DISABLE": "1",  # compiling megatron-core's small fusions takes longer than everything else
}


class ModelCheckError(ValueError):
    """Says that Megatron computes a model wrongly, or that Megatron or the check cannot compute it at all."""


class CheckTimeoutError(Exception):
    """Says that a check did not finish in time; its process has been killed."""


class CheckProcess:
    """Runs a comparison in a child process.

    The child reads the policy from its standard input, which stays open; the child ends when it is closed, so also if
    this process is killed.
    """

    def __init__(self, policy: PolicyConfig) -> None:
        """Starts the process.

        Args:
            policy: a recipe's policy section; all values must be JSON-serializable.
        """
        # Files, since a pipe that nothing reads could fill up, and stop the process; `close` closes them.
        self._output, self._errors = (
            tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
            for _ in range(2)
        )
        self._process = subprocess.Popen(
            [sys.executable, "-m", __package__, REQUEST_ON_STDIN],
            stdin=subprocess.PIPE,
            stdout=self._output,
            stderr=self._errors,
            env=_environment(),
            text=True,
            encoding="utf-8",
        )
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(policy) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:  # the process has already ended; `result` says why
            return

    def result(self, timeout_s: float = TIMEOUT_S) -> CheckResult:
        """Waits for the result.

        Raises:
            ModelCheckError: one of the libraries refuses the model, or the process failed.
            CheckTimeoutError: the check took longer; its process has been killed.
        """
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            self.close()
            raise CheckTimeoutError(f"it did not finish within {timeout_s:.0f} s") from error
        status = self._process.returncode
        printed, said = (_lines(file) for file in (self._output, self._errors))
        self.close()
        if status or not printed:
            last = said[-1] if said else "it printed nothing"
            raise ModelCheckError(f"The check of the model failed with status {status}: {last}")
        found = json.loads(printed[-1])  # libraries may have printed before
        if "error" in found:
            raise ModelCheckError(found["error"])
        return CheckResult.from_json(found)

    def close(self) -> None:
        """Ends the process if it is still running; safe to call twice."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._output, self._errors):
            if stream is not None:
                try:
                    stream.close()
                except BrokenPipeError:  # data that the process never read
                    continue


def _lines(file: IO[str]) -> list[str]:
    file.seek(0)
    return file.read().strip().splitlines()


def _environment() -> dict[str, str]:
    environment = os.environ | ENVIRONMENT
    root = str(Path(nemo_offload_rl.__file__).parents[1])
    if root not in sysconfig.get_paths().values():  # the package runs from a source folder
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    return environment
