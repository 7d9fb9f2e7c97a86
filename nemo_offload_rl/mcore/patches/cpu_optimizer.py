"""Makes megatron-core build its optimizer around `CpuOptimizer` instead of its own `HybridDeviceOptimizer`.

`HybridDeviceOptimizer` trains from the weights that existed when it was built; loses its masters and its step count in
a checkpoint, and with the count its learning rate's meaning; and reads gradients that are still being written. See
docs/optimizer-offload.md.
"""

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core import optimizer as core
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, distrib_optimizer, get_megatron_optimizer

from nemo_offload_rl.mcore.optimizer.cpu_optimizer import CpuOptimizer

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
