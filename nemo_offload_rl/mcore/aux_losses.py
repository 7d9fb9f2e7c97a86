"""Measures the auxiliary losses of experts, which megatron-core's routers record layer by layer, as NeMo-RL does."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker, get_moe_metrics_tracker

_NAMES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
_GLOBAL, _Z_LOSS = _NAMES["global_aux_loss"], "z_loss"


class AuxLosses:
    """Averages auxiliary losses, without their coefficients, over the micro-batches of a call of `train`.

    The ranks reduce them themselves: megatron-core's own reduction would give a pipeline stage without experts other
    values than the rest, and needs equal numbers of micro-batches.

    Args:
        config: the model's TransformerConfig.
        per_layer: also report each layer's losses.
        device: where the routers compute.
    """

    def __init__(self, config: Any, *, per_layer: bool, device: torch.device) -> None:
        self._per_layer = per_layer
        self._names = _recorded(config)
        self._sums = torch.zeros(len(self._names), config.num_layers, device=device)
        self._num_microbatches = 0
        destroy_moe_metrics_tracker()  # an earlier model's has its number of layers
        for name in self._names:  # now, so that captured graphs add to tensors that stay
            get_moe_metrics_tracker().ensure_initialized(name, config.num_layers, device)

    def start(self) -> None:
        """Begin a call of `train`."""
        self._sums.zero_()
        self._num_microbatches = 0

    @contextlib.contextmanager
    def step(self, num_microbatches: int) -> Iterator[None]:
        """Measure an optimizer step of so many micro-batches, which runs inside."""
        tracker = get_moe_metrics_tracker()
        tracker.clear()  # of a failed step, or of a capture's warm-up
        yield
        for sums, name in zip(self._sums, self._names, strict=True):
            sums += tracker.metrics[name].values
        self._num_microbatches += num_microbatches

    def metrics(self) -> dict[str, float]:
        """Returns NeMo-RL's metrics of the call, equal on every rank; collective.

        The mean over layers counts those without experts as 0.
        """
        if not self._names:
            return {}
        sums = torch.cat([self._sums.flatten(), self._sums.new_tensor([self._num_microbatches])])
        # A rank has the losses of its own layers; those of load balancing over its shard of the sequence are a part.
        torch.distributed.all_reduce(sums, group=mpu.get_model_parallel_group())
        torch.distributed.all_reduce(sums, group=mpu.get_data_parallel_group(with_context_parallel=True))
        *totals, num_microbatches = sums.tolist()
        num_layers = self._sums.shape[1]
        shards = mpu.get_tensor_model_parallel_world_size() * mpu.get_context_parallel_world_size()
        microbatches = num_microbatches / (shards * mpu.get_pipeline_model_parallel_world_size())
        counts = dict.fromkeys(self._names, microbatches)
        # The sum over ranks has the mean of each shard's rank; and the parts of one loss from each replica.
        counts |= {_Z_LOSS: microbatches * shards, _GLOBAL: microbatches / mpu.get_data_parallel_world_size()}
        metrics = {}
        for index, name in enumerate(self._names):
            values = totals[index * num_layers : (index + 1) * num_layers]
            metrics[f"moe/{name}"] = sum(values) / num_layers / counts[name]
            if self._per_layer:
                metrics |= {f"moe/moe/{name}_layer_{layer}": value / counts[name] for layer, value in enumerate(values)}
        return metrics


def _recorded(config: Any) -> list[str]:
    """Returns the names of the losses that the model has."""
    if (config.num_moe_experts or 0) <= 1:
        return []
    kinds, coefficients = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
    pairs = zip(kinds, coefficients, strict=True) if isinstance(kinds, list) else [(kinds, coefficients)]
    names = [_NAMES[kind] for kind, coefficient in pairs if kind in _NAMES and coefficient > 0]
    # Of a coefficient of 0, megatron-core records 0 / 0.
    return [*dict.fromkeys(names), *([_Z_LOSS] if config.moe_z_loss_coeff else [])]
