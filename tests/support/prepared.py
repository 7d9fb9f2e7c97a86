"""Imports what a process needs that builds a policy or samples from one: what is forked behind it starts at once.

Such an import takes ten seconds. Its half a million objects are left out of all later collections, and so out of the
worker's search for views of its buffers as well: both are many times faster then.
"""

import gc

import nemo_offload_rl.algorithms.losses
import nemo_offload_rl.generation.transformers_backend
import nemo_offload_rl.mcore.local_spec
import nemo_offload_rl.worker.worker  # noqa: F401
from nemo_offload_rl.mcore.bridge_import import auto_bridge

auto_bridge()
gc.collect()
gc.freeze()
