"""Implements streamed optimizer state as a target: always on the host, with a window on the GPU for the step."""

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from nemo_offload_rl.memory.errors import preserve_first_error
from nemo_offload_rl.memory.gpu_range import OutOfGpuMemoryError
from nemo_offload_rl.memory.units import GIB, MIB
from nemo_offload_rl.residency.context import TargetContext
from nemo_offload_rl.residency.metrics import Started
from nemo_offload_rl.residency.optimizer_state import model_storages, optimizer_parts
from nemo_offload_rl.residency.streamed.init_state import (
    disable_master_copies,
    init_host_state,
    layouts,
    parameters_to_stream,
)
from nemo_offload_rl.residency.streamed.pieces import ParameterArrays
from nemo_offload_rl.residency.streamed.step import ChainStep, ChunkSums, StepTransfer, StreamedStep
from nemo_offload_rl.residency.streamed.window import HostCopies, Window, slot_bytes
from nemo_offload_rl.residency.table import Phase, Placement, Target
from nemo_offload_rl.residency.target import Move
from nemo_offload_rl.residency.transfer import ChunkError, Mover

logger = logging.getLogger(__name__)


def host_bytes(context: TargetContext) -> int:
    """Returns the bytes that streamed optimizer state will take in the arena."""
    return sum(layout.nbytes for _, _, found in _planned(context) for layout, _ in found)


def make(context: TargetContext) -> "StreamedState | None":
    """Make the state in host memory, and make the optimizers step it from there; None without an optimizer.

    Raises:
        ValueError: the state cannot be stepped in pieces.
        MemoryError: the host has no room.
        torch.OutOfMemoryError: the GPU has none for the window.
    """
    if context.optimizer is None:
        return None
    planned = list(_planned(context))
    options, device, chain = context.options, context.device, ChainStep(len(planned))
    with contextlib.ExitStack() as undo:
        window = _window(context)
        undo.callback(window.close)

        def record(transfer: StepTransfer) -> None:
            streamed = Placement.STREAMED
            context.meter.record_start(Started(Phase.TRAIN, Target.OPTIMIZER_STATE, streamed, streamed, transfer))

        steps, all_arrays, ways_back = [], [], []
        for part, inner, found in planned:
            arrays: list[ParameterArrays] = []
            for layout, parameters in found:
                one = init_host_state(
                    inner, layout, parameters, context.arena, window, pin=options.pinned_optimizer_state
                )
                undo.callback(context.arena.release, one.segment)
                arrays.append(one)
            sums = ChunkSums() if options.verify else None
            steps.append(StreamedStep(inner, arrays, window, device, chain, sums=sums, on_step=record))
            ways_back += [steps[-1].close, disable_master_copies(part)]
            all_arrays += arrays
        undo.pop_all()
    state = StreamedState(steps, all_arrays, window, context.mover, ways_back, context)
    context.mover.checks.append(state.check)
    num_chunks = sum(step.num_chunks for step in steps)
    logger.info(
        "optimizer state: %.2f GiB on the host, stepped through a window of %.2f GiB in %d chunks",
        sum(step.nbytes for step in steps) / GIB,
        window.backed.range.nbytes / GIB,
        num_chunks,
    )
    return state


def _window(context: TargetContext) -> Window:
    nbytes, device = context.options.stream_window_bytes, context.device
    context.meter.give_back_cache()
    with contextlib.ExitStack() as undo:
        try:
            window = Window(nbytes, device, context.ranges, HostCopies(device, context.arena))
            undo.callback(window.close)
            context.mover.take([window.backed]).wait()
        except (OutOfGpuMemoryError, ChunkError) as error:  # making a range maps its first chunk
            raise OutOfGpuMemoryError(
                f"Cannot allocate the window of {nbytes / MIB:.0f} MiB through which optimizer state is streamed "
                f"({error}); make it smaller (policy.residency.stream_window_mib), or leave more GPU memory free."
            ) from error
        undo.pop_all()
    return window


