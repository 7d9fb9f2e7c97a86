"""Puts the engine on a model and an optimizer of megatron-core; no Ray, no recipe, no worker is needed for it."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nemo_offload_rl.offload.gpu_range import RangeMaker, make_range
from nemo_offload_rl.offload.housing import Housing, Tenant, housed_bytes
from nemo_offload_rl.offload.link import measure_link
from nemo_offload_rl.offload.measurements import Meter
from nemo_offload_rl.offload.model_buffers import Grads, Params, grad_tenants, param_storages, param_tenants
from nemo_offload_rl.offload.optimizer_state import (
    OptimizerState,
    PageableOptimizerState,
    state_tenants,
    torch_optimizers,
)
from nemo_offload_rl.offload.pinned_arena import PinnedArena
from nemo_offload_rl.offload.reference_weights import ReferenceWeights
from nemo_offload_rl.offload.residency import Movable, Residency
from nemo_offload_rl.offload.transfer import Mover
from nemo_offload_rl.offload.types import DEFAULT_TABLE, Cell, Phase, Table, Target

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Options:
    """How the engine works.

    Attributes:
        pinned_optimizer_state: move optimizer state as ranges through the arena; False moves tensor by tensor through
            pageable memory, slowly.
        verify: compare checksums of everything that leaves and comes back.
        keep_reference: keep the weights of now for `Engine.reference`.
    """

    pinned_optimizer_state: bool = True
    verify: bool = False
    keep_reference: bool = False


@dataclass(frozen=True)
class Engine:
    """What moves a model's and an optimizer's state between phases; made by `attach`.

    Attributes:
        residency: `residency.enter(phase)` moves.
        meter: what moves took.
        reference: the weights of the start, if they were to be kept.
        mover: copies.
        housings: the ranges of each target that has some.
        arena: where the host's side lives.
        hooks: take the engine's hooks off model and optimizer.
    """

    residency: Residency
    meter: Meter
    reference: ReferenceWeights | None
    mover: Mover
    housings: Mapping[Target, Housing]
    arena: PinnedArena
    hooks: Sequence[Callable[[], None]]

    def nbytes(self) -> dict[Target, int]:
        """What each target takes where it is: in ranges of the GPU, the reference weights on the host."""
        held = {target: housing.nbytes for target, housing in self.housings.items()}
        return held | ({Target.REFERENCE_WEIGHTS: self.reference.nbytes} if self.reference is not None else {})

    @property
    def mapped_bytes(self) -> int:
        """What ranges take of the GPU now, which torch's allocator does not count."""
        return sum(housing.mapped_bytes for housing in self.housings.values())

    @contextlib.contextmanager
    def readable(self) -> Iterator[None]:
        """Everything can be read by the CPU or the GPU, wherever it is, for instance by whoever saves a checkpoint.

        What is on the host is read there: tensors look into the arena meanwhile, and nothing crosses the link.
        """
        self.residency.wait_until_released()
        with contextlib.ExitStack() as stack:
            for target, housing in self.housings.items():
                where = self.residency.where(target)
                if where is Cell.HOST:
                    stack.enter_context(housing.read_from_host())
                elif where is Cell.GPU:
                    self.residency.require(target)
            yield

    def writable(self) -> None:
        """Bring everything to the GPU and wait for it, for instance before a checkpoint is loaded."""
        self.residency.enter(Phase.TRAIN)
        for target in self.housings:
            self.residency.require(target)

    def close(self) -> None:
        """Give all memory back, the arena's segments too; model and optimizer are of no use afterwards."""
        for remove in self.hooks:
            remove()
        self.mover.close()
        if self.reference is not None:
            self.reference.close()
        for housing in self.housings.values():
            housing.close()
        self.arena.close()


