"""Both sides of a refit that may be recorded: an engine in a process of its own, and the weights of a policy."""

import sys

import ray
import torch
from support import recorded_ops, shared_memory
from support.recorded_ops import OpsRecorder
from support.shared_memory import num_open_buffers

from nemo_offload_rl.generation import recorded_loads
from nemo_offload_rl.generation.recorded_loads import RecordedLoads
from nemo_offload_rl.memory.shared_buffer import SharedBufferError
from nemo_offload_rl.placement.cluster import ENGINE_SHARE
from nemo_offload_rl.refit import fixed_buckets
from nemo_offload_rl.refit.checksum import tensor_checksum
from nemo_offload_rl.refit.fixed_buckets import FixedBucket, FixedTensors, RegisterBuckets
from nemo_offload_rl.refit.recorder import CudaRecorder, addresses_of

# The actors cannot import these modules; what is defined in them travels whole.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
ray.cloudpickle.register_pickle_by_value(recorded_ops)
ray.cloudpickle.register_pickle_by_value(shared_memory)


class Counting:
    """A recorder that counts: graphs on a GPU, else operations."""

    def __init__(self, device):
        self.inner = CudaRecorder() if device == "cuda" else OpsRecorder()
        self.num_recordings = 0

    @property
    def pool_bytes(self):
        return self.inner.pool_bytes

    def record(self, work):
        self.num_recordings += 1
        return self.inner.record(work)

    def forget(self):
        self.inner.forget()


class Engine:
    def start(self, device, *, opens_fixed=True):
        if device == "cpu":
            recorded_loads.why_not_recorded = lambda tensors: ""  # of this process
        self.recorder = Counting(device)
        self.device, self.opens_fixed = device, opens_fixed
        self.parameters, self.num_copied, self.loads = {}, 0, None

    def load_weights(self, bucket):
        if isinstance(bucket, RegisterBuckets | FixedBucket) and not self.opens_fixed:
            raise SharedBufferError("this memory cannot be opened.\nAnd so on")
        if isinstance(bucket, RegisterBuckets):
            self.make_parameters([spec for layout in bucket.layouts for spec in layout.tensors])
        with bucket.opened() as tensors:
            if isinstance(tensors, FixedTensors):
                self.loads.load(tensors, lambda: self.copy(tensors))
            else:
                self.copy(tensors)
        return 0.25

    def make_parameters(self, specs):
        """A real engine has them from the start."""
        for spec in specs:
            self.parameters.setdefault(spec.name, torch.empty(spec.shape, dtype=spec.dtype, device=self.device))
        if self.loads is None:
            self.loads = RecordedLoads(list(self.parameters.values()), lambda: self.recorder)

    def copy(self, tensors):
        self.num_copied += len(tensors)
        for name, tensor in tensors:
            self.parameters.setdefault(name, torch.empty_like(tensor)).copy_(tensor)

    def look(self, name=None):
        """What there is now; a parameter that is named moves then."""
        if name is not None:
            self.parameters[name].data = self.parameters[name].clone()
        found = {
            "sums": {name: tensor_checksum(tensor) for name, tensor in self.parameters.items()},
            "num_copied": self.num_copied, "num_recordings": self.recorder.num_recordings,
            "num_senders": len(fixed_buckets._SENDERS), "num_open": num_open_buffers(),
        }  # fmt: skip
        self.num_copied = 0
        return found


def start_engine(cluster):
    """Start an actor, on the GPU of this process where there is one."""
    options = cluster.actor_options(0, ENGINE_SHARE) if cluster.has_gpus else {"num_cpus": 0}
    return ray.remote(Engine).options(**options).remote()


def look(engine, name=None):
    return ray.get(engine.look.remote(name))


class Weights:
    """Exports parameters; if `exchanged`, another rank takes part, and says yes unless `refused` has the question."""

    def __init__(self, device, *, exchanged="", refused=()):
        tensors = [torch.randn(6, 5), torch.randn(40, 7).bfloat16(), torch.empty(0, 4), torch.tensor(2.5)]
        self.tensors = [tensor.to(device) for tensor in tensors]
        self.exchanged, self.refused, self.answers = exchanged, refused, []
        self.num_exports, self.reads_a_number = 0, False

    def __iter__(self):
        self.num_exports += 1
        whole, fused, *others = self.tensors
        if self.reads_a_number:
            whole = whole * float(whole[0, 0])
        first, second = fused.split([30, 10])
        parts = {"whole": whole.T.contiguous(), "first": (first + 1) * 2, "second": second}
        yield from parts.items()
        yield from zip(("empty", "scalar"), others, strict=True)

    def addresses(self):
        return addresses_of(self.tensors)

    def why_not_recorded(self):
        return ""

    def collectives(self):
        return self.exchanged

    def agree(self, yes):
        self.answers.append(yes)
        return yes and len(self.answers) not in self.refused

    def step(self):
        for tensor in self.tensors:
            tensor.add_(1)

    def sums(self):
        return {name: tensor_checksum(tensor) for name, tensor in self}
