"""Replaces CUDA graphs on a CPU: records operations and replays them on the same tensors.

As with a graph, a replay runs none of the recorded Python code, uses the memory of the recording, and keeps
intermediate results.
"""

import functools

import torch
from torch.distributed import Work
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nemo_offload_rl.refit.recorder import CaptureError


def storages(tree):
    return {leaf.untyped_storage().data_ptr() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)}


def wait(result):
    """Waits for a collective, as work behind it on a GPU's stream does."""
    for leaf in tree_leaves(result):
        if isinstance(leaf, torch.ScriptObject):
            Work.unbox(leaf).wait()
    return result


class RecordedOps(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.steps, self.new_bytes = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.name() == "aten::_local_scalar_dense":
            raise CaptureError("aten._local_scalar_dense waits for a result")
        call = functools.partial(func, *args, **(kwargs or {}))
        result = call()
        made = []
        if not storages(result) & storages((args, kwargs)):  # else it is a view, or the operation writes its input
            made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.new_bytes += sum(tensor.nbytes for tensor in made)
        self.steps.append((call, made))
        return result

    @torch.no_grad()
    def replay(self):
        for call, made in self.steps:
            result = wait(call())
            for kept, tensor in zip(made, tree_leaves(result), strict=bool(made)) if made else ():
                kept.copy_(tensor)


class OpsRecorder:
    """See `Recorder`."""

    def __init__(self):
        self.pool_bytes = 0

    def record(self, work):
        with RecordedOps() as recorded:
            work()
        self.pool_bytes += recorded.new_bytes
        return recorded.replay

    def forget(self):
        self.pool_bytes = 0
