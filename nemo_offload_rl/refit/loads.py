"""Fills buckets and has receivers load them, and tracks loads so that the sender can continue meanwhile."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import ray
import torch
from ray.exceptions import ActorDiedError, ActorUnavailableError, OutOfMemoryError, RayError, RayTaskError

from nemo_offload_rl.memory.shared_buffer import SharedBufferError
from nemo_offload_rl.refit.checksum import tensor_checksum
from nemo_offload_rl.refit.interface import Receiver, WeightBucket
from nemo_offload_rl.refit.plan import NamedTensor, TensorSpec

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
        raise EngineLostError(f"The refit has lost {asked}: its process or its node has ended.\n{error}") from None
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


@dataclass(frozen=True)
class OpenBucket:
    """Holds a bucket while its memory is allocated.

    Attributes:
        slots: Returns for each tensor the view of the bucket's buffer that it is copied into. A view that was kept, in
            the frames of an error, would keep host memory mapped.
        specs: The tensors.
        message: What receivers get.
    """

    slots: Callable[[], Sequence[torch.Tensor]]
    specs: Sequence[TensorSpec]
    message: WeightBucket


class Filler(Protocol):
    """Fills the buckets of one refit."""

    def fill(self, number: int, slots: Sequence[torch.Tensor]) -> None:
        """Starts to fill a bucket, on the current stream; buckets are filled in order.

        Args:
            number: The bucket's number, from 0.
            slots: Views of the bucket's buffer, one for each tensor.
        """
        ...

    def finish(self) -> None:
        """Ends the export after the last bucket."""
        ...


class ExportedTensors:
    """Copies an export's tensors into buckets, driven from Python (see `Filler`).

    Args:
        weights: Starts the export.
        verify: Whether to compute checksums.
    """

    def __init__(self, weights: Iterable[NamedTensor], *, verify: bool) -> None:
        self._weights = iter(weights)
        self._verify = verify
        self.checksums: dict[str, int] = {}
        """`tensor_checksum` of each tensor that was copied, by name; empty without `verify`."""
        self.verify_s = 0.0
        """Seconds that the checksums have taken."""

    def fill(self, number: int, slots: Sequence[torch.Tensor]) -> None:
        """Copies the next tensors of the export."""
        for slot, (name, tensor) in zip(slots, self._weights, strict=False):
            slot.copy_(tensor.detach(), non_blocking=True)
            if self._verify:
                start = time.perf_counter()
                self.checksums[name] = tensor_checksum(tensor)
                self.verify_s += time.perf_counter() - start

    def finish(self) -> None:
        """Exhausts the export, which checks at its end that there are no more tensors."""
        deque(self._weights, maxlen=0)


def send_buckets(
    buckets: Sequence[OpenBucket],
    num_buffers: int,
    receivers: Sequence[Receiver],
    filler: Filler,
    clock: Callable[[], float] = time.perf_counter,
    keep_memory: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Fills every bucket, and returns once all receivers have loaded all of them, also after an error.

    Args:
        buckets: In the order of the export.
        num_buffers: Number of buffers that the buckets alternate between.
        receivers: All of them get every bucket.
        filler: Fills the buckets.
        clock: Returns the time in seconds.
        keep_memory: Called after an error if a receiver may still read a bucket, whose memory must then stay.

    Returns:
        `export_s`, `load_s` and `first_kernel_to_loaded_s` (see `RefitSender.metrics`).

    Raises:
        EngineLostError: If an engine's process has ended.
        RuntimeError: If an engine has failed, for example because it cannot open a buffer.
        ValueError: If an engine has refused a weight.
    """
    export_s = 0.0
    loads = Loads(receivers, num_buffers)
    try:
        with loads.settled():  # a receiver may still have a buffer open after an error
            began = clock()
            for number, bucket in enumerate(buckets):
                loads.wait_for_room()
                start = clock()
                filler.fill(number, bucket.slots())
                if torch.cuda.is_available():
                    torch.cuda.current_stream().synchronize()  # the receiver's process reads the buffer next
                export_s += clock() - start
                loads.start(bucket.message, bucket.specs)
            filler.finish()
            loads.wait()
            first_kernel_to_loaded_s = clock() - began
    finally:
        if loads.may_be_read:
            keep_memory()
    return {"export_s": export_s, "load_s": loads.seconds, "first_kernel_to_loaded_s": first_kernel_to_loaded_s}
