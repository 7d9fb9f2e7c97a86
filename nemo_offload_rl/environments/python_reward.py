"""Computes rewards with a user's Python function, in processes with a time limit for each answer."""

from __future__ import annotations

import importlib
import os
import sys

from nemo_offload_rl.environments.errors import RewardError
from nemo_offload_rl.environments.judge_pool import JudgePool
from nemo_offload_rl.environments.math_worker import serve
from nemo_offload_rl.environments.pooled_reward import PooledReward
from nemo_offload_rl.environments.rewards import Reward


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
    pool = JudgePool(command, num_workers, time_limit_s, environment, shows_errors=True)
    return PooledReward(pool, lambda case: (case.prompt, case.response, case.answer))


def serve_function(path: str) -> None:
    """Judges jobs of a prompt, a response and an answer with the function; see ``math_worker.serve``."""
    serve(lambda: import_reward(path).judge, max_memory_bytes=None, silent=False)


def import_reward(path: str) -> Reward:
    """Imports a function, which takes a response and the known answer, and returns it as a reward.

    Raises:
        RewardError: it cannot be imported.
    """
    module_name, _, function_name = path.partition(":")
    if not module_name or not function_name:
        raise RewardError(f"env.NAME.reward_function must be 'package.module:function', found {path!r}.")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a user's module may raise anything
        reason = str(error) if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
        raise RewardError(f"env.NAME.reward_function: {module_name!r} cannot be imported: {reason}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise RewardError(f"env.NAME.reward_function: {module_name!r} has no function {function_name!r}.")
    return Reward(f"{module_name}:{function_name}", function)
