"""Makes placeholders without memory for tensors whose data is on the host."""

import torch


def has_no_memory(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is a placeholder, which has one element's memory for all of its elements.

    One element is all that a 0-dim tensor has anyway; such a tensor is a placeholder if it is NaN.
    """
    has_one = tensor.untyped_storage().nbytes() == tensor.element_size() and tensor.stride() == (0,) * tensor.dim()
    return has_one and (tensor.dim() > 0 or bool(tensor.isnan()))


def placeholder(like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Makes a tensor with the memory of only one element, for state that is on the host; floats read as NaN.

    torch refuses to write to it. It has the device and shape of `like`, so that gradients can be assigned to it.
    """
    value = float("nan") if dtype.is_floating_point else -1
    return torch.full((1,), value, dtype=dtype, device=like.device).as_strided(like.shape, (0,) * like.dim())
