"""Checks results of CUDA driver calls (cuda.bindings) and wraps driver memory as tensors."""

from typing import Any

import torch


def checked(result: tuple[Any, ...]) -> Any:
    """Returns the value of a driver call.

    Raises:
        RuntimeError: the driver reported an error.
    """
    error, *values = result
    if int(error) != 0:
        raise RuntimeError(f"The CUDA driver reported {error!r}; the worker cannot continue.")
    return values[0] if len(values) == 1 else None


def device_tensor(address: int, nbytes: int, device_index: int) -> torch.Tensor:
    """Wraps GPU memory at `address` as a tensor, uint8 [nbytes]; the tensor does not own the memory."""
    tensor = torch.as_tensor(_ArrayInterface(address, nbytes), device=torch.device("cuda", device_index))
    assert tensor.data_ptr() == address
    return tensor


class _ArrayInterface:
    """Exposes device memory to torch as a uint8 array."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
