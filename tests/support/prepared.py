"""Imports what a process needs that builds a policy or samples from one: what is forked behind it starts at once.

Such an import takes ten seconds. Its half a million objects are left out of all later collections, and so out of the
worker's search for views of its buffers as well: both are many times faster then. Ray is not imported: it reads its
settings from the environment when it is.
"""

import gc

from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache  # noqa: F401

import nemo_offload_rl.algorithms.losses
import nemo_offload_rl.config
import nemo_offload_rl.mcore.model.local_spec
import nemo_offload_rl.worker.worker  # noqa: F401
from nemo_offload_rl.mcore.model.bridge_import import auto_bridge

auto_bridge()
gc.collect()
gc.freeze()
