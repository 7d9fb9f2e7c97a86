"""Counts the steps of a run that were skipped, up to the recipe's limit."""

import logging

from nemo_offload_rl.mcore.step import StepResult

logger = logging.getLogger(__name__)


class TooManySkippedStepsError(RuntimeError):
    """Says that more steps had a loss or gradient that is not finite than the recipe allows."""


class SkippedSteps:
    """Counts skipped steps.

    Args:
        limit: policy.max_skipped_steps.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._num_skipped = 0

    def count(self, result: StepResult) -> None:
        """Take notice of a step.

        Raises:
            TooManySkippedStepsError: it was skipped, and is one too many.
        """
        if not result.skipped:
            return
        self._num_skipped += 1
        logger.warning("step skipped: loss %s or a gradient is not finite (%d so far)", result.loss, self._num_skipped)
        if self._num_skipped > self._limit:
            raise TooManySkippedStepsError(
                f"The loss ({result.loss}) or a gradient was not finite in {self._num_skipped} steps of this run, more "
                f"than policy.max_skipped_steps {self._limit}; lower the learning rate or look at the data of the last "
                "steps."
            )
