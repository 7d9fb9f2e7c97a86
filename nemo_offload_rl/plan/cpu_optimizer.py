"""Computes the host and GPU memory of the CPU optimizer, which `mcore/optimizer/cpu_optimizer.py` allocates."""

from collections.abc import Mapping

from nemo_offload_rl.config.schema.megatron import MegatronOptimizerConfig
from nemo_offload_rl.config.schema.policy import PolicyConfig
from nemo_offload_rl.plan.host_budget import CPU_OPTIMIZER
from nemo_offload_rl.residency.table import ShardFacts

_FLOAT = 4
COPIED_SIZE = _FLOAT
"""Bytes of each parameter that a step copies to the host (its gradient), and back (its new value)."""


def fraction(optimizer: MegatronOptimizerConfig) -> float:
    """Returns the share of the parameters that the CPU optimizer steps; 0 without it.

    Args:
        optimizer: the recipe's `policy.megatron_cfg.optimizer`.
    """
    return float(optimizer["optimizer_offload_fraction"]) if optimizer["optimizer_cpu_offload"] else 0.0


def moments_size(optimizer: MegatronOptimizerConfig) -> int:
    """Returns the bytes per element of the optimizer's moments, which are float32."""
    if optimizer["optimizer"] == "adam":
        return 2 * _FLOAT
    return _FLOAT if optimizer["sgd_momentum"] > 0 else 0


def gpu_size(policy: PolicyConfig) -> int:
    """Returns the bytes per element of the master weights that megatron-core keeps on the GPU; 0 without them."""
    optimizer = policy["megatron_cfg"]["optimizer"]
    has_own = policy["precision"] == "bfloat16" and not optimizer["use_precision_aware_optimizer"]
    return _FLOAT if fraction(optimizer) and has_own else 0


def host_bytes(policy: PolicyConfig, facts: ShardFacts) -> Mapping[str, int]:
    """Returns the host memory of a rank's CPU optimizer (gradients, master weights, moments), by its name in budgets.

    Empty without the CPU optimizer.
    """
    if not facts.num_cpu_optimizer_params:
        return {}
    size = 2 * _FLOAT + moments_size(policy["megatron_cfg"]["optimizer"])
    return {CPU_OPTIMIZER: facts.num_cpu_optimizer_params * size}
