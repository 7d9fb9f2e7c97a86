"""Provides the sizes of a small rank, for plans whose model does not matter."""

from nemo_offload_rl.memory.units import GIB
from nemo_offload_rl.residency.table import ShardFacts

# 10 GiB of optimizer state, 2 of parameters and 4 of gradients.
FACTS = ShardFacts(
    num_params=GIB, num_frozen_params=0, param_size=2, grad_size=4, num_optimizer_params=GIB, optimizer_size=10,
    has_reference=False,
)  # fmt: skip
