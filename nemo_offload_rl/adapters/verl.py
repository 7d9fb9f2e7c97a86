"""Makes verl's Megatron engine move its state in ranges; written for verl 0.9.1.

With `actor_rollout_ref.model.external_lib=nemo_offload_rl.adapters.verl` verl imports this module in each worker before
it builds an engine; verl's registry then prefers the classes of this module on NVIDIA GPUs.
"""

import sys
from collections.abc import Collection, Iterator
from typing import Any

import torch
from megatron.core.parallel_state import get_global_memory_buffer
from verl.utils.megatron_utils import _clear_te_fp8_weight_workspaces
from verl.workers.engine import BaseEngine, EngineRegistry
from verl.workers.engine.megatron import MegatronEngine, MegatronEngineWithLMHead, MegatronEngineWithValueHead

from nemo_offload_rl.adapters.adopt import AdoptedState, adopt
from nemo_offload_rl.residency.table import Target

_SAVED = (Target.PARAMS, Target.OPTIMIZER_STATE)
_OTHER_BACKENDS = ["fsdp", "fsdp2", "fsdp_turbo", "veomni", "torchtitan", "automodel"]
_WITHOUT = "leave external_lib=nemo_offload_rl.adapters.verl out"


class RangeOffload(MegatronEngine):
    """Moves the state of verl's Megatron engine in ranges, wherever verl itself would move it."""

    def __init__(self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any) -> None:
        _require_supported(model_config, engine_config, checkpoint_config)
        super().__init__(model_config, engine_config, optimizer_config, checkpoint_config)
        self._state: AdoptedState | None = None
        self._is_offload_param = self._is_offload_optimizer = False  # else verl resizes the buffers' storages itself

    @property
    def is_param_offload_enabled(self) -> bool:
        """Whether the engine's contexts move parameters and gradients."""
        return bool(self.engine_config.param_offload)

    @property
    def is_optimizer_offload_enabled(self) -> bool:
        """Whether the engine's contexts move optimizer state."""
        return bool(self.engine_config.optimizer_offload)

    def initialize(self) -> None:
        """Build the model and the optimizer, move them into ranges, and offload what the recipe says."""
        if self._state is not None:
            self._state.close()  # verl's `reset` builds them again
            self._state = None
        super().initialize()
        params, optimizer = self.is_param_offload_enabled, self.is_optimizer_offload_enabled
        offloaded = [Target.PARAMS] * params + [Target.OPTIMIZER_STATE] * optimizer
        self._state = adopt(self.module, self.optimizer, offloaded=offloaded)
        self.to("cpu", model=params, optimizer=optimizer, grad=params)

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Move state to "cpu" or "cuda"; gradients leave with the model, as they do in verl.

        Raises:
            ValueError: the call offloads state that the recipe keeps on the GPU, for which there is no host memory.
        """
        BaseEngine.to(self, device=device, model=model, optimizer=optimizer, grad=grad)
        grad = model and (grad or device == "cpu")
        targets = [Target.PARAMS] * model + [Target.GRADS] * grad + [Target.OPTIMIZER_STATE] * optimizer
        if not targets or self._state is None:  # verl's `initialize` ends with a call, when nothing is to move yet
            return
        if device == "cpu":
            self._require_offloaded(targets)
            self._release_scratch()
        self._state.move(device, targets)

    def get_per_tensor_param(self, **kwargs: Any) -> tuple[Iterator[tuple[str, torch.Tensor]], Any]:
        """Return the weights by Hugging Face name, all of them in memory that CUDA IPC can export."""
        state = self._adopted()
        state.move_params("cuda")
        weights, peft_config = super().get_per_tensor_param(**kwargs)
        return ((name, state.outside_ranges(weight)) for name, weight in weights), peft_config

    def get_per_tensor_param_shard(self, **kwargs: Any) -> Any:
        """Return this rank's shards of the weights."""
        self._adopted().move_params("cuda")
        return super().get_per_tensor_param_shard(**kwargs)

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Save a checkpoint, with parameters and optimizer state on the GPU while it is written."""
        with self._adopted().on_gpu(_SAVED):
            super().save_checkpoint(*args, **kwargs)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Load a checkpoint, with parameters and optimizer state on the GPU while it is read."""
        with self._adopted().on_gpu(_SAVED):
            super().load_checkpoint(*args, **kwargs)

    def _adopted(self) -> AdoptedState:
        assert self._state is not None, "verl calls `initialize` first"
        return self._state

    def _require_offloaded(self, targets: Collection[Target]) -> None:
        switches = {
            Target.PARAMS: ("param_offload", self.is_param_offload_enabled),
            Target.OPTIMIZER_STATE: ("optimizer_offload", self.is_optimizer_offload_enabled),
        }
        for target, (key, is_offloaded) in switches.items():
            if target in targets and target in self._adopted().offloader.targets and not is_offloaded:
                raise ValueError(
                    f"verl moves {target} to the CPU, but {key} of the engine is false, so the adapter has no host "
                    f"memory for it; set {key}: true, call `to` without it, or {_WITHOUT}."
                )

    def _release_scratch(self) -> None:
        """Free the scratch buffers that verl, too, frees when it offloads; they are allocated again on demand."""
        for chunk in self.module:
            _clear_te_fp8_weight_workspaces(chunk)
        get_global_memory_buffer().buffer.clear()
        if (te_base := sys.modules.get("transformer_engine.pytorch.module.base")) is not None:
            te_base._dummy_wgrads.clear()


