"""Makes NeMo-RL's Megatron policy worker move its state in ranges.

Written against NeMo-RL's commit 001759a9acf020907d76e61ffd27baa9c8ae9a90 and tested with a double of its worker: no
release of NeMo-RL can be installed from a registry. `examples/nemo_rl_launcher.py` starts it.
"""

from collections.abc import Iterator
from typing import Any

import ray
import torch
from nemo_rl.models.policy.utils import get_runtime_env_for_policy_worker
from nemo_rl.models.policy.workers.megatron_policy_worker import MegatronPolicyWorkerImpl

from nemo_offload_rl.adapters.adopt import AdoptedState, adopt
from nemo_offload_rl.residency.table import Target


class RangeOffload(MegatronPolicyWorkerImpl):
    """Moves the state of NeMo-RL's worker in ranges by `move_model` and `move_optimizer`, which all its phases call."""

    _adopted: AdoptedState | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _require_supported(self)
        offloaded = [Target.PARAMS]
        if not self.optimizer_cpu_offload and (self.offload_optimizer_for_refit or self.offload_optimizer_for_logprob):
            offloaded.append(Target.OPTIMIZER_STATE)
        self._adopted = adopt(self.model, self.optimizer, offloaded=offloaded)

    def move_model(
        self, model: torch.nn.Module, device: str, move_params: bool = True, move_grads: bool = True
    ) -> torch.nn.Module:
        """Move the policy's parameters and gradients; NeMo-RL's code moves any other model, such as for inference."""
        if self._adopted is None or model is not self.model:
            moved: torch.nn.Module = super().move_model(model, device, move_params, move_grads)
            return moved
        self._adopted.move(device, [Target.PARAMS] * move_params + [Target.GRADS] * move_grads)
        return model

    def move_optimizer(self, device: str) -> None:
        """Move optimizer state, fp32 masters included; after a move to the GPU the optimizer's step waits for it."""
        if self._adopted is None:
            super().move_optimizer(device)
        else:
            self._adopted.move_optimizer(device)

    def _iter_sglang_hf_weight_buckets(self, **kwargs: Any) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Yield the buckets that SGLang opens through CUDA IPC, which cannot export memory of a range: copies of it."""
        adopted = self._adopted
        assert adopted is not None, "weights are sent after `__init__`"
        for bucket in super()._iter_sglang_hf_weight_buckets(**kwargs):
            yield [(name, adopted.outside_ranges(tensor)) for name, tensor in bucket]


@ray.remote(runtime_env=get_runtime_env_for_policy_worker("megatron_policy_worker"))
class MegatronPolicyWorker(RangeOffload):
    """Runs `RangeOffload` as the Ray actor that `policy.worker_extension_cls_fqn` names."""


def _require_supported(worker: Any) -> None:
    """Raise ValueError for settings whose state cannot move in ranges."""
    refused = {
        "checkpointing with async_save: true hands CUDA storages to a writer by IPC, which cannot export a range": (
            worker.mcore_state.cfg.checkpoint.async_save
        ),
        "reuse_grad_buf_for_mxfp8_param_ag keeps parameters in the gradients' memory, which is dropped": (
            worker._uses_mxfp8_overlap_shared_param_buffer()
        ),
    }
    for reason, is_asked_for in refused.items():
        if is_asked_for:
            raise ValueError(f"{reason}; change that, or leave worker_extension_cls_fqn={__name__} out.")
