"""Counts the steps of a run that were skipped, up to the recipe's limit."""

import logging

from nemo_offload_rl.mcore.step import Skip, StepResult

logger = logging.getLogger(__name__)


class TooManySkippedStepsError(RuntimeError):
    """Says that more steps than the recipe allows had a loss or gradient that was not finite."""


class SkippedSteps:
    """Counts steps whose loss or gradient was not finite; other reasons to skip a step are logged only.

    Args:
        limit: policy.max_skipped_steps.

    Attributes:
        num_skipped: steps of the run that were skipped so far; set when a run resumes.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.num_skipped = 0

    def count(self, result: StepResult) -> None:
        """Count a step if it was skipped, and log why.

        Raises:
            TooManySkippedStepsError: it was skipped, and exceeds the limit.
        """
        if result.skipped is not Skip.NOT_FINITE:
            if result.skipped is not None:
                logger.warning("step skipped: %s (norm %g)", result.skipped.value, result.grad_norm)
            return
        self.num_skipped += 1
        logger.warning("step skipped: loss %s or a gradient is not finite (%d so far)", result.loss, self.num_skipped)
        if self.num_skipped > self._limit:
            raise TooManySkippedStepsError(
                f"The loss ({result.loss}) or a gradient was not finite in {self.num_skipped} steps of this run, more "
                f"than policy.max_skipped_steps {self._limit}; lower the learning rate or look at the data of the last "
                "steps."
            )
