"""Steps a share of the parameters on the CPU, with their optimizer state in host memory, where it stays.

`CpuOptimizer` replaces megatron-core's `HybridDeviceOptimizer` (mcore/patches/optimizers.py) and keeps its
interface. docs/optimizer-offload.md says what it does differently, and why.
"""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from torch import Tensor

from nemo_offload_rl.mcore.optimizer.cpu_optimizer_state import (
    FLOAT,
    HostVector,
    OnCpu,
    Part,
    State,
    gpu_master,
    gradient_of,
    largest_within,
)
from nemo_offload_rl.memory.pinned import HostSegment, PinnedArena
from nemo_offload_rl.memory.streams import CopyStream
from nemo_offload_rl.memory.units import GIB, MIB, round_up

_ALIGNMENT = 64  # bytes
_PART = 16 * MIB
"""Least number of elements that are copied and stepped together if copies overlap with steps."""


class CpuOptimizer(HybridDeviceOptimizer):
    """Steps the largest parameters, up to a fraction of all, with torch's CPU kernels, and the others on the GPU.

    It is built in three steps, so that the host memory is known before it is allocated: the constructor allocates
    none, `split` makes the state of the GPU's share, and `take_host_memory` that of the CPU's share.

    Args:
        params: groups of float32 or bfloat16 [n] tensors on one device.
        offload_fraction: largest share of the elements that is stepped on the CPU.
        cpu_optimizer_cls: torch's AdamW or SGD.
        gpu_optimizer_cls: class of the optimizer of the GPU's share.
        overlap_cpu_optimizer_d2h_h2d: copy and step in parts, so that copies overlap with steps.
        fused: whether the CPU's kernel is torch's fused one.
        param_update_in_fp32, pin_cpu_grads, pin_cpu_params: accepted from megatron-core; always on.
        hyperparameters: such as lr and betas, for groups that do not have them.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        *,
        offload_fraction: float,
        cpu_optimizer_cls: Callable[..., torch.optim.Optimizer],
        gpu_optimizer_cls: Callable[..., torch.optim.Optimizer],
        overlap_cpu_optimizer_d2h_h2d: bool,
        fused: bool = False,
        param_update_in_fp32: bool = True,
        pin_cpu_grads: bool = True,
        pin_cpu_params: bool = True,
        **hyperparameters: Any,
    ) -> None:
        self._hyperparameters = hyperparameters
        options = {
            "offload_fraction": offload_fraction,
            "cpu_optimizer_cls": cpu_optimizer_cls,
            "gpu_optimizer_cls": gpu_optimizer_cls,
            "overlap_cpu_optimizer_d2h_h2d": overlap_cpu_optimizer_d2h_h2d,
            "fused": fused,
        }
        # Not HybridDeviceOptimizer's __init__, which copies everything at once: megatron-core builds one for the whole
        # model, and then another one for the shard of this rank, with the `defaults` of the first.
        torch.optim.Optimizer.__init__(self, params, options | hyperparameters)
        self.cpu_optimizers: list[torch.optim.Optimizer] = []
        self.gpu_optimizer: torch.optim.Optimizer | None = None
        self.num_steps = 0
        self.last_step_s = self.last_wait_s = 0.0
        self._masters_in_state = True
        self._on_cpu: list[tuple[int, Tensor]] = []  # groups and parameters
        self._on_gpu: list[tuple[Tensor, Tensor]] = []  # parameters and masters
        self._parts: list[Part] = []

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group; its parameters may be views of a float32 model's, which torch's own method refuses."""
        for name, value in self._hyperparameters.items():
            param_group.setdefault(name, value)
        self.param_groups.append(param_group)

    # ---- placement

    def split(self, *, masters_in_state: bool) -> None:
        """Choose the parameters to step on the CPU, and make masters of the others on the GPU.

        Args:
            masters_in_state: whether megatron-core expects float32 masters in the state, as it does with its
                precision-aware optimizer; otherwise the parameters are masters themselves.
        """
        self._masters_in_state = masters_in_state
        numbered = [(index, param) for index, group in enumerate(self.param_groups) for param in group["params"]]
        device = numbered[0][1].device if numbered else torch.device("cpu")
        self._d2h, self._h2d = CopyStream(device), CopyStream(device)
        chosen = largest_within([param.numel() for _, param in numbered], self.defaults["offload_fraction"])
        groups: dict[int, list[Tensor]] = {}
        for number, (index, param) in enumerate(numbered):
            if number in chosen:
                self._on_cpu.append((index, param))
            else:
                self._on_gpu.append((param, gpu_master(param)))
                groups.setdefault(index, []).append(self._on_gpu[-1][1])
        if groups:
            self.gpu_optimizer = self._inner(self.defaults["gpu_optimizer_cls"], groups)

    def take_host_memory(self, segment: HostSegment | None) -> None:
        """Make the state of the CPU's share in host memory: masters of the current parameters, and moments of 0.

        Args:
            segment: zeroed memory of `host_bytes`, page-locked for copies at the speed of the link; None for 0 bytes.
        """
        offset, on_cpu = 0, []
        for index, param in self._on_cpu:
            vectors = []
            for _ in range(2 + len(self._moments)):
                assert segment is not None
                nbytes = param.numel() * FLOAT
                vectors.append(HostVector(segment.window(offset, nbytes).view(torch.float32), offset))
                offset += round_up(nbytes, _ALIGNMENT)
            moments = {name: vector.tensor for name, vector in zip(self._moments, vectors[2:], strict=True)}
            on_cpu.append((index, OnCpu(param, vectors[0], vectors[1], moments)))
        self._parts = [self._part(params) for params in self._cut(on_cpu)]
        self.cpu_optimizers = [part.optimizer for part in self._parts]
        for param, master in self._on_gpu:
            assert self.gpu_optimizer is not None
            if "momentum_buffer" in self._moments:
                self.gpu_optimizer.state[master] = {"momentum_buffer": torch.zeros_like(master)}
            self._expose(param, master, self.gpu_optimizer.state[master])
        self.update_fp32_param_by_new_param()

    def give_host_memory_back(self) -> None:
        """Drop every tensor that views the segment; the optimizer cannot be used afterwards."""
        for optimizer in self.cpu_optimizers:
            optimizer.state.clear()
            optimizer.param_groups.clear()
        self.cpu_optimizers, self._parts = [], []
        self.state.clear()

    @property
    def num_on_cpu(self) -> int:
        """Returns the number of elements that are stepped on the CPU."""
        return sum(param.numel() for _, param in self._on_cpu)

    def describe(self) -> str:
        """Returns a log message that says how much is stepped on the CPU, and with how much host memory."""
        total = self.num_on_cpu + sum(param.numel() for param, _ in self._on_gpu)
        return (
            f"the CPU optimizer steps {self.num_on_cpu:,} of this rank's {total:,} parameters, with "
            f"{self.host_bytes / GIB:.2f} GiB of host memory in {len(self.cpu_optimizers)} parts"
        )

    @property
    def host_bytes(self) -> int:
        """Returns the bytes of host memory that it needs: gradients, masters and moments, all in float32."""
        num_vectors = 2 + len(self._moments)
        return sum(num_vectors * round_up(param.numel() * FLOAT, _ALIGNMENT) for _, param in self._on_cpu)

    @property
    def _moments(self) -> tuple[str, ...]:
        if "betas" in self._hyperparameters:
            return ("exp_avg", "exp_avg_sq")
        return ("momentum_buffer",) if self._hyperparameters["momentum"] else ()

    def _cut(self, on_cpu: Sequence[tuple[int, OnCpu]]) -> Iterator[Sequence[tuple[int, OnCpu]]]:
        """Yields the parameters to copy and step together: all, or parts of some MiB if copies overlap with steps."""
        least = _PART if self.defaults["overlap_cpu_optimizer_d2h_h2d"] else self.num_on_cpu
        held: list[tuple[int, OnCpu]] = []
        for entry in on_cpu:
            held.append(entry)
            if sum(other.param.numel() for _, other in held) >= least:
                yield held
                held = []
        if held:
            yield held

    def _part(self, params: Sequence[tuple[int, OnCpu]]) -> Part:
        groups: dict[int, list[Tensor]] = {}
        for index, entry in params:
            groups.setdefault(index, []).append(entry.master.tensor)
        options = {"fused": True} if self.defaults["fused"] else {}
        optimizer = self._inner(self.defaults["cpu_optimizer_cls"], groups, **options)
        for _, entry in params:
            state = optimizer.state[entry.master.tensor]
            state.update(entry.moments)
            if isinstance(optimizer, torch.optim.AdamW):
                state["step"] = torch.tensor(0.0)
            self._expose(entry.param, entry.master.tensor, state)
        return Part(optimizer, [entry for _, entry in params])

    def _inner(
        self, cls: Callable[..., torch.optim.Optimizer], groups: Mapping[int, list[Tensor]], **options: Any
    ) -> torch.optim.Optimizer:
        return cls([{"params": params, "group": i} | self._values(i) for i, params in groups.items()], **options)

    def _values(self, index: int) -> dict[str, Any]:
        return {name: self.param_groups[index][name] for name in self._hyperparameters}

    def _expose(self, param: Tensor, master: Tensor, state: Mapping[str, Any]) -> None:
        """Put the state of a parameter into `self.state`, where megatron-core looks it up by its own parameter."""
        shown = {name: value for name, value in state.items() if isinstance(value, Tensor) and name != "step"}
        self.state[param] = State(shown | ({"master_param": master} if self._masters_in_state else {}))

    # ---- steps

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Step the GPU's share and, concurrently, the CPU's; when this returns, no copy is under way.

        Raises:
            ValueError: a group has no learning rate.
        """
        start = time.perf_counter()
        self._pass_hyperparameters_on()
        self._d2h.follow_current_stream()
        self._h2d.follow_current_stream()
        arriving = []
        for part in self._parts:
            for entry in part.params:
                gradient = gradient_of(entry.param)
                entry.master.tensor.grad = None if gradient is None else entry.grad.tensor
                if gradient is not None:
                    self._d2h.copy_all(entry.grad.pieces(gradient))
            arriving.append(self._d2h.mark())
        self._step_gpu()
        self.last_wait_s = 0.0
        for part, arrival in zip(self._parts, arriving, strict=True):
            before = time.perf_counter()
            arrival.wait()
            self.last_wait_s += time.perf_counter() - before
            part.optimizer.step()
            for entry in part.params:
                self._h2d.copy_all((gpu, host) for host, gpu in entry.master.pieces(entry.param.detach()))
        before = time.perf_counter()
        self._h2d.mark().wait()
        self.last_wait_s += time.perf_counter() - before
        self.num_steps += 1
        self.last_step_s = time.perf_counter() - start

    def _step_gpu(self) -> None:
        if self.gpu_optimizer is None:
            return
        for param, master in self._on_gpu:
            gradient = gradient_of(param)
            master.grad = None if gradient is None else gradient.float()
        self.gpu_optimizer.step()
        rounded = [(param, master) for param, master in self._on_gpu if param.dtype != master.dtype]
        if rounded:
            params, masters = zip(*rounded, strict=True)
            torch._foreach_copy_(params, masters)
        for _, master in self._on_gpu:
            master.grad = None

    def _pass_hyperparameters_on(self) -> None:
        """Copy the current learning rate, weight decay and the like to every inner optimizer."""
        for optimizer in self.sub_optimizers:
            for group in optimizer.param_groups:
                group.update(self._values(group["group"]))
                if group["lr"] is None:
                    raise ValueError(
                        f"Param group {group['group']} of the CPU optimizer has no learning rate; give one in "
                        "OptimizerConfig.lr, or build an OptimizerParamScheduler."
                    )

    @torch.no_grad()
    def update_fp32_param_by_new_param(self) -> None:
        """Copy the parameters, which have changed outside of a step, into all masters."""
        self._d2h.follow_current_stream()
        for part in self._parts:
            for entry in part.params:
                self._d2h.copy_all(entry.master.pieces(entry.param.detach()))
        self._d2h.mark().wait()
        for param, master in self._on_gpu:
            if param.dtype != master.dtype:
                master.copy_(param)

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the state by index of the parameter, and the groups, in a form that any other optimizer can load."""
        params = [param for group in self.param_groups for param in group["params"]]
        number_of = {id(param): number for number, param in enumerate(params)}
        step = torch.tensor(float(self.num_steps))
        return {
            "state": {number_of[id(param)]: {**state, "step": step} for param, state in self.state.items()},
            "param_groups": [
                group | {"params": [number_of[id(param)] for param in group["params"]], "step": self.num_steps}
                for group in self.param_groups
            ],
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copy loaded values into the existing tensors."""
        params = [param for group in self.param_groups for param in group["params"]]
        for number, state in state_dict["state"].items():
            for name, value in state.items():
                self.state[params[number]][name] = value
        for group, loaded in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({name: loaded[name] for name in group if name in loaded and name != "params"})
            if "step" in loaded:
                self._set_steps(int(loaded["step"]))

    def _set_steps(self, num_steps: int) -> None:
        self.num_steps = num_steps
        for optimizer in self.sub_optimizers:
            for group in optimizer.param_groups:
                if not isinstance(optimizer, torch.optim.AdamW):
                    group["step"] = num_steps  # Transformer Engine's FusedAdam has it in the group
                    continue
                for param in group["params"]:
                    optimizer.state[param]["step"].fill_(float(num_steps))

    def finish_load(self) -> None:
        """Update the masters from the parameters, into which megatron-core loads masters that are not in the state."""
        if not self._masters_in_state:
            self.update_fp32_param_by_new_param()

    def dummy_step(self) -> None:
        """Do nothing: megatron-core's own steps with random gradients to make state, which is there already."""

    def _sync_hdo_state_to_sub_optimizers(self) -> None:
        """Do nothing: values that megatron-core has assigned are in place already."""


def cpu_optimizers(optimizer: Any) -> Iterator[CpuOptimizer]:
    """Yields the CPU optimizers inside of megatron-core's optimizer."""
    for part in getattr(optimizer, "chained_optimizers", ()):
        if isinstance(part.optimizer, CpuOptimizer):
            yield part.optimizer


def take_host_memory(optimizers: Iterable[CpuOptimizer], arena: PinnedArena) -> Callable[[], None]:
    """Allocate the CPU optimizers' host memory, and make their masters of the current parameters.

    Args:
        optimizers: the CPU optimizers.
        arena: allocates page-locked memory near the GPU.

    Returns:
        A function that releases the memory.

    Raises:
        MemoryError: the host has too little memory.
    """
    with contextlib.ExitStack() as undo:
        for one in optimizers:
            segment = None
            if one.host_bytes:
                segment = arena.allocate("the CPU optimizer", one.host_bytes)
                undo.callback(arena.release, segment)
                undo.callback(one.give_host_memory_back)
            one.take_host_memory(segment)
        return undo.pop_all().close


def metrics(optimizer: Any) -> dict[str, float]:
    """Returns metrics of the last step of the CPU optimizers inside of megatron-core's optimizer, if any."""
    found = list(cpu_optimizers(optimizer))
    if not found:
        return {}
    values = {
        "step_s": sum(one.last_step_s for one in found),
        "waited_s": sum(one.last_wait_s for one in found),
        "copied_gib": sum(one.num_on_cpu for one in found) * FLOAT / GIB,
        "host_gib": sum(one.host_bytes for one in found) / GIB,
    }
    return {f"cpu_optimizer/{name}": value for name, value in values.items()}
