"""Puts the engine on a model and an optimizer of megatron-core; no Ray, no recipe, no worker is needed for it."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nemo_offload_rl.memory.errors import preserve_first_error
from nemo_offload_rl.memory.gpu_range import RangeMaker, make_range
from nemo_offload_rl.memory.pinned import PinnedArena
from nemo_offload_rl.memory.units import GIB
from nemo_offload_rl.residency.context import DEFAULT_OPTIONS, Options, TargetContext
from nemo_offload_rl.residency.metrics import Meter
from nemo_offload_rl.residency.optimizer_state import OptimizerState, stepped_optimizers
from nemo_offload_rl.residency.params_and_grads import Params
from nemo_offload_rl.residency.reference_weights import ReferenceWeights
from nemo_offload_rl.residency.residency import Residency
from nemo_offload_rl.residency.streamed.target import StreamedState
from nemo_offload_rl.residency.table import DEFAULT_TABLE, Phase, Placement, Table, Target
from nemo_offload_rl.residency.target import OffloadTarget
from nemo_offload_rl.residency.targets import TARGETS

logger = logging.getLogger(__name__)

_HOST = Placement.HOST


@dataclass(frozen=True)
class Engine:
    """Moves a model's and an optimizer's state between phases; made by `attach`.

    Attributes:
        context: the model, the optimizer and the options that it was made from.
        hooks: take the engine's hooks off model and optimizer.
    """

    context: TargetContext
    hooks: Sequence[Callable[[], None]]

    @property
    def residency(self) -> Residency:
        """Returns what moves targets: `residency.enter(phase)`."""
        return self.context.residency

    @property
    def targets(self) -> Mapping[Target, OffloadTarget]:
        """Returns the targets by name."""
        return self.context.targets

    @property
    def meter(self) -> Meter:
        """Returns the measurements of moves."""
        return self.context.meter

    @property
    def reference(self) -> ReferenceWeights | None:
        """Returns the weights of the start, if they were to be kept."""
        reference = self.targets.get(Target.REFERENCE_WEIGHTS)
        assert reference is None or isinstance(reference, ReferenceWeights)
        return reference

    @property
    def mapped_bytes(self) -> int:
        """Returns the GPU memory of all ranges now, which torch's allocator does not count."""
        return self.context.mapped_bytes

    def nbytes(self) -> dict[Target, int]:
        """Returns the bytes of each target, by target."""
        return {name: target.nbytes for name, target in self.targets.items()}

    def checkpoint_reader(self, lent: set[int] | None = None) -> Callable[[torch.Tensor], torch.Tensor]:
        """Makes everything readable where it is, on the CPU or the GPU, for instance to save a checkpoint.

        Args:
            lent: gets the addresses of the tensors that are given of optimizer state on the host, whose contents
                `residency.lend` can keep. With it, state that is leaving the GPU is not waited for: its contents are
                there once `residency.wait_until_released` has returned.

        Returns:
            For a tensor whose memory is on the host now: a CPU tensor of the same contents, with a storage of its own
            and no larger; any other tensor as it is. Good until the next phase.
        """
        self.residency.wait_until_released(without=() if lent is None else (Target.OPTIMIZER_STATE,))
        self.context.mover.check()
        on_host = (_HOST, Placement.STREAMED)
        away = {name: target for name, target in self.targets.items() if self.residency.where(name) in on_host}
        if any(target.needs_gpu_to_save for target in away.values()):
            self.load_all_to_gpu()
            away = {}
        for name in self.targets:
            if self.residency.where(name) is Placement.GPU:
                self.residency.require(name)
        # A streamed step changes state on the host, and a swap with reference weights the params there.
        still = {name for name in away if name is Target.OPTIMIZER_STATE and self.residency.where(name) is _HOST}

        def read(tensor: torch.Tensor) -> torch.Tensor:
            for name, target in away.items():
                if (view := target.host_view(tensor)) is not None:
                    if lent is not None and name in still:
                        lent.add(view.data_ptr())
                    return view
            return tensor

        return read

    def load_all_to_gpu(self) -> None:
        """Bring to the GPU what training needs and wait for all of it, for instance before a checkpoint is loaded."""
        self.residency.enter(Phase.TRAIN)
        for name in self.targets:
            if self.residency.where(name) is Placement.GPU:
                self.residency.require(name)

    @contextlib.contextmanager
    def streamed_state_on_host(self) -> Iterator[None]:
        """Have streamed masters and state be CPU tensors meanwhile, into whose memory a checkpoint is loaded."""
        state = self.targets.get(Target.OPTIMIZER_STATE)
        with state.on_host() if isinstance(state, StreamedState) else contextlib.nullcontext():
            yield

    def prefetch_streamed_state(self) -> None:
        """Let the first chunks of streamed optimizer state come in before the step, such as beside a backward pass."""
        state = self.targets.get(Target.OPTIMIZER_STATE)
        if isinstance(state, StreamedState):
            state.prefetch()

    def adopt_new_tensors(self) -> None:
        """Bring into ranges what has got memory of its own, such as optimizer state that a checkpoint replaced.

        It happens anyway when that state leaves; until then both would take memory.

        Raises:
            MemoryError: the host has no room.
            torch.OutOfMemoryError: the GPU has none.
        """
        for target in self.targets.values():
            if isinstance(target, (OptimizerState, Params)):
                target.adopt_new_tensors()

    def close(self) -> None:
        """Give all memory back, the arena's segments too; model and optimizer are of no use afterwards."""
        for remove in self.hooks:
            remove()
        with preserve_first_error(), contextlib.ExitStack() as stack:  # each of them, whatever the others say
            stack.callback(self.context.arena.close)
            for target in self.targets.values():
                stack.callback(target.close)
            stack.callback(self.context.mover.close)


