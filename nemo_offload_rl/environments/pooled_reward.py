"""Computes rewards of mathematics or of a user's Python function in processes, with a time limit for each answer."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import nemo_offload_rl
from nemo_offload_rl.environments import math_worker
from nemo_offload_rl.environments.judge_pool import JudgePool
from nemo_offload_rl.environments.math_worker import serve
from nemo_offload_rl.environments.rewards import Case, Judgements, Reward, RewardError

logger = logging.getLogger(__name__)

_SHOWN_REASONS = 3


@dataclass(frozen=True)
class PooledReward:
    """Judges responses in processes; a response that cannot be judged gets reward 0 and is counted.

    Attributes:
        pool: the pool of worker processes.
        job_of: makes of a case the texts that a process judges.
    """

    pool: JudgePool
    job_of: Callable[[Case], Sequence[str]]

    def judge_all(self, cases: Sequence[Case]) -> Judgements:
        """Judges all cases and warns of those that could not be judged; see ``rewards.Judge``."""
        verdicts = self.pool.judge([self.job_of(case) for case in cases])
        failures = Counter(verdict.failure for verdict in verdicts if verdict.failure is not None)
        if failures:
            reasons = "; ".join(f"{count}: {reason}" for reason, count in failures.most_common(_SHOWN_REASONS))
            logger.warning(
                "%d of %d answers could not be judged, and got the reward 0 (%s).",
                failures.total(),
                len(cases),
                reasons,
            )
        return Judgements([verdict.reward for verdict in verdicts], failures.total())

    def shutdown(self) -> None:
        """Ends the processes."""
        self.pool.shutdown()


def make_math_reward(implementation: str, num_workers: int, time_limit_s: float) -> PooledReward:
    """Makes the reward that ``env.NAME.math_verify_impl`` names; its processes start with the first answers.

    Raises:
        RewardError: the implementation is not known, or math-verify is not installed.
    """
    if implementation not in math_worker.LOADERS:
        names = ", ".join(math_worker.LOADERS)
        raise RewardError(f"env.NAME.math_verify_impl must be one of {names}, found {implementation!r}.")
    if implementation == "hf_math_verify" and importlib.util.find_spec("math_verify") is None:
        raise RewardError(
            "env.NAME.math_verify_impl: hf_math_verify needs the package math-verify, which is not installed: run "
            "`make setup`."
        )
    package = str(Path(nemo_offload_rl.__file__).parents[1])
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    start = f"from {math_worker.__name__} import LOADERS, serve; serve(LOADERS[{implementation!r}])"
    command = [sys.executable, "-c", start]
    pool = JudgePool(command, num_workers, time_limit_s, environment)
    return PooledReward(pool, lambda case: (case.response, case.answer))


_IMPORT_LIMIT_S = 1800.0  # a module may load a model


def make_python_reward(path: str, num_workers: int, time_limit_s: float) -> PooledReward:
    """Makes the reward that ``env.NAME.reward_function`` names; its processes start with the first answers.

    The processes have this process's import path and environment. They write to its standard error.

    Args:
        path: ``package.module:function``, found on the Python path or in the folder that the run was started from.
        num_workers: number of processes; with one, all calls are made in the same process, one after the other.
        time_limit_s: time limit of one call, in seconds.

    Raises:
        RewardError: the function cannot be imported.
    """
    import_reward(path)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(folder or os.getcwd() for folder in sys.path)}
    # -P: the path begins as here, not with the current folder.
    command = [sys.executable, "-P", "-c", f"from {__name__} import serve_function; serve_function({path!r})"]
    pool = JudgePool(command, num_workers, time_limit_s, environment, shows_errors=True, start_limit_s=_IMPORT_LIMIT_S)
    return PooledReward(pool, lambda case: (case.prompt, case.response, case.answer))


def serve_function(path: str) -> None:
    """Judges jobs of a prompt, a response and an answer with the function; see ``math_worker.serve``."""
    serve(lambda: import_reward(path).judge, max_memory_bytes=None, silent=False)


_FOLDER_OF_MODULE = "start the run in the module's folder, or add that to PYTHONPATH"


def import_reward(path: str) -> Reward:
    """Imports a function, which takes a response and the known answer, and returns it as a reward.

    Raises:
        RewardError: it cannot be imported.
    """
    module_name, _, function_name = path.partition(":")
    if not module_name or not function_name:
        raise RewardError(f"env.NAME.reward_function must be 'package.module:function', found {path!r}.")
    if "/" in module_name or module_name.endswith(".py"):
        raise RewardError(
            f"env.NAME.reward_function is {path!r}, a file's path: write '{Path(module_name).stem}:{function_name}', "
            f"and {_FOLDER_OF_MODULE}."
        )
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a user's module may raise anything
        reason = str(error) if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
        if isinstance(error, ModuleNotFoundError) and error.name == module_name.partition(".")[0]:
            reason = f"{reason} ({_FOLDER_OF_MODULE})"
        raise RewardError(f"env.NAME.reward_function: {module_name!r} cannot be imported: {reason}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise RewardError(f"env.NAME.reward_function: {module_name!r} has no function {function_name!r}.")
    try:
        inspect.signature(function).bind("response", "answer")
    except TypeError as error:
        raise RewardError(
            f"env.NAME.reward_function: {path} must take the answer and the known answer, but its call raises: {error}."
        ) from error
    except ValueError:  # a builtin without a signature
        pass
    return Reward(f"{module_name}:{function_name}", function)