@EngineRegistry.register(model_type="language_model", backend="megatron", device="cuda", vendor="nvidia")
class RangeOffloadWithLMHead(RangeOffload, MegatronEngineWithLMHead):
    """Moves the state of verl's engine for policies and reference policies in ranges."""


@EngineRegistry.register(model_type="value_model", backend="megatron", device="cuda", vendor="nvidia")
class RangeOffloadWithValueHead(RangeOffload, MegatronEngineWithValueHead):
    """Moves the state of verl's engine for critics in ranges."""


@EngineRegistry.register(model_type="language_model", backend=_OTHER_BACKENDS, device="cuda", vendor="nvidia")
@EngineRegistry.register(model_type="value_model", backend=_OTHER_BACKENDS, device="cuda", vendor="nvidia")
class RefusedEngine(BaseEngine):
    """Refuses backends other than Megatron, which would otherwise run without ranges."""

    def __init__(self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any) -> None:
        raise ValueError(
            "nemo_offload_rl.adapters.verl moves the state of verl's Megatron engine, but strategy is "
            f"{engine_config.strategy}; set it to megatron, or {_WITHOUT}."
        )


def _require_supported(model_config: Any, engine_config: Any, checkpoint_config: Any) -> None:
    lora = getattr(model_config, "lora", None) or {}
    refused = {
        "engine.use_megatron_fsdp: true shards parameters as DTensors, which cannot move in ranges": (
            engine_config.use_megatron_fsdp
        ),
        "engine.qat.enable: true has its own export of weights, which has not been tested with ranges": (
            getattr(engine_config.qat, "enable", False)
        ),
        "model.lora without lora.merge: true sends adapters alone while frozen weights stay on the host, and ranges "
        "move all parameters as one": lora.get("rank", 0) > 0 and not lora.get("merge", False),
        "checkpoint.async_save: true writes from GPU memory that has been offloaded by then": getattr(
            checkpoint_config, "async_save", False
        ),
        "a trainer with detached workers (fully asynchronous, one step off) copies parameters without the engine, "
        "wherever they are": "verl.experimental.separation.engine_workers" in sys.modules,
    }
    for reason, is_asked_for in refused.items():
        if is_asked_for:
            raise ValueError(f"{reason}; change that, or {_WITHOUT}.")
