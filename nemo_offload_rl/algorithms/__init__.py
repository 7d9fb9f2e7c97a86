"""Training loops, losses and advantages."""

from collections.abc import Mapping
from types import MappingProxyType

# Name of an algorithm (that of its recipe's section) -> module with `prepare(config) -> setup.Preparation`.
ALGORITHMS: Mapping[str, str] = MappingProxyType(
    {
        "grpo": "nemo_offload_rl.algorithms.grpo",
        "sft": "nemo_offload_rl.algorithms.sft",
    }
)
