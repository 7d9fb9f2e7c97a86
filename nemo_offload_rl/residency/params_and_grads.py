"""Implements params and grads as targets.

megatron-core's DistributedDataParallel keeps both in flat buffers; frozen parameters, parameters outside its buffers
and module buffers (rotary frequencies, router biases) have memory of their own and move along with the params.
"""

import gc
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from nemo_offload_rl.residency.context import TargetContext
from nemo_offload_rl.residency.flat_buffer import (
    BufferEntry,
    BufferSlice,
    FlatBuffer,
    FlatBufferTarget,
    flat_buffer_bytes,
)
from nemo_offload_rl.residency.optimizer_state import release_main_grads
from nemo_offload_rl.residency.table import Placement, ShardFacts, Target
from nemo_offload_rl.residency.target import Move, ResidencyError
from nemo_offload_rl.residency.transfer import ChunkError, Mover

logger = logging.getLogger(__name__)


def estimate_param_bytes(facts: ShardFacts) -> int:
    """Returns the bytes of a rank's parameters, frozen ones included."""
    return (facts.num_params + facts.num_frozen_params) * facts.param_size


def estimate_grad_bytes(facts: ShardFacts) -> int:
    """Returns the bytes of a rank's gradient buffers, and of fp32 gradients beside them."""
    return facts.num_params * (facts.grad_size + facts.local_grad_size)


def ddp_buffers(model: Sequence[torch.nn.Module]) -> Iterator[Any]:
    """Yields the flat buffers of chunks that are wrapped in megatron-core's DistributedDataParallel."""
    for chunk in model:
        for kind in ("buffers", "expert_parallel_buffers"):
            found = getattr(chunk, kind, ())
            if not callable(found):  # a plain module's `buffers` is a method
                yield from found


def param_storages(model: Sequence[torch.nn.Module], device: torch.device) -> list[tuple[str, torch.UntypedStorage]]:
    """Returns the storages of a model's parameters and module buffers on a device, named, the largest first."""
    found: dict[int, tuple[str, torch.UntypedStorage]] = {}
    for index, chunk in enumerate(model):
        for name, tensor in _named_tensors(chunk):
            storage = tensor.untyped_storage()
            if tensor.device == device and storage.nbytes():
                found.setdefault(storage.data_ptr(), (f"{index}.{name}", storage))
    return sorted(found.values(), key=lambda named: -named[1].nbytes())


def param_entries(model: Sequence[torch.nn.Module], device: torch.device) -> list[BufferEntry]:
    """Returns the entries of `param_storages`, each with every tensor that views it."""
    return _with_views(param_storages(model, device))


def _with_views(storages: Sequence[tuple[str, torch.UntypedStorage]]) -> list[BufferEntry]:
    views = tensors_by_storage(storage for _, storage in storages)
    return [BufferEntry(name, storage, views[storage.data_ptr()]) for name, storage in storages]


