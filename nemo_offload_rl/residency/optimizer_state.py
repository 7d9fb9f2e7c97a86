"""Implements optimizer state as a target: the fp32 masters and moments of megatron-core's optimizer classes."""

import itertools
import logging
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

import torch

from nemo_offload_rl.residency.context import TargetContext
from nemo_offload_rl.residency.flat_buffer import BufferEntry, FlatBuffer, FlatBufferTarget, flat_buffer_bytes
from nemo_offload_rl.residency.table import ShardFacts, Target
from nemo_offload_rl.residency.target import Move
from nemo_offload_rl.residency.transfer import Gate, Mover

logger = logging.getLogger(__name__)


def estimate_bytes(facts: ShardFacts) -> int:
    """Returns the bytes of a rank's optimizer state, without what the CPU optimizer keeps in host memory."""
    on_cpu = facts.num_cpu_optimizer_params
    return (facts.num_optimizer_params - on_cpu) * facts.optimizer_size + on_cpu * facts.cpu_optimizer_gpu_size


def optimizer_parts(optimizer: Any) -> Iterator[tuple[Any, torch.optim.Optimizer]]:
    """Yields each optimizer of a chain, and the torch optimizer inside of it, which may be itself.

    Args:
        optimizer: one of torch's, or of megatron-core's: chained, distributed, mixed-precision or fp32.
    """
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = part if isinstance(part, torch.optim.Optimizer) else part.optimizer
        if inner is not None:  # a rank without trainable parameters has a stub
            yield part, inner


def stepped_optimizers(optimizer: Any) -> Iterator[torch.optim.Optimizer]:
    """Yields the torch optimizers inside of an optimizer (see `optimizer_parts`)."""
    return (inner for _, inner in optimizer_parts(optimizer))


def torch_optimizers(optimizer: Any) -> Iterator[Any]:
    """Yields the optimizers that hold state: HybridDeviceOptimizer has one of its own for each device."""
    for inner in stepped_optimizers(optimizer):
        yield from getattr(inner, "sub_optimizers", [inner])


def _moving_optimizers(optimizer: Any) -> Iterator[Any]:
    """Yields the optimizers whose state moves: all but those that step on the CPU."""
    for inner in stepped_optimizers(optimizer):
        on_cpu = getattr(inner, "cpu_optimizers", ())
        yield from (
            one for one in getattr(inner, "sub_optimizers", [inner]) if all(one is not other for other in on_cpu)
        )


