"""Views memory as tensors, and points tensors at other memory."""

from collections.abc import Iterable

import torch


def bytes_of(storage: torch.UntypedStorage, device: torch.device) -> torch.Tensor:
    """Returns all bytes of a storage on a device: uint8 [nbytes]."""
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def point_at(tensors: Iterable[torch.Tensor], memory: torch.Tensor, shift: int) -> None:
    """Points tensors at other memory, keeping their dtype, shape and strides.

    Args:
        tensors: tensors of one storage.
        memory: uint8, covering its whole storage.
        shift: bytes to add to their offsets in their present storage.
    """
    for tensor in tensors:
        tensor.data = view_like(tensor, memory, int(tensor.storage_offset()) * tensor.element_size() + shift)


def view_like(tensor: torch.Tensor, memory: torch.Tensor, offset: int) -> torch.Tensor:
    """Views `memory`, which covers its storage, from byte `offset` with the dtype, shape and strides of a tensor."""
    start, rest = divmod(offset, tensor.element_size())
    assert rest == 0
    view = torch.empty(0, dtype=tensor.dtype, device=memory.device)
    return view.set_(memory.untyped_storage(), start, tensor.shape, tensor.stride())
