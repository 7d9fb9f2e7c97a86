"""Changes megatron-core's optimizers: their masters and CPU share, and how gradients reach them.

Makes megatron-core build its optimizer around `CpuOptimizer` instead of its own `HybridDeviceOptimizer`.
`HybridDeviceOptimizer` trains from the weights that existed when it was built; loses its masters and its step count in
a checkpoint, and with the count its learning rate's meaning; and reads gradients that are still being written. See
docs/optimizer-offload.md.

Makes megatron-core's optimizers create fp32 masters without memory, for optimizer state that lives on the host.
DistributedOptimizer and Float16OptimizerWithFloat16Params make all masters on the GPU when they are built: 4 bytes per
parameter, which streamed state is meant to save.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core import optimizer as core
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, distrib_optimizer, get_megatron_optimizer
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from nemo_offload_rl.mcore.optimizer.cpu_optimizer import CpuOptimizer
from nemo_offload_rl.residency.streamed.init_state import placeholder

logger = logging.getLogger(__name__)


def build_optimizer(config: OptimizerConfig, model: Sequence[Any]) -> MegatronOptimizer:
    """Build megatron-core's optimizer; with `optimizer_cpu_offload`, `take_host_memory` has to follow.

    Args:
        config: the optimizer's config.
        model: the chunks, in DistributedDataParallel.
    """
    if not config.optimizer_cpu_offload:
        return get_megatron_optimizer(config, list(model), use_gloo_process_groups=False)
    with _cpu_optimizer_class_patched():
        optimizer = get_megatron_optimizer(config, list(model), use_gloo_process_groups=False)
    for part in optimizer.chained_optimizers:
        if isinstance(part.optimizer, CpuOptimizer):
            part.optimizer.split(masters_in_state=config.use_precision_aware_optimizer)
    return optimizer


def reload_masters(optimizer: MegatronOptimizer) -> None:
    """Copy the model's parameters into all float32 masters, of whichever optimizer.

    Beside a CPU optimizer, megatron-core's own `reload_model_params` does not update its masters on the GPU.
    """
    for part in optimizer.chained_optimizers:
        if isinstance(part.optimizer, CpuOptimizer):
            _reload_gpu_masters(part)
    optimizer.reload_model_params()


@torch.no_grad()
def _reload_gpu_masters(part: Any) -> None:
    groups = zip(part.model_float16_groups, part.shard_fp32_from_float16_groups, strict=True)
    for param, master in ((p, m) for params, masters in groups for p, m in zip(params, masters, strict=True)):
        if master is not None:  # megatron-core has none with its precision-aware optimizer
            shard = part._get_model_param_range_map(param)["param"]
            master.copy_(param.view(-1)[shard.start : shard.end])


@contextlib.contextmanager
def _cpu_optimizer_class_patched() -> Iterator[None]:
    modules = (core, distrib_optimizer)
    before = [vars(module)["HybridDeviceOptimizer"] for module in modules]
    try:
        for module in modules:
            vars(module)["HybridDeviceOptimizer"] = CpuOptimizer
        yield
    finally:
        for module, cls in zip(modules, before, strict=True):
            vars(module)["HybridDeviceOptimizer"] = cls


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


def add_gradients_on_this_stream(chunks: list[Any]) -> list[RemovableHandle]:
    """Recreate autograd's gradient-accumulation nodes of DistributedDataParallel on the current stream.

    A node runs on the stream that it was created on, and megatron-core creates these on one that nothing else uses, so
    that each gradient takes an event there and one back. In one arrangement of streams the additions that waited there
    made an H200's copies to the host 8% slower (docs/decisions/activation-manager.md).

    Args:
        chunks: the model's chunks, in DistributedDataParallel.

    Returns:
        The new nodes' hooks, which have to live as long as the model.
    """
    hooks: list[RemovableHandle] = []
    for ddp in chunks:
        parameters = [parameter for parameter in ddp.module.parameters() if parameter.requires_grad]
        assert len(ddp.grad_accs) == len(parameters), "each parameter with a gradient must have one node"
        ddp.grad_accs.clear()  # drops the last references to the old nodes
        for parameter in parameters:
            node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
            hooks.append(node.register_hook(ddp._make_backward_post_hook(parameter)))
            ddp.grad_accs.append(node)
    return hooks
