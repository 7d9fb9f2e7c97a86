"""What engines are loading, so that the sender can go on meanwhile."""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, OutOfMemoryError, RayError, RayTaskError

from nemo_offload_rl.refit.interface import Receiver
from nemo_offload_rl.refit.plan import TensorSpec

_SETTLE_TIMEOUT_S = 60


class EngineLostError(RayError):
    """Says that an engine's process, or its node, has ended during a refit."""


@dataclass(frozen=True)
class EngineLoad:
    """Names a bucket that an engine has been asked to load, as messages do.

    Attributes:
        engine: The engine's name.
        tensors: What the bucket brings.
    """

    engine: str
    tensors: Sequence[TensorSpec]

    def __str__(self) -> str:
        if not self.tensors:
            return self.engine
        first, last = self.tensors[0].name, self.tensors[-1].name
        return f"{self.engine} with the weight{f' {first}' if first == last else f's {first} to {last}'}"


def answer_of(reference: Any, asked: object) -> Any:
    """Wait for an engine's answer.

    Args:
        reference: Of the call.
        asked: Names the engine, and what it was to do, in messages.

    Raises:
        EngineLostError: If the engine's process has ended; OutOfMemoryError where Ray has ended it for host memory.
        RuntimeError: If the engine has failed; ValueError where it has raised that.
    """
    try:
        return ray.get(reference)
    except OutOfMemoryError as error:
        raise OutOfMemoryError(f"The refit has lost {asked}: Ray has ended its process ({error}).") from None
    except (ActorDiedError, ActorUnavailableError) as error:
        raise EngineLostError(f"The refit has lost {asked}: its process or its node has ended ({error}).") from None
    except RayTaskError as error:
        kind = ValueError if isinstance(error.cause, ValueError) else RuntimeError
        raise kind(f"The refit has failed at {asked}: {type(error.cause).__name__}: {error.cause}") from error


class Loads:
    """Tracks the buckets of one refit that receivers are loading.

    Args:
        receivers: All of them get every bucket.
        limit: The most buckets that are under way.
    """

    def __init__(self, receivers: Sequence[Receiver], limit: int) -> None:
        self._receivers = receivers
        self._limit = limit
        self._under_way: deque[dict[Any, EngineLoad]] = deque()  # of each bucket its loads, by their references
        self.seconds = 0.0
        """Of all loads that have ended; of each bucket the slowest receiver's."""

    @contextmanager
    def settled(self) -> Iterator[None]:
        """At the end no receiver has a bucket open, whose memory may then go; an error inside does not change that."""
        try:
            yield
        finally:
            left = [reference for loads in self._under_way for reference in loads]
            if left:
                ray.wait(left, num_returns=len(left), timeout=_SETTLE_TIMEOUT_S)

    def wait_for_room(self) -> None:
        """Wait until one more bucket may be under way; raises what `wait` does."""
        while len(self._under_way) >= self._limit:
            self._wait_for_first()

    def start(self, bucket: Any, tensors: Sequence[TensorSpec] = ()) -> None:
        """Give a bucket to every receiver.

        Args:
            bucket: A `WeightBucket`, or a reference to one.
            tensors: What it brings, whose first and last name errors give.
        """
        self._under_way.append(
            {receiver.load_weights(bucket): EngineLoad(receiver.name, tensors) for receiver in self._receivers}
        )

    def wait(self) -> None:
        """Wait until all has been loaded.

        Raises:
            EngineLostError: If an engine's process has ended; see `answer_of` for all errors.
        """
        while self._under_way:
            self._wait_for_first()

    def _wait_for_first(self) -> None:
        self.seconds += max(answer_of(reference, load) for reference, load in self._under_way.popleft().items())
