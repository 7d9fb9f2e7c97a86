"""Makes megatron-core's optimizers create fp32 masters without memory, for optimizer state that lives on the host.

DistributedOptimizer and Float16OptimizerWithFloat16Params make all masters on the GPU when they are built: 4 bytes per
parameter, which streamed state is meant to save.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from nemo_offload_rl.residency.streamed.placeholder import placeholder


class _MastersWithoutMemory(TorchFunctionMode):
    """Makes `parameter.clone().float()` return a placeholder, which the offloader fills on the host."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.float and args[0].dtype in (torch.bfloat16, torch.float16):
            return placeholder(args[0], torch.float32)
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def masters_without_memory() -> Iterator[None]:
    """Build megatron-core's optimizer inside; afterwards attach an engine whose table streams optimizer state."""
    with _MastersWithoutMemory():
        yield
