"""Runs the residency offloader in trainers that move each kind of state separately: `adopt(model, optimizer)`."""

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from nemo_offload_rl.memory.errors import preserve_first_error
from nemo_offload_rl.memory.numa import gpu_numa_node
from nemo_offload_rl.memory.pinned import PinnedArena
from nemo_offload_rl.placement.gpus import torch_pci_bus_id
from nemo_offload_rl.residency.attach import Offloader, attach
from nemo_offload_rl.residency.params_and_grads import Params
from nemo_offload_rl.residency.table import DEFAULT_TABLE, Placement, Table, Target

Device = str | torch.device


class AdoptedState:
    """Moves parameters, gradients and optimizer state of an adopted model to the host and back, each separately.

    A move to "cpu" copies parameters and optimizer state to the host and drops gradients; it returns once the driver
    has the GPU memory back, so that another process can take it. A move to "cuda" returns when parameters, and
    gradients of zeros, are ready for the current stream. The optimizer's `step`, `state_dict` and `load_state_dict`
    wait for its state, and raise while it is on the host; so do the methods of megatron-core's optimizers that save
    and load parameter state, and the model's `forward`, `state_dict` and `load_state_dict` for parameters. Moving state
    that is there already, or that this model does not have, is a no-op.

    Args:
        offloader: makes the moves.
        close_arena: closes the offloader's arena; called by `close`, after the offloader has released its memory.

    Attributes:
        offloader: the residency offloader that makes the moves; its `meter` has the measurements.
    """

    def __init__(self, offloader: Offloader, close_arena: Callable[[], None] = lambda: None) -> None:
        self.offloader = offloader
        self._close_arena = close_arena

    def move_params(self, device: Device) -> None:
        """Move the parameters and module buffers."""
        self.move(device, [Target.PARAMS])

    def move_grads(self, device: Device) -> None:
        """Drop the gradient buffers ("cpu"), or bring them back zeroed ("cuda")."""
        self.move(device, [Target.GRADS])

    def move_optimizer(self, device: Device) -> None:
        """Move the optimizer state: masters and moments."""
        self.move(device, [Target.OPTIMIZER_STATE])

    def move(self, device: Device, targets: Target | Iterable[Target]) -> None:
        """Move one or several kinds of state at once.

        Raises:
            ValueError: the device is neither the host nor the model's GPU, or `adopt` was told not to offload this
                kind of state.
            NoRoomError: one of them could not move; those that had moved in this call are back where they were.
            ResidencyError: CUDA has failed; this process cannot go on.
        """
        residency, to_host = self.offloader.residency, self._is_host(device)
        wanted = {
            target: _placement_off_gpu(target) if to_host else Placement.GPU
            for target in _several(targets)
            if target in self.offloader.targets
        }
        if to_host and any(residency.where(target) is Placement.GPU for target in wanted):
            self.offloader.meter.give_back_cache()  # before the copies: it waits for every stream
        residency.place(wanted)
        if to_host:
            residency.wait_until_released()

    @contextlib.contextmanager
    def on_gpu(self, targets: Target | Iterable[Target]) -> Iterator[None]:
        """Bring kinds of state to the GPU for a `with` block, as checkpoints need them, and move them back after it."""
        residency = self.offloader.residency
        before = {target: residency.where(target) for target in _several(targets) if target in self.offloader.targets}
        try:
            self.move("cuda", before)
            for target in before:
                residency.require(target)
            yield
        finally:
            self.move("cpu", [target for target, placement in before.items() if placement is not Placement.GPU])

    def outside_ranges(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor that another process can open by legacy CUDA IPC, which cannot export memory of a range.

        Returns:
            A copy, if the tensor is in the parameters' ranges; any other tensor itself.
        """
        params = self.offloader.targets[Target.PARAMS]
        assert isinstance(params, Params)
        return tensor.clone() if params.flat_buffer.holds(tensor) else tensor

    def close(self) -> None:
        """Release all memory; the model and the optimizer cannot be used afterwards.

        An arena that was given to `adopt` stays open: other state may be in it.
        """
        with preserve_first_error(), contextlib.ExitStack() as stack:
            stack.callback(self._close_arena)
            stack.callback(self.offloader.close)

    def _is_host(self, device: Device) -> bool:
        asked, own = torch.device(device), self.offloader.context.device
        if asked.type == "cpu":
            return True
        if asked.type != "cuda" or (own.type == "cuda" and asked.index not in (None, own.index)):
            raise ValueError(f'Cannot move adopted state to {device}; it moves to "cpu" and back to "cuda" ({own}).')
        return False


def adopt(
    model: torch.nn.Module | Sequence[torch.nn.Module],
    optimizer: Any | None,
    arena: PinnedArena | None = None,
    *,
    offloaded: Collection[Target] = (Target.PARAMS, Target.OPTIMIZER_STATE),
) -> AdoptedState:
    """Move a model and its optimizer state into ranges, and return the object that moves them to the host and back.

    Call it once, after both are built and before the first forward pass. They stay the same objects, on the GPU.

    Args:
        model: a module or its chunks, each bare or in megatron-core's DistributedDataParallel.
        optimizer: a megatron-core or torch optimizer; None if nothing is trained.
        arena: allocates the host memory; adopted models may share it. None for page-locked memory of the GPU's NUMA
            node.
        offloaded: kinds of state that can move to the host; no host memory is allocated for the others. Gradients can
            always be dropped.

    Raises:
        ValueError: parameters are DTensors, or some object holds views that would not follow a move.
        MemoryError: the host has too little memory.
        torch.OutOfMemoryError: the GPU has too little memory. After any of these errors the model and the optimizer
            cannot be used.
    """
    chunks = [model] if isinstance(model, torch.nn.Module) else list(model)
    sharded = [name for chunk in chunks for name, tensor in chunk.named_parameters() if isinstance(tensor, DTensor)]
    if sharded:
        raise ValueError(
            f"{sharded[0]} and {len(sharded) - 1} more parameters are DTensors, which cannot move in ranges: train "
            "with DistributedDataParallel of megatron-core instead of FSDP, or without the adapter."
        )
    is_given = arena is not None
    if arena is None:
        arena = PinnedArena(numa_node=_numa_node(next(chunks[0].parameters()).device), huge_pages=True)
    offloader = attach(chunks, optimizer, arena, table=_table(offloaded))
    return AdoptedState(offloader) if is_given else AdoptedState(offloader, arena.close)


def _table(offloaded: Collection[Target]) -> Table:
    """Returns the default table, with UNCHANGED in place of HOST for targets that are not offloaded."""
    return {
        phase: {
            target: Placement.UNCHANGED if placement is Placement.HOST and target not in offloaded else placement
            for target, placement in placements.items()
        }
        for phase, placements in DEFAULT_TABLE.items()
    }


def _several(targets: Target | Iterable[Target]) -> list[Target]:
    return [targets] if isinstance(targets, Target) else list(targets)  # a target is a text, and so iterable


def _placement_off_gpu(target: Target) -> Placement:
    return Placement.DROPPED if target is Target.GRADS else Placement.HOST


def _numa_node(device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    return gpu_numa_node(torch_pci_bus_id(torch.cuda.current_device() if device.index is None else device.index))