def _planned(context: TargetContext) -> Iterator[tuple[Any, torch.optim.Optimizer, list[Any]]]:
    """Yields each optimizer, the part of the chain around it, and the layouts of its state with their parameters."""
    if context.optimizer is None:
        return
    storages = model_storages(context)
    size = slot_bytes(context.options.stream_window_bytes)
    for part, inner in optimizer_parts(context.optimizer):
        if hasattr(inner, "sub_optimizers"):
            raise ValueError(
                "Optimizer state cannot be streamed with megatron-core's CPU optimizer, which keeps it on the CPU; "
                "turn one of the two off (policy.megatron_cfg.optimizer.optimizer_cpu_offload)."
            )
        yield part, inner, layouts(inner, parameters_to_stream(part, inner, storages), size)


class StreamedState:
    """Keeps masters and moments on the host, and streams them through the GPU in the optimizer's step.

    The optimizer's Parameter and state objects stay the same, but have no memory of their own.

    Args:
        steps: the streamed step of each optimizer of the chain.
        arrays: their host memory.
        window: the window that they share.
        mover: maps and unmaps it.
        ways_back: functions that undo the changes to the optimizers.
        context: the offloader's context.
    """

    placements = frozenset({Placement.STREAMED, Placement.HOST})
    lazy_wait = True  # the hook of attach.py waits before the step of each inner optimizer
    needs_gpu_to_save = False

    def __init__(
        self,
        steps: Sequence[StreamedStep],
        arrays: Sequence[ParameterArrays],
        window: Window,
        mover: Mover,
        ways_back: Sequence[Callable[[], None]],
        context: TargetContext,
    ) -> None:
        self.steps = steps
        self.window = window
        self._arrays = arrays
        self._mover = mover
        self._ways_back = ways_back
        self._context = context

    @property
    def nbytes(self) -> int:
        """Returns the GPU memory that the window takes while it is mapped."""
        return self.window.backed.range.nbytes

    @property
    def host_nbytes(self) -> int:
        """Returns the host memory of the state."""
        return sum(step.nbytes for step in self.steps)

    @property
    def mapped_bytes(self) -> int:
        """Returns the GPU memory that the window has mapped now."""
        return self.window.backed.range.mapped_bytes

    def prefetch(self) -> None:
        """Start to fill the window for the step, if the window is on the GPU; changes no state."""
        residency = self._context.residency
        if self.steps and residency.where(Target.OPTIMIZER_STATE) is Placement.STREAMED:
            residency.require(Target.OPTIMIZER_STATE)
            self.steps[0].prefetch()

    def check(self) -> None:
        """Raises if a step has failed in the middle."""
        for step in self.steps:
            step.check()

    @contextlib.contextmanager
    def on_host(self) -> Iterator[None]:
        """Expose masters and state as CPU tensors inside the context, for instance to load a checkpoint into them."""
        with contextlib.ExitStack() as stack:
            for step in self.steps:
                stack.enter_context(step.on_host())
            yield

    def host_view(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """See `OffloadTarget`."""
        views = (step.host_view(tensor) for step in self.steps)
        return next((view for view in views if view is not None), None)

    def start(self, placement: Placement) -> Move:
        """Map the window, or free its memory."""
        if placement is Placement.STREAMED:
            return self._mover.take([self.window.backed])
        self.window.release_slots()
        return self._mover.drop([self.window.backed])

    def name_for_error(self, error: Exception) -> str:
        """Returns the name of the window, for an error of its move."""
        return "the window that it is streamed through"

    def close(self) -> None:
        """Free all memory, and undo the changes to the optimizers."""
        arrays, self._arrays = self._arrays, []
        with preserve_first_error(), contextlib.ExitStack() as stack:  # each of them, even if others raise
            for one in arrays:
                stack.callback(self._context.arena.release, one.segment)
            stack.callback(self.window.close)
            for give_back in self._ways_back:
                stack.callback(give_back)