def state_tensors(optimizer: Any, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the masters and state tensors that an optimizer keeps on a device, each with a name that does not change.

    The 0-dim `step` of torch's Adam is left out: moving it would cost a synchronisation for each parameter. With a CPU
    optimizer, megatron-core may have masters on the GPU also of parameters that are stepped on the CPU.
    """
    seen = set()
    for name, tensor in _inner_tensors(optimizer, device):
        seen.add(id(tensor))
        yield name, tensor
    for index, outer in enumerate(stepped_optimizers(optimizer)):
        params = (param for group in outer.param_groups for param in group["params"])
        for number, parameter in enumerate(params):
            if id(parameter) not in seen and parameter.device == device:
                yield f"outer master[{index}.{number}]", parameter


def _inner_tensors(optimizer: Any, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    for index, inner in enumerate(_moving_optimizers(optimizer)):
        number = -1
        for group in inner.param_groups:
            for parameter in group["params"]:
                number += 1
                place = f"{index}.{number}"
                if parameter.device == device:
                    yield f"master[{place}]", parameter
                for key, value in inner.state.get(parameter, {}).items():
                    tensor = getattr(value, "_data", value)  # Transformer Engine's fp8 tensors hold their bytes there
                    if isinstance(tensor, torch.Tensor) and tensor.ndim > 0 and tensor.device == device:
                        yield f"{key}[{place}]", tensor


def has_scaled_moments(optimizer: Any) -> bool:
    """Returns whether moments are kept in fewer bits than fp32, which megatron-core converts on the GPU to save them.

    Transformer Engine's fp8 tensors report float32 as their dtype, and hold their bytes in `_data`.
    """
    return any(
        isinstance(value, torch.Tensor)
        and (hasattr(value, "_data") or (value.is_floating_point() and value.dtype is not torch.float32))
        for inner in torch_optimizers(optimizer)
        for state in inner.state.values()
        for value in state.values()
    )


def _by_storage(optimizer: Any, device: torch.device, excluded: Container[int]) -> list[list[tuple[str, torch.Tensor]]]:
    """Returns an optimizer's tensors with their names, grouped by storage.

    Args:
        optimizer: see `optimizer_parts`.
        device: where the optimizer steps.
        excluded: addresses of storages that belong to another target, or are in a flat buffer already.
    """
    found: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in state_tensors(optimizer, device):
        address = tensor.untyped_storage().data_ptr()
        if address and address not in excluded:
            found.setdefault(address, []).append((name, tensor))
    return list(found.values())


def _entries(named: Sequence[tuple[str, torch.Tensor]]) -> list[BufferEntry]:
    """Returns the entries of one storage's tensors.

    torch.load and deepcopy may put many tensors into one storage, which would be an entry of another size each time. If
    no other tensor shares that storage, each of the tensors gets its own.
    """
    storage = named[0][1].untyped_storage()
    if len(named) == 1 or torch._C._storage_Use_Count(storage._cdata) > len(named) + 1:
        return [BufferEntry(named[0][0], storage, [tensor for _, tensor in named])]
    for _, tensor in named:
        tensor.data = tensor.data.clone()
    return [BufferEntry(name, tensor.untyped_storage(), [tensor]) for name, tensor in named]


def release_main_grads(optimizer: Any | None) -> None:
    """Drop the fp32 gradients that megatron-core makes from bf16 ones, and its views of the gradient buffers."""
    if optimizer is None:
        return
    for inner in itertools.chain(stepped_optimizers(optimizer), torch_optimizers(optimizer)):
        for group in inner.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
                if hasattr(parameter, "decoupled_grad"):
                    parameter.decoupled_grad = None


def host_bytes(context: TargetContext) -> int:
    """Returns the bytes that optimizer state will take in the arena."""
    if context.optimizer is None or not context.visits_host(Target.OPTIMIZER_STATE):
        return 0
    groups = _by_storage(context.optimizer, context.device, model_storages(context))
    return flat_buffer_bytes(BufferEntry(named[0][0], named[0][1].untyped_storage(), []) for named in groups)


def make(context: TargetContext) -> "OptimizerState | None":
    """Move optimizer state into ranges, unless the table never has it on the host; None without an optimizer."""
    if context.optimizer is None:
        return None
    flat_buffer = context.flat_buffer(
        Target.OPTIMIZER_STATE,
        with_host_side=context.visits_host(Target.OPTIMIZER_STATE),
        pin=context.options.pinned_optimizer_state,
    )
    return OptimizerState(
        context.optimizer,
        lambda: model_storages(context),
        flat_buffer,
        context.mover,
        verify=context.options.verify,
    )


def model_storages(context: TargetContext) -> set[int]:
    """Returns the addresses of the storages of the model's parameters, as they are now."""
    tensors = (tensor for chunk in context.model for tensor in chunk.parameters())
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


class OptimizerState(FlatBufferTarget):
    """Moves fp32 masters and moments in ranges; the optimizer's Parameter and state objects stay the same.

    What the optimizer shares with the model (the parameters of an fp32 model, the bf16 views of the precision-aware
    optimizer) belongs to the target of the params and is left out.

    Args:
        optimizer: see `torch_optimizers`.
        model_storages: returns the addresses of the storages of the model's parameters, as they are now.
        flat_buffer: the flat buffer of this target.
        mover: copies the ranges.
        verify: see `FlatBufferTarget`.
    """

    lazy_wait = True  # the hook of attach.py waits before the step of each inner optimizer

    def __init__(
        self,
        optimizer: Any,
        model_storages: Callable[[], set[int]],
        flat_buffer: FlatBuffer,
        mover: Mover,
        *,
        verify: bool = False,
    ) -> None:
        super().__init__(flat_buffer, mover, verify=verify)
        self._optimizer = optimizer
        self._model_storages = model_storages
        self.adopt_new_tensors()

    @property
    def nbytes(self) -> int:
        """Returns the GPU memory that it takes while on the GPU: in ranges or, if it never leaves, outside of them."""
        if self.flat_buffer.has_host_side:
            return super().nbytes
        groups = _by_storage(self._optimizer, self.flat_buffer.device, self._model_storages())
        return sum(named[0][1].untyped_storage().nbytes() for named in groups)

    @property
    def needs_gpu_to_save(self) -> bool:
        """See `has_scaled_moments`."""
        return has_scaled_moments(self._optimizer)

    def adopt_new_tensors(self) -> int:
        """Move tensors that are new since the last call into a range: state of a first step, or of a loaded checkpoint.

        Returns:
            The number of tensors that moved in.

        Raises:
            MemoryError: the host has no room.
            torch.OutOfMemoryError: the GPU has none.
        """
        if not self.flat_buffer.has_host_side:  # the state never leaves the GPU
            return 0
        known = {backed.range.tensor.data_ptr() for backed in self.flat_buffer.backed_ranges}
        groups = _by_storage(self._optimizer, self.flat_buffer.device, known | self._model_storages())
        entries = [entry for named in groups for entry in _entries(named)]
        self.flat_buffer.add_or_replace(entries)
        if entries:
            logger.debug("%s: %d more tensors moved into a range", self.flat_buffer.owner, len(entries))
        return len(entries)

    def _leave(self) -> Move:
        if self._verify:
            self.adopt_new_tensors()
            return super()._leave()
        gate = Gate()
        try:
            move = self._mover.out(self.flat_buffer.backed_ranges, gate)
            # Looked for while the copies run: with ten thousand tensors that takes 10 ms.
            if not self.adopt_new_tensors():
                gate.open()
                return move
        finally:
            gate.cancel()  # has no effect on an open gate
        move.wait()
        return super()._leave()


@torch.no_grad()
def make_state(optimizer: Any, group: Mapping[str, Any], parameter: torch.Tensor) -> bool:
    """Make the optimizer state of a parameter that has none.

    For torch's Adam and AdamW it makes what their first step makes; for Transformer Engine's FusedAdam it calls that
    optimizer's own method.

    Args:
        optimizer: a torch optimizer.
        group: the parameter's group.
        parameter: its key in `optimizer.state`.

    Returns:
        Whether the optimizer is one of these; if not, nothing is made.
    """
    if isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
        on_device = group["capturable"] or group["fused"]
        names = ["exp_avg", "exp_avg_sq"] + (["max_exp_avg_sq"] if group["amsgrad"] else [])
        optimizer.state[parameter] = {
            "step": torch.zeros((), device=parameter.device if on_device else "cpu"),
            **{name: torch.zeros_like(parameter.detach()) for name in names},
        }
        return True
    if hasattr(optimizer, "initialize_state"):  # FusedAdam, with the argument that its own step gives
        remainders = optimizer.store_param_remainders and parameter.dtype == torch.bfloat16
        optimizer.initialize_state(parameter, remainders)
        return True
    return False
