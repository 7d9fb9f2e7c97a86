"""Stands for a tensor whose data is on the host, without memory of its own."""

import torch


def has_no_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a placeholder, which has one element's memory for all of its elements."""
    return tensor.untyped_storage().nbytes() == tensor.element_size() and tensor.stride() == (0,) * tensor.dim()


def placeholder(like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Makes a tensor that has no memory of its own, for state that is on the host; floats read as not a number.

    torch refuses to write to it. It has the device and shape of another, so that gradients can be assigned to it.
    """
    value = float("nan") if dtype.is_floating_point else -1
    return torch.full((1,), value, dtype=dtype, device=like.device).as_strided(like.shape, (0,) * like.dim())
