"""Tracks the buckets that engines are loading, so that the sender can continue meanwhile."""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, OutOfMemoryError, RayError, RayTaskError

from nemo_offload_rl.memory.shared_buffer import SharedBufferError
from nemo_offload_rl.refit.interface import Receiver
from nemo_offload_rl.refit.plan import TensorSpec

_SETTLE_TIMEOUT_S = 60


class EngineLostError(RayError):
    """Says that an engine's process, or its node, ended during a refit."""


@dataclass(frozen=True)
class EngineLoad:
    """Describes, for messages, a bucket that an engine was asked to load.

    Attributes:
        engine: The engine's name.
        tensors: The bucket's tensors.
    """

    engine: str
    tensors: Sequence[TensorSpec]

    def __str__(self) -> str:
        if not self.tensors:
            return self.engine
        first, last = self.tensors[0].name, self.tensors[-1].name
        return f"{self.engine} with the weight{f' {first}' if first == last else f's {first} to {last}'}"


def answer_of(reference: Any, asked: object) -> Any:
    """Waits for an engine's answer and returns it.

    Args:
        reference: Reference of the call.
        asked: Describes the engine and its task in messages.

    Raises:
        EngineLostError: If the engine's process has ended; OutOfMemoryError if Ray killed it for its host memory.
        RuntimeError: If the engine has failed; ValueError if the engine raised that.
    """
    try:
        return ray.get(reference)
    except OutOfMemoryError as error:
        raise OutOfMemoryError(f"The refit has lost {asked}: Ray has killed its process ({error}).") from None
    except (ActorDiedError, ActorUnavailableError) as error:
        raise EngineLostError(f"The refit has lost {asked}: its process or its node has ended ({error}).") from None
    except RayTaskError as error:
        kind = ValueError if isinstance(error.cause, ValueError) else RuntimeError
        raise kind(f"The refit has failed at {asked}: {type(error.cause).__name__}: {error.cause}") from error


def _may_still_read(answer: Any) -> bool:
    """Returns whether an engine that has answered may still have its bucket open.

    It closed the bucket if it has loaded it, or refused a weight or the memory itself; a process that has ended reads
    nothing. After any other error, such as one of its GPU, work on the bucket may be left there.
    """
    try:
        ray.get(answer)
    except (ActorDiedError, OutOfMemoryError):
        return False
    except RayTaskError as error:
        return not isinstance(error.cause, ValueError | SharedBufferError)
    except RayError:
        return True
    return False


class Loads:
    """Tracks the buckets of one refit that receivers are loading.

    Args:
        receivers: All of them get every bucket.
        limit: Largest number of buckets in flight.
    """

    def __init__(self, receivers: Sequence[Receiver], limit: int) -> None:
        self._receivers = receivers
        self._limit = limit
        self._under_way: deque[dict[Any, EngineLoad]] = deque()  # for each bucket, its loads by their references
        self.seconds = 0.0
        """Sum over finished buckets of the slowest receiver's seconds."""
        self.may_be_read = False
        """Whether a receiver may still have a bucket open after `settled`, so that its memory must not be freed."""

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Waits at the end until no receiver has a bucket open, so that the bucket's memory can be freed.

        It also waits after an error in the context, and then sets `may_be_read`.
        """
        try:
            yield
        finally:
            left = [reference for loads in self._under_way for reference in loads]
            self.may_be_read = bool(left)  # also if the wait is interrupted
            if left:
                done, pending = ray.wait(left, num_returns=len(left), timeout=_SETTLE_TIMEOUT_S)
                self.may_be_read = bool(pending) or any(_may_still_read(reference) for reference in done)

    def wait_for_room(self) -> None:
        """Waits until one more bucket may be in flight; raises the errors of `wait`."""
        while len(self._under_way) >= self._limit:
            self._wait_for_first()

    def start(self, bucket: Any, tensors: Sequence[TensorSpec] = ()) -> None:
        """Sends a bucket to every receiver.

        Args:
            bucket: A `WeightBucket`, or a reference to one.
            tensors: Its tensors; errors give the names of the first and the last.
        """
        self._under_way.append(
            {receiver.load_weights(bucket): EngineLoad(receiver.name, tensors) for receiver in self._receivers}
        )

    def wait(self) -> None:
        """Waits until all buckets are loaded.

        Raises:
            EngineLostError: If an engine's process has ended; see `answer_of` for other errors.
        """
        while self._under_way:
            self._wait_for_first()

    def _wait_for_first(self) -> None:
        self.seconds += max(answer_of(reference, load) for reference, load in self._under_way[0].items())
        self._under_way.popleft()  # not before: after an error, `settled` waits for the bucket's other receivers
