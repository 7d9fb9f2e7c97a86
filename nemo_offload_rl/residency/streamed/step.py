"""Steps an optimizer whose state is on the host: chunks are copied in, updated and copied out, all overlapping."""

import contextlib
import copy
import dataclasses
import itertools
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nemo_offload_rl.memory.streams import Event, record_current_stream
from nemo_offload_rl.residency.flat_buffer import CorruptedTransferError
from nemo_offload_rl.residency.streamed.init_state import placeholder, state_or_sample
from nemo_offload_rl.residency.streamed.pieces import ParameterArrays, PieceStepper, placed_pieces
from nemo_offload_rl.residency.streamed.window import MASTER, NUM_SLOTS, Chunk, HostArrays, Slot, Window
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


class ChunkSums:
    """Keeps the checksums of chunks that are on the host."""

    def __init__(self) -> None:
        self._sums: dict[tuple[HostArrays, int], torch.Tensor] = {}

    def remember(self, arrays: HostArrays, chunk: Chunk, slot: Slot) -> None:
        """Record the checksum of a chunk that is about to leave the window."""
        self._sums[arrays, chunk.begin] = _checksum(arrays, chunk, slot)

    def compare(self, arrays: HostArrays, chunk: Chunk, slot: Slot) -> None:
        """Compare the checksum of a chunk that has come in with that of its last leaving, if any; waits for the GPU.

        Raises:
            CorruptedTransferError: they differ.
        """
        if (arrays, chunk.begin) in self._sums and not torch.equal(
            self._sums[arrays, chunk.begin], _checksum(arrays, chunk, slot)
        ):
            raise CorruptedTransferError(
                "The checksums of optimizer_state differ after it was copied to the host and back, in elements "
                f"{chunk.begin} to {chunk.end} of its arrays; training cannot continue: restart from the last "
                "checkpoint."
            )

    def clear(self) -> None:
        """Forget all checksums: the host memory is about to be written."""
        self._sums.clear()


def _checksum(arrays: HostArrays, chunk: Chunk, slot: Slot) -> torch.Tensor:
    """Sums the 8-byte words of each field of a chunk, int64 [fields] modulo 2**64, on the device."""
    layout, length = arrays.layout, chunk.end - chunk.begin
    fields = range(len(layout.fields))
    return torch.stack([slot.memory[layout.in_slot(field, 0, length)].view(torch.int64).sum() for field in fields])


@dataclasses.dataclass(eq=False)
class StepTransfer:
    """Measures the copies of one step, both ways; implements `residency.target.Move`.

    Attributes:
        nbytes: bytes that crossed the link, in both directions together.
        begin: the first copy's beginning.
        end: the last copy's end.
        filled: the end of the last copy into the window before the step.
        asked: the point at which the compute stream began the step.
        updated: the point at which the compute stream had made the last update.
    """

    nbytes: int
    begin: Event
    end: Event
    filled: Event
    asked: Event
    updated: Event

    is_queued = True
    has_failed = False

    def wait(self) -> None:
        """Does nothing: the next step's copies follow those of this step."""

    def wait_on_current_stream(self) -> None:
        """Makes later work of the current stream wait for all copies to the host."""
        self.end.wait_on_current_stream()

    def copy_seconds(self) -> float:
        """Returns the seconds from the first byte on the link to the last, less the wait of the full window."""
        self.end.wait()
        return self.end.seconds_since(self.begin) - max(0.0, self.asked.seconds_since(self.filled))

    def exposed_seconds(self) -> float:
        """Returns the seconds of the step on the compute stream; the last copies out overlap with later work."""
        self.updated.wait()
        return max(0.0, self.updated.seconds_since(self.asked))


