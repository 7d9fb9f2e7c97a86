"""Replaces or clears parts of other packages' code: functions, class attributes, globals, autograd nodes.

There is one module for each thing that is changed, and one table of the versions that they were written against. None
of it is a public interface, so tests/unit/mcore/test_patches.py checks every symbol and signature that a patch uses.
"""

from nemo_offload_rl.config.installed.declared_fields import TESTED_MEGATRON_CORE

WRITTEN_FOR = {
    "activation_offload": {"megatron-core": TESTED_MEGATRON_CORE},
    "checkpoint_writer": {"megatron-core": TESTED_MEGATRON_CORE, "torch": ("2.11",)},
    "cpu_device": {"megatron-core": TESTED_MEGATRON_CORE, "torch": ("2.11",)},
    "cpu_optimizer": {"megatron-core": TESTED_MEGATRON_CORE},
    "gradient_nodes": {"megatron-core": TESTED_MEGATRON_CORE},
    "graph_inputs": {"megatron-core": TESTED_MEGATRON_CORE},
    "layer_input": {"megatron-core": TESTED_MEGATRON_CORE},
    "object_collectives": {"megatron-core": TESTED_MEGATRON_CORE, "torch": ("2.11",)},
    "optimizer_masters": {"megatron-core": TESTED_MEGATRON_CORE, "torch": ("2.11",)},
    "output_layer": {"megatron-core": TESTED_MEGATRON_CORE},
    "packed_rotary": {"megatron-core": TESTED_MEGATRON_CORE},
    "process_groups": {"megatron-core": TESTED_MEGATRON_CORE, "torch": ("2.11",)},
    "rotary_frequencies": {"megatron-core": TESTED_MEGATRON_CORE, "megatron-bridge": ("0.6.2",)},
    "router_losses": {"megatron-core": TESTED_MEGATRON_CORE},
    "saved_state": {"megatron-core": TESTED_MEGATRON_CORE},
    "transformer_engine_placeholder": {"megatron-bridge": ("0.6.2",)},
    "weight_export": {"megatron-bridge": ("0.6.2",)},
}
"""For each module here, the releases of other packages that it was written for and is tested with."""
