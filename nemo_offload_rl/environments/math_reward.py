"""Computes the math reward, by math-verify or by DAPO's rules, in processes with a time limit for each answer."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import nemo_offload_rl
from nemo_offload_rl.environments import math_worker
from nemo_offload_rl.environments.errors import RewardError
from nemo_offload_rl.environments.judge_pool import JudgePool
from nemo_offload_rl.environments.pooled_reward import PooledReward


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
