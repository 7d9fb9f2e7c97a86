"""Holds all code that uses megatron-core and Megatron-Bridge: building, stepping, log-probs, checkpoints."""

from nemo_offload_rl.mcore import log_filters
from nemo_offload_rl.mcore.patches import cpu_device

# Both must come before the first import of megatron, which the other modules of this package import at their top.
log_filters.install()
cpu_device.install()
