"""Computes the math reward, by math-verify or by DAPO's rules, in processes with a time limit for each answer."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import nemo_offload_rl
from nemo_offload_rl.environments import math_worker
from nemo_offload_rl.environments.errors import RewardError
from nemo_offload_rl.environments.judge_pool import JudgePool
from nemo_offload_rl.environments.rewards import Case, Judgements

logger = logging.getLogger(__name__)

_SHOWN_REASONS = 3


class MathReward:
    """Judges responses against known answers; a response that cannot be judged gets reward 0 and is counted.

    Args:
        pool: the pool of worker processes.
    """

    def __init__(self, pool: JudgePool) -> None:
        self._pool = pool

    def judge_all(self, cases: Sequence[Case]) -> Judgements:
        """Judges all cases and warns of those that could not be judged; see ``rewards.Judge``."""
        verdicts = self._pool.judge([(case.response, case.answer) for case in cases])
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
        self._pool.shutdown()


def make_math_reward(implementation: str, num_workers: int, time_limit_s: float) -> MathReward:
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
    return MathReward(JudgePool(command, num_workers, time_limit_s, environment))
