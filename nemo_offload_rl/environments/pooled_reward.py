"""Computes rewards in processes with a time limit for each answer."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nemo_offload_rl.environments.judge_pool import JudgePool
from nemo_offload_rl.environments.rewards import Case, Judgements

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
