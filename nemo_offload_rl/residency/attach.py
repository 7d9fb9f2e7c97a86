"""Attaches the offloader to a megatron-core model and optimizer, whose uses then wait for moves under way."""

import contextlib
import functools
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
from nemo_offload_rl.residency.optimizer_state import OptimizerState, stepped_optimizers, torch_optimizers
from nemo_offload_rl.residency.params_and_grads import Params
from nemo_offload_rl.residency.reference_weights import ReferenceWeights
from nemo_offload_rl.residency.residency import Residency
from nemo_offload_rl.residency.streamed.target import StreamedState
from nemo_offload_rl.residency.table import DEFAULT_TABLE, Phase, Placement, Table, Target
from nemo_offload_rl.residency.target import OffloadTarget
from nemo_offload_rl.residency.targets import TARGETS

Undo = Callable[[], None]

_UNHOOKED_METHODS = (
    "save_parameter_state",
    "load_parameter_state",
    "get_parameter_state_dp_zero",
    "load_parameter_state_from_dp_zero",
    "reload_model_params",
)
"""Methods of megatron-core's optimizers that access masters and moments without running a torch optimizer's hooks."""


def guard(residency: Residency, model: Sequence[torch.nn.Module], optimizer: Any | None) -> list[Undo]:
    """Make forward passes, steps, `state_dict` and `load_state_dict` require the state that they use.

    A use in the wrong phase raises an error instead of an illegal memory access, zeros or NaN. Trainers save and load
    right after the call that brings state back, which does not wait for the copies: they would overwrite values that
    were loaded before they end.

    Args:
        residency: knows where the state is.
        model: the model's chunks.
        optimizer: a megatron-core or torch optimizer; None if nothing is trained.

    Returns:
        Functions that remove the guards again.
    """
    guards = list(_guard_model(residency, model))
    if optimizer is not None:
        guards += [*_guard_torch_optimizers(residency, optimizer), *_guard_methods(residency, optimizer)]
    return guards


def _guard_model(residency: Residency, model: Sequence[torch.nn.Module]) -> Iterator[Undo]:
    def before_forward(*_: object) -> None:
        residency.require(Target.PARAMS)

    def before_access(*_: object) -> None:
        residency.require_contents(Target.PARAMS)

    for chunk in model:
        yield chunk.register_forward_pre_hook(before_forward).remove
        for module in chunk.modules():  # megatron-core's wrappers call the `state_dict` of a module in them
            yield module.register_state_dict_pre_hook(before_access).remove
            yield module.register_load_state_dict_pre_hook(before_access).remove


def _guard_torch_optimizers(residency: Residency, optimizer: Any) -> Iterator[Undo]:
    def before_step(*_: object) -> None:
        residency.require(Target.OPTIMIZER_STATE)

    def before_access(*_: object) -> None:
        residency.require_contents(Target.OPTIMIZER_STATE)

    stepped = list(stepped_optimizers(optimizer))
    for one in stepped:
        yield one.register_step_pre_hook(before_step).remove
    for one in {id(one): one for one in [*stepped, *torch_optimizers(optimizer)]}.values():
        yield one.register_state_dict_pre_hook(before_access, prepend=True).remove
        yield one.register_load_state_dict_pre_hook(before_access, prepend=True).remove


def _guard_methods(residency: Residency, optimizer: Any) -> Iterator[Undo]:
    if isinstance(optimizer, torch.optim.Optimizer):
        return
    for part in [optimizer, *getattr(optimizer, "chained_optimizers", [])]:
        for name in _UNHOOKED_METHODS:
            if hasattr(part, name):
                setattr(part, name, _requiring(residency, getattr(part, name)))
                yield functools.partial(vars(part).pop, name, None)