class StreamedStep:
    """Replaces an optimizer's `step` and `load_state_dict` until `close`.

    Results equal those of the optimizer: its own kernel updates each chunk, element by element, with the counters that
    the whole step begins with.

    Args:
        optimizer: one of torch's.
        arrays: its state in host memory.
        window: the window, shared by the optimizers of a chain.
        device: the device of the optimizer.
        chain: tracks the step of the chain; shared, too.
        sums: compares checksums of chunks that leave and come back; None for no checksums.
        on_step: called with the measurements of each step.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        arrays: Sequence[ParameterArrays],
        window: Window,
        device: torch.device,
        chain: ChainStep,
        *,
        sums: ChunkSums | None,
        on_step: Callable[[StepTransfer], None],
    ) -> None:
        self._optimizer = optimizer
        self._arrays = tuple(arrays)
        self._chunks = [(one, chunk) for one in arrays for chunk in one.layout.chunks]
        self._window = window
        self._device = device
        self._chain = chain
        self._sums = sums
        self._on_step = on_step
        self._fetched: deque[Slot] = deque()
        self._begin: Event | None = None
        self._stored: Event | None = None
        self._num_done = 0  # chunks, in this step
        self._state: dict[int, _State] = {}  # by the placeholder's address
        self._put_placeholders()
        self._install()

    @property
    def nbytes(self) -> int:
        """Returns the bytes of state."""
        return sum(one.layout.nbytes for one in self._arrays)

    @property
    def num_chunks(self) -> int:
        """Returns how many chunks a step has."""
        return len(self._chunks)

    def prefetch(self) -> None:
        """Start to fill the window before the gradients are ready; changes no state."""
        self.check()
        self._window.claim(self._forget_fetched)
        if not self._fetched:
            if self._stored is not None:  # by the step before
                self._window.copies.back.follow(self._stored)
            self._begin = self._window.copies.back.mark()
        for one, chunk in self._chunks[len(self._fetched) : NUM_SLOTS]:
            self._fetched.append(self._window.fetch(one, chunk))

    @torch.no_grad()
    def step(self) -> None:
        """Update all parameters and their state; runs inside of `ChainStep.run`."""
        asked = record_current_stream(self._device)
        stepper = PieceStepper(self._optimizer)
        try:
            self.prefetch()
            filled = self._fetched[-1].arrived if self._fetched else None
            for one, chunk in self._chunks:
                self._update(stepper, one, chunk)
                self._num_done += 1
                if self._num_done + NUM_SLOTS <= len(self._chunks):
                    self._fetched.append(self._window.fetch(*self._chunks[self._num_done + NUM_SLOTS - 1]))
            stepper.finish()
        except BaseException:
            self._window.discard()
            raise
        self._chain.end_update(self)
        updated = record_current_stream(self._device)
        if self._chunks:
            begin, end = self._begin, self._window.last_out
            assert begin is not None and filled is not None and end is not None
            self._stored = end
            self._on_step(StepTransfer(2 * self.nbytes, begin, end, filled, asked, updated))

    def _update(self, stepper: PieceStepper, one: ParameterArrays, chunk: Chunk) -> None:
        slot = self._fetched.popleft()
        assert slot.arrived is not None
        slot.arrived.wait_on_current_stream()
        if self._sums is not None:
            self._sums.compare(one, chunk, slot)
        self._chain.begin_update()
        stepper.step(list(placed_pieces(one, chunk, slot)))
        if self._sums is not None:
            self._sums.remember(one, chunk, slot)
        self._window.store(one, chunk, slot)

    def check(self) -> None:
        """Raises if a step of this optimizer, or of another one of the chain, has ended in the middle."""
        self._chain.check()

    def host_view(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Returns the host memory of a tensor of the state; None for any other tensor."""
        state = self._state.get(tensor.untyped_storage().data_ptr())
        if state is None:
            return None
        self.check()
        self._window.wait()
        if tensor.shape != state.host.shape:
            raise ResidencyError(
                f"Cannot read a view of shape {list(tensor.shape)} of optimizer state of shape "
                f"{list(state.host.shape)}: it is streamed from the host and can only be read as a whole."
            )
        return state.host

    @contextlib.contextmanager
    def on_host(self) -> Iterator[None]:
        """Expose the optimizer's masters and state as CPU tensors inside the context, to be read and written."""
        self.check()
        self._host_changes()
        for state in self._state.values():
            state.tensor.data = state.host
        try:
            yield
        finally:
            for state in self._state.values():
                state.tensor.data = state.placeholder

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load hyperparameters, counters and state as the optimizer's own method does, but state into host memory.

        Groups of another optimizer may lack hyperparameters, such as `amsgrad`; those stay as they are.
        """
        self._host_changes()
        groups, saved_groups = self._optimizer.param_groups, copy.deepcopy(state_dict["param_groups"])
        hosts = {id(state.tensor): state.host for state in self._state.values()}
        parameters = itertools.chain.from_iterable(group["params"] for group in groups)
        numbers = itertools.chain.from_iterable(group["params"] for group in saved_groups)
        for parameter, number in zip(parameters, numbers, strict=True):
            own = self._optimizer.state[parameter]
            for key, value in state_dict["state"].get(number, {}).items():
                if value is own.get(key):
                    continue
                host = hosts.get(id(own.get(key)))
                if host is not None:
                    host.copy_(value)
                else:
                    own[key] = copy.deepcopy(value)
        for group, saved in zip(groups, saved_groups, strict=True):
            group.pop("step", None)  # a checkpoint from before the first step has none
            group.update({key: value for key, value in saved.items() if key != "params"})

    def close(self) -> None:
        """Restore the optimizer's own methods; it has no state afterwards."""
        self._state.clear()
        for name in ("step", "load_state_dict"):
            vars(self._optimizer).pop(name, None)

    def _where(self) -> str:
        return f"in chunk {min(self._num_done + 1, len(self._chunks))} of {len(self._chunks)}"

    def _host_changes(self) -> None:
        self._window.wait()
        self._forget_fetched()
        if self._sums is not None:
            self._sums.clear()

    def _forget_fetched(self) -> None:
        self._fetched.clear()

    def _put_placeholders(self) -> None:
        for one in self._arrays:
            for index, source in enumerate(one.parameters):
                if not self._optimizer.state.get(source.parameter):
                    self._optimizer.state[source.parameter] = state_or_sample(self._optimizer, source)
                state = self._optimizer.state[source.parameter]
                for number, field in enumerate(one.layout.fields):
                    empty = placeholder(source.parameter, field.dtype)
                    tensor = source.parameter if field.key == MASTER else state[field.key]
                    tensor.data = empty
                    host = one.host_tensor(number, index)
                    self._state[empty.untyped_storage().data_ptr()] = _State(tensor, host, empty)

    def _install(self) -> None:
        def step(_: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            self.step()
            return loss

        def load_state_dict(_: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
            self.load_state_dict(state_dict)

        # Bound methods of the optimizer, as torch's learning-rate schedulers expect; its hooks run once a step.
        hooked = torch.optim.Optimizer.profile_hook_step(step)

        def step_in_chain(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            self._num_done = 0
            return self._chain.run(self, lambda: hooked(optimizer, *args, **kwargs), self._where)

        vars(self._optimizer)["step"] = types.MethodType(step_in_chain, self._optimizer)
        vars(self._optimizer)["load_state_dict"] = types.MethodType(load_state_dict, self._optimizer)


@dataclass(frozen=True, eq=False)
class _State:
    """Holds a master or state tensor: the optimizer's object, its host memory, and the placeholder that it shows."""

    tensor: torch.Tensor
    host: torch.Tensor
    placeholder: torch.Tensor
