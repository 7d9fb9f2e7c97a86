"""Replaces or clears parts of other packages' code: functions, class attributes, globals, autograd nodes.

There is one module for each subject, and one table of the versions that they were written against. None
of it is a public interface, so tests/unit/mcore/test_patches.py checks every symbol and signature that a patch uses.
"""

from nemo_offload_rl.config.installed.declared_fields import TESTED_MEGATRON_CORE

WRITTEN_FOR = {
    "activation_offload": {"megatron-core": TESTED_MEGATRON_CORE},
    "bridge": {"megatron-bridge": ("0.6.2",)},
    "cpu_device": {"megatron-core": TESTED_MEGATRON_CORE, "torch": ("2.11",)},
    "graph_inputs": {"megatron-core": TESTED_MEGATRON_CORE},
    "layer_input": {"megatron-core": TESTED_MEGATRON_CORE},
    "layer_state": {"megatron-core": TESTED_MEGATRON_CORE},
    "optimizers": {"megatron-core": TESTED_MEGATRON_CORE, "torch": ("2.11",)},
    "rotary": {"megatron-core": TESTED_MEGATRON_CORE, "megatron-bridge": ("0.6.2",)},
    "torch_distributed": {"megatron-core": TESTED_MEGATRON_CORE, "torch": ("2.11",)},
}
"""For each module here, the releases of other packages that it was written for and is tested with."""
