"""Detects whether a step through the optimizers of a chain has ended in the middle."""

from collections.abc import Callable
from typing import Any

from nemo_offload_rl.residency.target import ResidencyError


class HalfUpdatedError(ResidencyError):
    """Raised when a step ended in the middle: some of the model and its state has been updated, and some has not."""


class ChainStep:
    """Tracks a step through the optimizers of a chain, which share a model.

    From the first update until the last optimizer is done, the model is half updated. An error is final then, even from
    an optimizer that has not updated anything itself.

    Args:
        num_optimizers: how many optimizers take part in each step.
    """

    def __init__(self, num_optimizers: int) -> None:
        self._num_optimizers = num_optimizers
        self._finished: set[object] = set()
        self._is_running = False
        self._has_updated = False
        self._ended: str | None = None

    def run(self, optimizer: object, step: Callable[[], Any], where: Callable[[], str]) -> Any:
        """Run one optimizer's part of the step.

        Args:
            optimizer: any hashable object that identifies it.
            step: makes its updates, and calls its hooks.
            where: returns how far it has come, for an error's message.

        Returns:
            The result of `step`.

        Raises:
            HalfUpdatedError: this step, or an earlier one, has ended in the middle.
        """
        if self._ended is not None or optimizer in self._finished:
            self.check()
        self._is_running = True
        try:  # not a generator-based context manager: its frame would keep the error, and so host memory
            return step()
        except BaseException as error:
            if not self._has_updated:
                raise
            self._ended = f"{where()}{self._of_chain()} ({type(error).__name__}: {error})"
            if not isinstance(error, Exception):
                raise
            raise HalfUpdatedError(self._message()) from error
        finally:
            self._is_running = False

    def begin_update(self) -> None:
        """Record that the running optimizer is about to update something."""
        self._has_updated = True

    def end_update(self, optimizer: object) -> None:
        """Record that an optimizer has made all its updates; the last one of the chain ends the step."""
        self._finished.add(optimizer)
        if len(self._finished) == self._num_optimizers:
            self._finished.clear()
            self._has_updated = False

    def check(self) -> None:
        """Check that no step has ended in the middle.

        Raises:
            HalfUpdatedError: one has.
        """
        if self._has_updated and not self._is_running:
            raise HalfUpdatedError(self._message())

    def _of_chain(self) -> str:
        if self._num_optimizers == 1:
            return ""
        return f" of optimizer {len(self._finished) + 1} of {self._num_optimizers}"

    def _message(self) -> str:
        ended = self._ended or f"after {len(self._finished)} of {self._num_optimizers} optimizers"
        return (
            f"The optimizer's streamed step stopped {ended}: the model and its optimizer state are half updated. "
            "This process cannot continue; restart from the newest checkpoint."
        )