def attach(
    model: Sequence[torch.nn.Module],
    optimizer: Any | None,
    arena: PinnedArena,
    *,
    table: Table = DEFAULT_TABLE,
    options: Options = DEFAULT_OPTIONS,
    ranges: RangeMaker = make_range,
) -> Engine:
    """Move a model and an optimizer into ranges, and hand them to a residency.

    Call it before the first forward pass, since every view of a parameter or gradient buffer has to follow. Parameters,
    optimizer and its state stay the same objects. Everything is on the GPU when this returns.

    Args:
        model: the chunks, each bare or in megatron-core's DistributedDataParallel.
        optimizer: megatron-core's, or a torch optimizer; None if nothing is trained.
        arena: gives the host memory. Without a GPU everything works alike, between two places of host memory.
        table: where each target lives in each phase.
        options: how the engine works.
        ranges: makes the ranges that everything lives in.

    Raises:
        ValueError: the table does not fit, or something holds views that would not follow.
        MemoryError: the host has no room.
        torch.OutOfMemoryError: the GPU has none. After any of these model and optimizer are of no use.
    """
    start = time.perf_counter()
    context = TargetContext(model, optimizer, arena, table, options, ranges)
    with contextlib.ExitStack() as undo:
        meter = context.meter  # measures the link before anything is in the way
        undo.callback(context.mover.close)
        for name, kind in TARGETS.items():
            # What the last one lived in is not kept: an engine that is built on this GPU meanwhile may need it.
            meter.give_back_cache()
            if (made := kind.make(context)) is not None:
                context.targets[name] = made
                undo.callback(made.close)
        residency = context.residency
        undo.pop_all()
    meter.give_back_cache()  # what everything lived in before
    engine = Engine(context, _guard(residency, model, optimizer))
    sizes = ", ".join(f"{target} {nbytes / GIB:.2f} GiB" for target, nbytes in engine.nbytes().items())
    logger.info("residency: %s; set up in %.2f s", sizes, time.perf_counter() - start)
    return engine


def needed_host_bytes(
    model: Sequence[torch.nn.Module],
    optimizer: Any | None,
    arena: PinnedArena,
    *,
    table: Table = DEFAULT_TABLE,
    options: Options = DEFAULT_OPTIONS,
) -> dict[Target, int]:
    """Return what `attach` with the same arguments will take of the arena for each target, in bytes; takes nothing."""
    context = TargetContext(model, optimizer, arena, table, options)
    return {target: kind.host_bytes(context) for target, kind in TARGETS.items()}


def _guard(residency: Residency, model: Sequence[torch.nn.Module], optimizer: Any | None) -> list[Callable[[], None]]:
    """Have forward passes ask for the params, and optimizer steps for their state; returns how to stop that.

    Late arrivals are waited for here, and a use in the wrong phase ends in a message and not in an illegal
    memory access.
    """

    def before_forward(*_: object) -> None:
        residency.require(Target.PARAMS)

    def before_step(*_: object) -> None:
        residency.require(Target.OPTIMIZER_STATE)

    hooks = [chunk.register_forward_pre_hook(before_forward) for chunk in model]
    if optimizer is not None:
        hooks += [inner.register_step_pre_hook(before_step) for inner in stepped_optimizers(optimizer)]
    return [hook.remove for hook in hooks]
