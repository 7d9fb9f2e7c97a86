"""Profiles the steps that a recipe's ``logger.profile`` names: the driver's phases, and what the ranks do."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from nemo_offload_rl.config.schema.run import ProfileConfig
from nemo_offload_rl.metrics.timer import ProfileOptions, Recording, Timer
from nemo_offload_rl.run.algorithm import Algorithm
from nemo_offload_rl.run.train_loop import no_profile

logger = logging.getLogger(__name__)


def step_profile(
    section: ProfileConfig | None, folder: Path, algorithm: Algorithm, steps: range
) -> Callable[[int, Timer], AbstractContextManager[None]]:
    """Returns the ``profile`` of ``train_loop.Run``.

    Args:
        section: the recipe's ``logger.profile``, resolved for the machine.
        folder: where the files go.
        algorithm: the algorithm whose steps are recorded.
        steps: the steps that the run may do; logs a warning if none of them is to be recorded.
    """
    if section is None:
        return no_profile
    first, last = section["steps"]
    if not any(first <= step <= last for step in steps):
        logger.warning(
            "logger.profile records nothing: its steps are %d to %d, but the run begins with step %d and ends by step "
            "%d.",
            first,
            last,
            steps.start,
            steps.stop - 1,
        )
    return _StepProfile(ProfileOptions(**section), folder, algorithm)


class _StepProfile:
    """Records chosen steps; see ``metrics.timer``.

    Args:
        options: what to record.
        folder: where the files go.
        algorithm: its policy's ranks are recorded.
    """

    def __init__(self, options: ProfileOptions, folder: Path, algorithm: Algorithm) -> None:
        self._options = options
        self._folder = folder.absolute()  # ranks may have another working directory
        self._algorithm = algorithm

    @contextmanager
    def __call__(self, step: int, timer: Timer) -> Iterator[None]:
        """Records a step inside the `with` block, if it is one of those chosen.

        Args:
            step: the step, from 1.
            timer: its phases become ranges of the driver's recording.
        """
        first, last = self._options.steps
        if not first <= step <= last:
            yield
            return
        with self._algorithm.profiled(self._options, self._folder / f"step_{step}"):
            driver = Recording(
                self._folder / f"step_{step}_driver", trace=self._options.trace, memory=False, nvtx=self._options.nvtx
            )
            with timer.within(driver.range):
                yield
            driver.stop()