def attach(
    model: Sequence[torch.nn.Module],
    optimizer: Any | None,
    arena: PinnedArena,
    *,
    table: Table = DEFAULT_TABLE,
    options: Options = Options(),
    ranges: RangeMaker = make_range,
) -> Engine:
    """House a model and an optimizer in ranges, and hand them to a residency.

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
        torch.OutOfMemoryError: the GPU has none.
    """
    start = time.perf_counter()
    device = next(model[0].parameters()).device
    mover = Mover(device, arena)
    link = measure_link(device, arena)
    visits_host = _visit_host(table, options)
    param_arena = arena if Target.PARAMS in visits_host else None
    housings = {Target.PARAMS: Housing(Target.PARAMS, device, param_arena, ranges=ranges)}
    housings[Target.PARAMS].add(param_tenants(model, device))
    params = Params(housings[Target.PARAMS], mover, verify=options.verify)
    targets: dict[Target, Movable] = {Target.PARAMS: params}
    if buffers := grad_tenants(model):
        housings[Target.GRADS] = Housing(Target.GRADS, device, None, ranges=ranges)
        housings[Target.GRADS].add(buffers)
        targets[Target.GRADS] = Grads(housings[Target.GRADS], mover, lambda: _release_main_grads(optimizer))
    if optimizer is not None:
        shared = [home.range.tensor.data_ptr() for home in housings[Target.PARAMS].homes]
        if Target.OPTIMIZER_STATE in visits_host:
            housing = housings[Target.OPTIMIZER_STATE] = Housing(Target.OPTIMIZER_STATE, device, arena, ranges=ranges)
            targets[Target.OPTIMIZER_STATE] = OptimizerState(optimizer, shared, housing, mover, verify=options.verify)
        else:
            targets[Target.OPTIMIZER_STATE] = PageableOptimizerState(optimizer, shared, device)
    reference = ReferenceWeights(params, mover, arena) if options.keep_reference else None
    meter = Meter(
        device,
        pinned_bytes=lambda: arena.pinned_bytes,
        mapped_bytes=lambda: sum(housing.mapped_bytes for housing in housings.values()),
        link=link,
    )
    meter.give_back_cache()  # what everything lived in before
    # A generator loads its weights during a refit, beside what is still leaving.
    residency = Residency(targets, table, meter=meter, room={Phase.REFIT: params.nbytes})
    engine = Engine(residency, meter, reference, mover, housings, arena, _guard(residency, model, optimizer))
    sizes = ", ".join(f"{target} {nbytes / 2**30:.2f} GiB" for target, nbytes in engine.nbytes().items())
    logger.info("residency: %s; set up in %.2f s", sizes, time.perf_counter() - start)
    return engine


def needed_host_bytes(
    model: Sequence[torch.nn.Module],
    optimizer: Any | None,
    *,
    table: Table = DEFAULT_TABLE,
    options: Options = Options(),
) -> dict[Target, int]:
    """What `attach` with the same arguments will take of the arena, in bytes; takes nothing."""
    device = next(model[0].parameters()).device
    visits_host = _visit_host(table, options)
    storages = param_storages(model, device)
    params = housed_bytes(Tenant(name, storage, []) for name, storage in storages)
    need = {Target.PARAMS: params if Target.PARAMS in visits_host else 0}
    if optimizer is not None and Target.OPTIMIZER_STATE in visits_host:
        shared = {storage.data_ptr() for _, storage in storages}
        need[Target.OPTIMIZER_STATE] = housed_bytes(state_tenants(optimizer, device, shared))
    return need | ({Target.REFERENCE_WEIGHTS: params} if options.keep_reference else {})


def _visit_host(table: Table, options: Options) -> set[Target]:
    """The targets that need memory of the arena."""
    visitors = {target for cells in table.values() for target, cell in cells.items() if cell is Cell.HOST}
    if options.keep_reference:
        visitors.add(Target.PARAMS)  # the policy's weights wait there while the reference computes
    return visitors if options.pinned_optimizer_state else visitors - {Target.OPTIMIZER_STATE}


def _guard(residency: Residency, model: Sequence[torch.nn.Module], optimizer: Any | None) -> list[Callable[[], None]]:
    """Have forward passes ask for the params, and optimizer steps for their state; returns how to stop that.

    This is where late arrivals are waited for, and where a use in the wrong phase ends in words and not in an illegal
    memory access.
    """

    def before_forward(*_: object) -> None:
        residency.require(Target.PARAMS)

    def before_step(*_: object) -> None:
        residency.require(Target.OPTIMIZER_STATE)

    hooks = [chunk.register_forward_pre_hook(before_forward) for chunk in model]
    if optimizer is not None:
        hooks += [inner.register_step_pre_hook(before_step) for inner in torch_optimizers(optimizer)]
    return [hook.remove for hook in hooks]


def _release_main_grads(optimizer: Any | None) -> None:
    """Drop the fp32 gradients that megatron-core makes of a bf16 model's, and its views of the gradient buffers."""
    if optimizer is None:
        return
    for inner in torch_optimizers(optimizer):
        for group in inner.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
                if hasattr(parameter, "decoupled_grad"):
                    parameter.decoupled_grad = None