def _named_tensors(chunk: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from chunk.named_parameters()
    for name, module in chunk.named_modules():
        # Not named_buffers(): DistributedDataParallel has a list of that name.
        yield from ((f"{name}.{key}", tensor) for key, tensor in module._buffers.items() if tensor is not None)


def grad_entries(model: Sequence[torch.nn.Module]) -> list[BufferEntry]:
    """Returns the entries of a model's gradient buffers, and of its fp32 gradients that are accumulated beside them."""
    buffers = list(ddp_buffers(model))
    named = [(f"gradient buffer {number}", buffer.grad_data) for number, buffer in enumerate(buffers)]
    named += [  # of param_name_patterns_for_fp32_local_accumulation
        (f"fp32 gradient {index} of gradient buffer {number}", grad)
        for number, buffer in enumerate(buffers)
        for index, grad in enumerate(getattr(buffer, "extra_main_grads", ()))
    ]
    found = {grad.data_ptr(): (name, grad.untyped_storage()) for name, grad in named}
    return _with_views(list(found.values()))


def tensors_by_storage(storages: Iterable[torch.UntypedStorage]) -> dict[int, list[torch.Tensor]]:
    """Returns all tensor objects of this process that view the given storages, by the storage's address.

    megatron-core keeps views of a DDP buffer in parameters, `main_grad`, buckets and optimizer groups; the garbage
    collector knows all of them, and those of future versions. Storages are compared, and not addresses: new memory may
    get the address that a tensor of a closed offloader still has.

    Objects that `gc.freeze` has hidden, as vLLM does in its process, are unfrozen if views are missing: the collector
    does not list them.
    """
    storages = list(storages)
    found = _listed_by_storage(storages)
    # One use is of `storage`; others that were not found are of graphs, or of frozen tensors.
    is_missing = any(torch._C._storage_Use_Count(one._cdata) > len(found[one.data_ptr()]) + 1 for one in storages)
    if is_missing and (num_frozen := gc.get_freeze_count()):
        # Not frozen again: reference cycles that have come since would never be freed.
        logger.info("the garbage collector's %d frozen objects are unfrozen to find views of the model", num_frozen)
        gc.unfreeze()
        found = _listed_by_storage(storages)
    return found


def _listed_by_storage(storages: Sequence[torch.UntypedStorage]) -> dict[int, list[torch.Tensor]]:
    found: dict[int, list[torch.Tensor]] = {storage.data_ptr(): [] for storage in storages}
    address_of = {storage._cdata: storage.data_ptr() for storage in storages}
    for candidate in gc.get_objects():
        # type(), since isinstance() reads __class__, for which some proxies import a module.
        if issubclass(type(candidate), torch.Tensor) and (storage := _storage_id(candidate)) in address_of:
            found[address_of[storage]].append(candidate)
    return found


def _storage_id(tensor: torch.Tensor) -> int | None:
    """Returns the identity of the storage; None for a tensor without one, such as a DTensor or a lazy parameter."""
    with torch._C.DisableTorchFunctionSubclass():
        try:
            return tensor.untyped_storage()._cdata if torch._C._has_storage(tensor) else None
        except (RuntimeError, ValueError):  # a wrapper; the tensors in it are found on their own
            return None


class Params(FlatBufferTarget):
    """Moves the parameters and module buffers between the GPU and host memory.

    Args:
        model: the model's chunks, which they belong to.
        flat_buffer: the flat buffer of this target.
        mover: copies the ranges.
        verify: see `FlatBufferTarget`.

    Attributes:
        is_swapped_out: whether other weights are in the GPU ranges, and the params themselves in their host memory.
    """

    def __init__(
        self, model: Sequence[torch.nn.Module], flat_buffer: FlatBuffer, mover: Mover, *, verify: bool = False
    ) -> None:
        super().__init__(flat_buffer, mover, verify=verify)
        self.is_swapped_out = False
        self._model = model

    def start(self, placement: Placement) -> Move:
        """See `OffloadTarget`."""
        if self.is_swapped_out:
            raise ResidencyError(
                f"{self.flat_buffer.owner} cannot move to {placement} while the reference weights are swapped in; "
                "exit the `swapped_in` context before the next phase."
            )
        if placement is Placement.HOST:
            self.adopt_new_tensors()
        return super().start(placement)

    def strays(self) -> list[tuple[str, torch.UntypedStorage]]:
        """Returns parameters and buffers that got new memory after they had moved in, as by a change of dtype."""
        known = {backed.range.tensor.data_ptr() for backed in self.flat_buffer.backed_ranges}
        storages = param_storages(self._model, self.flat_buffer.device)
        return [(name, storage) for name, storage in storages if storage.data_ptr() not in known]

    def adopt_new_tensors(self) -> None:
        """Move the storages of `strays` into a range.

        Raises:
            MemoryError: the host has no room.
            torch.OutOfMemoryError: the GPU has none.
        """
        strays = self.strays()
        if not strays:
            return
        # A storage with unknown views, such as those of a graph that is still alive, stays where it is.
        entries = [entry for entry in _with_views(strays) if not entry.num_unknown_views()]
        logger.info(
            "%s: moving %d of %d reallocated tensors into a range", self.flat_buffer.owner, len(entries), len(strays)
        )
        views = tensors_by_storage(backed.range.tensor.untyped_storage() for backed in self.flat_buffer.backed_ranges)

        def viewed(earlier: BufferSlice) -> bool:
            # Such as `original_inv_freq`, which transformers' rotary embeddings keep beside a scaled `inv_freq`.
            memory = earlier.backed.range.tensor
            begin, end = earlier.offset, earlier.offset + earlier.nbytes
            return any(
                tensor is not memory and begin <= tensor.storage_offset() * tensor.element_size() < end
                for tensor in views[memory.data_ptr()]
            )

        self.flat_buffer.add_or_replace(entries, viewed)


def param_host_bytes(context: TargetContext) -> int:
    """Returns the bytes that the params will take in the arena."""
    if not _params_visit_host(context):
        return 0
    return flat_buffer_bytes(
        BufferEntry(name, storage, []) for name, storage in param_storages(context.model, context.device)
    )


def make_params(context: TargetContext) -> Params:
    """Moves the params into ranges."""
    flat_buffer = context.flat_buffer(Target.PARAMS, with_host_side=_params_visit_host(context))
    flat_buffer.add(param_entries(context.model, context.device))
    return Params(context.model, flat_buffer, context.mover, verify=context.options.verify)


def _params_visit_host(context: TargetContext) -> bool:
    # The policy's weights are in the params' host memory while the reference weights are swapped in.
    return context.visits_host(Target.PARAMS) or context.options.with_reference


class Grads:
    """Drops the gradients, and brings them back zeroed at the same addresses.

    Args:
        flat_buffer: the flat buffer of the gradient buffers, without a host side.
        mover: maps and unmaps the ranges.
        optimizer: its own copies of gradients are dropped as well; None without one.
    """

    placements = frozenset({Placement.GPU, Placement.DROPPED})
    lazy_wait = False
    needs_gpu_to_save = False

    def __init__(self, flat_buffer: FlatBuffer, mover: Mover, optimizer: Any | None) -> None:
        self.flat_buffer = flat_buffer
        self._mover = mover
        self._optimizer = optimizer

    @property
    def nbytes(self) -> int:
        """Returns the GPU memory that the target takes while it is on the GPU."""
        return self.flat_buffer.nbytes

    @property
    def mapped_bytes(self) -> int:
        """Returns the GPU memory that its ranges have mapped now."""
        return self.flat_buffer.mapped_bytes

    def start(self, placement: Placement) -> Move:
        """See `OffloadTarget`."""
        if placement is Placement.DROPPED:
            release_main_grads(self._optimizer)
            return self._mover.drop(self.flat_buffer.backed_ranges)
        transfer = self._mover.take(self.flat_buffer.backed_ranges)
        transfer.on_arrival = self._zero
        return transfer

    def _zero(self) -> None:
        for backed in self.flat_buffer.backed_ranges:
            backed.range.tensor.zero_()

    def name_for_error(self, error: Exception) -> str:
        """Returns the name of the buffer that an error of a move is about."""
        assert isinstance(error, ChunkError)
        return self.flat_buffer.name_at(error)

    def host_view(self, tensor: torch.Tensor) -> None:
        """Returns None: gradients are never on the host."""

    def close(self) -> None:
        """Free all memory."""
        self.flat_buffer.close()


def grad_host_bytes(context: TargetContext) -> int:
    """Returns 0: gradients take no memory in the arena."""
    return 0


def make_grads(context: TargetContext) -> Grads | None:
    """Moves the gradient buffers into ranges; None for a model without any, as without DistributedDataParallel."""
    entries = grad_entries(context.model)
    if not entries:
        return None
    flat_buffer = context.flat_buffer(Target.GRADS, with_host_side=False)
    flat_buffer.add(entries)
    return Grads(flat_buffer, context.mover, context.optimizer)
