"""Creates the adapter's worker for NeMo-RL on an existing model, over a double of NeMo-RL's own worker.

No release of NeMo-RL can be installed from a registry; the double has what the adapter uses of the worker at the commit
that `nemo_offload_rl/adapters/nemo_rl.py` names.
"""

import importlib
import sys
import types
from typing import Any

import torch

_WORKER = "nemo_rl.models.policy.workers.megatron_policy_worker"
_UTILS = "nemo_rl.models.policy.utils"


class _Worker:
    """Has the settings that the adapter reads; it never moves anything itself."""

    def __init__(self, model: torch.nn.Module, optimizer: Any) -> None:
        self.model, self.optimizer = model, optimizer
        self.optimizer_cpu_offload = False
        self.offload_optimizer_for_refit, self.offload_optimizer_for_logprob = True, False
        checkpoint = types.SimpleNamespace(async_save=False)
        self.mcore_state = types.SimpleNamespace(cfg=types.SimpleNamespace(checkpoint=checkpoint))

    def _uses_mxfp8_overlap_shared_param_buffer(self) -> bool:
        return False


def worker(model: list[torch.nn.Module], optimizer: Any) -> Any:
    """Returns the adapter's worker, whose `move_model` and `move_optimizer` move the model and the optimizer."""
    contents: dict[str, dict[str, Any]] = {
        _WORKER: {"MegatronPolicyWorkerImpl": _Worker},
        _UTILS: {"get_runtime_env_for_policy_worker": lambda name: {"env_vars": {}}},
    }
    for name, members in contents.items():
        parts = name.split(".")
        for length in range(1, len(parts) + 1):
            package = ".".join(parts[:length])
            sys.modules.setdefault(package, types.ModuleType(package))
        vars(sys.modules[name]).update(members)
    (chunk,) = model
    return importlib.import_module("nemo_offload_rl.adapters.nemo_rl").RangeOffload(chunk, optimizer)