def _requiring(residency: Residency, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        residency.require_contents(Target.PARAMS)  # an fp32 parameter is its own master
        residency.require_contents(Target.OPTIMIZER_STATE)
        return method(*args, **kwargs)

    return guarded


logger = logging.getLogger(__name__)

_HOST = Placement.HOST


@dataclass(frozen=True)
class Offloader:
    """Moves a model's and an optimizer's state between phases; made by `attach`.

    Attributes:
        context: the model, the optimizer and the options that it was made from.
        hooks: functions that remove the offloader's hooks from model and optimizer.
    """

    context: TargetContext
    hooks: Sequence[Callable[[], None]]

    @property
    def residency(self) -> Residency:
        """Returns the residency, which moves targets: `residency.enter(phase)`."""
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
        """Returns the reference weights; None unless `Options.with_reference` is set."""
        reference = self.targets.get(Target.REFERENCE_WEIGHTS)
        assert reference is None or isinstance(reference, ReferenceWeights)
        return reference

    @property
    def mapped_bytes(self) -> int:
        """Returns the GPU memory that all ranges have mapped now, which torch's allocator does not count."""
        return self.context.mapped_bytes

    def nbytes(self) -> dict[Target, int]:
        """Returns the bytes of each target, by target."""
        return {name: target.nbytes for name, target in self.targets.items()}

    def checkpoint_reader(self, lent: set[int] | None = None) -> Callable[[torch.Tensor], torch.Tensor]:
        """Returns a function that reads tensors where their data is, on CPU or GPU, for instance to save a checkpoint.

        Until the next move or step, `state_dict` of the model and the optimizer then returns tensors to read by it,
        also while their data is away.

        Args:
            lent: is filled with the data addresses of the returned host tensors of optimizer state, whose contents
                `residency.lend` can keep unchanged. With it, optimizer state that is leaving the GPU is not waited for:
                its contents are there once `residency.wait_until_released` has returned.

        Returns:
            A function that returns, for a tensor whose data is on the host now, a CPU tensor with the same contents
            and a storage of just its size, and any other tensor as it is. Valid until the next phase.
        """
        self.residency.end_prefetches()
        self.residency.wait_until_released(without=() if lent is None else (Target.OPTIMIZER_STATE,))
        self.context.mover.check()
        on_host = (_HOST, Placement.STREAMED)
        host_targets = {name: target for name, target in self.targets.items() if self.residency.where(name) in on_host}
        if any(target.needs_gpu_to_save for target in host_targets.values()):
            self.load_all_to_gpu()
            host_targets = {}
        for name in self.targets:
            if self.residency.where(name) is Placement.GPU:
                self.residency.require(name)
        # Not streamed state, which a step changes on the host, nor params, which a swap with reference weights changes.
        lendable = {
            name for name in host_targets if name is Target.OPTIMIZER_STATE and self.residency.where(name) is _HOST
        }

        self.residency.allow_access_in_place(self.targets)

        def read(tensor: torch.Tensor) -> torch.Tensor:
            for name, target in host_targets.items():
                if (view := target.host_view(tensor)) is not None:
                    if lent is not None and name in lendable:
                        lent.add(view.data_ptr())
                    return view
            return tensor

        return read

    def load_all_to_gpu(self) -> None:
        """Move all that training needs to the GPU and wait for it, for instance before a checkpoint is loaded."""
        self.residency.enter(Phase.TRAIN)
        for name in self.targets:
            if self.residency.where(name) is Placement.GPU:
                self.residency.require(name)

    @contextlib.contextmanager
    def streamed_state_on_host(self) -> Iterator[None]:
        """Expose streamed masters and state as CPU tensors inside the context, to save them or to load a checkpoint."""
        state = self.targets.get(Target.OPTIMIZER_STATE)
        if not isinstance(state, StreamedState):
            yield
            return
        with state.on_host():
            self.residency.allow_access_in_place([Target.OPTIMIZER_STATE])
            try:
                yield
            finally:
                self.residency.end_access_in_place(Target.OPTIMIZER_STATE)

    def prefetch_streamed_state(self) -> None:
        """Prefetch the first chunks of streamed optimizer state before the step, such as during a backward pass."""
        state = self.targets.get(Target.OPTIMIZER_STATE)
        if isinstance(state, StreamedState):
            state.prefetch()

    def adopt_new_tensors(self) -> None:
        """Move tensors that got memory outside of ranges into ranges, such as state that a checkpoint replaced.

        This happens anyway when the state leaves the GPU; until then both the tensors and the ranges take memory. It
        waits for state that is coming back.

        Raises:
            ResidencyError: state is not on the GPU, so that its ranges have no memory.
            MemoryError: the host has no room.
            torch.OutOfMemoryError: the GPU has none.
        """
        housed = [(name, one) for name, one in self.targets.items() if isinstance(one, (OptimizerState, Params))]
        for name, _ in housed:
            self.residency.require(name)
        for _, target in housed:
            target.adopt_new_tensors()

    def close(self) -> None:
        """Free all memory; model and optimizer must not be used afterwards. The caller closes the arena."""
        with preserve_first_error(), contextlib.ExitStack() as stack:  # each of them, even if others raise
            for target in self.targets.values():
                stack.callback(target.close)
            stack.callback(self.context.mover.close)
            for remove in self.hooks:
                stack.callback(remove)


def attach(
    model: Sequence[torch.nn.Module],
    optimizer: Any | None,
    arena: PinnedArena,
    *,
    table: Table = DEFAULT_TABLE,
    options: Options = DEFAULT_OPTIONS,
    ranges: RangeMaker = make_range,
) -> Offloader:
    """Move the tensors of a model and an optimizer into ranges, and return the offloader that moves these.

    Call it before the first forward pass, since every view of a parameter or gradient buffer has to be moved, too.
    Parameters, optimizer and its state stay the same objects. Every target that can be on the GPU is there when this
    returns.

    Args:
        model: the model's chunks, each bare or in megatron-core's DistributedDataParallel.
        optimizer: megatron-core's, or a torch optimizer; None if nothing is trained.
        arena: provides the host memory; offloaders may share it. Without a GPU the moves are made between two places of
            host memory.
        table: where each target lives in each phase.
        options: options of the offloader.
        ranges: makes the ranges that hold the tensors.

    Raises:
        ValueError: the table does not fit the targets, or a tensor has views that are not known and would not be moved.
        MemoryError: the host has no room.
        torch.OutOfMemoryError: the GPU has no room. After any of these, model and optimizer must not be used.
    """
    start = time.perf_counter()
    context = TargetContext(model, optimizer, arena, table, options, ranges)
    with contextlib.ExitStack() as undo:
        meter = context.meter  # measures the link while nothing else uses it
        undo.callback(context.mover.close)
        for name, kind in TARGETS.items():
            # Free the last target's old memory: a generator's engine that is built on this GPU meanwhile may need it.
            meter.give_back_cache()
            if (made := kind.make(context)) is not None:
                context.targets[name] = made
                undo.callback(made.close)
        residency = context.residency
        undo.pop_all()
    meter.give_back_cache()  # the last target's old memory
    offloader = Offloader(context, guard(residency, model, optimizer))
    sizes = ", ".join(f"{target} {nbytes / GIB:.2f} GiB" for target, nbytes in offloader.nbytes().items())
    logger.info("residency: %s; set up in %.2f s", sizes, time.perf_counter() - start)
    return offloader


def needed_host_bytes(
    model: Sequence[torch.nn.Module],
    optimizer: Any | None,
    arena: PinnedArena,
    *,
    table: Table = DEFAULT_TABLE,
    options: Options = DEFAULT_OPTIONS,
) -> dict[Target, int]:
    """Return the bytes of the arena that `attach` with these arguments will take for each target; takes none itself."""
    context = TargetContext(model, optimizer, arena, table, options)
    return {target: kind.host_bytes(context) for target, kind in TARGETS.items()}
