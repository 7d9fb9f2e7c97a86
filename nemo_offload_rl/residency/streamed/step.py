"""Steps an optimizer whose state is on the host: each chunk comes in, is updated and leaves, beside its neighbours."""

import contextlib
import copy
import itertools
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nemo_offload_rl.memory.streams import Event, record_current_stream
from nemo_offload_rl.residency.streamed.birth import state_or_sample
from nemo_offload_rl.residency.streamed.layout import MASTER, Chunk
from nemo_offload_rl.residency.streamed.pieces import ParameterArrays, PieceStepper, placed_pieces
from nemo_offload_rl.residency.streamed.placeholder import placeholder
from nemo_offload_rl.residency.streamed.report import StepTransfer
from nemo_offload_rl.residency.streamed.verify import ChunkSums
from nemo_offload_rl.residency.streamed.window import NUM_SLOTS, Slot, Window
from nemo_offload_rl.residency.target import ResidencyError


class HalfUpdatedError(ResidencyError):
    """Says that a step ended in the middle: some of the model and its state has been updated, and some has not."""


class StreamedStep:
    """Takes the place of an optimizer's `step` and `load_state_dict`; gives both back at `close`.

    Numbers are those of the optimizer: its own kernel updates each chunk, element by element, with the counters that
    the whole step begins with.

    Args:
        optimizer: one of torch's.
        arrays: its state in host memory.
        window: shared by the optimizers of a chain.
        device: of the optimizer.
        sums: compares checksums of chunks that leave and come back; None does not.
        on_step: told of what each step has moved.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        arrays: Sequence[ParameterArrays],
        window: Window,
        device: torch.device,
        *,
        sums: ChunkSums | None,
        on_step: Callable[[StepTransfer], None],
    ) -> None:
        self._optimizer = optimizer
        self._arrays = tuple(arrays)
        self._chunks = [(one, chunk) for one in arrays for chunk in one.layout.chunks]
        self._window = window
        self._device = device
        self._sums = sums
        self._on_step = on_step
        self._fetched: deque[Slot] = deque()
        self._begin: Event | None = None
        self._stored: Event | None = None
        self._failure: str | None = None
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
        """Start to fill the window, before the gradients are ready; no state is changed by it."""
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
        """Update all parameters and their state.

        Raises:
            HalfUpdatedError: it failed in the middle; no later step, forward pass or checkpoint is possible.
        """
        self.check()
        asked = record_current_stream(self._device)
        stepper, done = PieceStepper(self._optimizer), 0
        try:
            self.prefetch()
            filled = self._fetched[-1].arrived if self._fetched else None
            for one, chunk in self._chunks:
                self._update(stepper, one, chunk)
                done += 1
                if done + NUM_SLOTS <= len(self._chunks):
                    self._fetched.append(self._window.fetch(*self._chunks[done + NUM_SLOTS - 1]))
            stepper.finish()
        except Exception as error:
            self._window.discard()
            if self._failure is None:  # nothing has been updated
                raise
            self._failure = _half_updated(
                f"in chunk {done + 1} of {len(self._chunks)} ({type(error).__name__}: {error})"
            )
            raise HalfUpdatedError(self._failure) from error
        self._failure = None
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
        self._failure = self._failure or _half_updated("by an interrupt")
        stepper.step(list(placed_pieces(one, chunk, slot)))
        if self._sums is not None:
            self._sums.remember(one, chunk, slot)
        self._window.store(one, chunk, slot)

    def check(self) -> None:
        """Raises if a step has failed in the middle."""
        if self._failure is not None:
            raise HalfUpdatedError(self._failure)

    def host_view(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Returns the host's memory of a tensor of the state; None for another's."""
        state = self._state.get(tensor.untyped_storage().data_ptr())
        if state is None:
            return None
        self.check()
        self._window.wait()
        if tensor.shape != state.host.shape:
            raise ResidencyError(
                f"A view {list(tensor.shape)} of optimizer state {list(state.host.shape)} was asked for, which is "
                "streamed from the host and so can be read as a whole only."
            )
        return state.host

    @contextlib.contextmanager
    def on_host(self) -> Iterator[None]:
        """Have the optimizer's masters and state be tensors of the CPU meanwhile, to be read and written."""
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
        """Take hyperparameters, counters and state over, as the optimizer's own method does; state into host memory."""
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
            kept = group["params"]
            group.clear()
            group.update(saved, params=kept)

    def close(self) -> None:
        """Give the optimizer its own methods back; it has no state any more."""
        self._state.clear()
        for name in ("step", "load_state_dict"):
            vars(self._optimizer).pop(name, None)

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

        # Functions bound to the optimizer, as learning-rate schedulers of torch expect; its hooks run once a step.
        hooked = torch.optim.Optimizer.profile_hook_step(step)
        vars(self._optimizer)["step"] = types.MethodType(hooked, self._optimizer)
        vars(self._optimizer)["load_state_dict"] = types.MethodType(load_state_dict, self._optimizer)


@dataclass(frozen=True, eq=False)
class _State:
    """A master or a tensor of state: the optimizer's object, the host's memory, and what the object shows."""

    tensor: torch.Tensor
    host: torch.Tensor
    placeholder: torch.Tensor


def _half_updated(where: str) -> str:
    return (
        f"The optimizer's streamed step was ended {where}: the model and its optimizer state are half updated. This "
        "process cannot go on; restart from the newest checkpoint."
    )
