"""Imports what a process that builds a policy or samples from one needs, so that processes forked later start at once.

The imports take ten seconds. Their half a million objects are excluded from later garbage collections, and so from the
worker's search for views of its buffers: both become many times faster. Ray is not imported: it reads its settings from
the environment when it is.
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
