"""Provides layers that mark tensors for offloading, as megatron-core's layers do."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.pipeline_parallel.fine_grained_activation_offload import (
    FineGrainedActivationOffloadingInterface as Interface,
)
from megatron.core.pipeline_parallel.fine_grained_activation_offload import PipelineOffloadManager
from support.late_copies import LateCopies

from nemo_offload_rl.activation_offload.copies import CopyEngine
from nemo_offload_rl.activation_offload.manager import ActivationOffloader
from nemo_offload_rl.activation_offload.schedule import ActivationOptions
from nemo_offload_rl.mcore.patches import activation_offload

WIDTH = 16
MODULES = ("qkv_linear", "core_attn", "attn_proj", "mlp")
LAYERS = 4


class Layer(torch.nn.Module):
    """Calls the manager where megatron-core's layers do, and shares storages as they do."""

    def __init__(self, modules: Sequence[str]) -> None:
        super().__init__()
        self.modules_on = modules
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = torch.nn.Linear(WIDTH, WIDTH)
        self.mlp = torch.nn.Linear(WIDTH, WIDTH)

    def group(self, name: str, tensor: torch.Tensor) -> Interface:
        return Interface(name in self.modules_on, tensor, name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        group = self.group("qkv_linear", x)
        with group as x:
            mixed = self.qkv(x)
        q, k, v = group.group_offload(mixed).chunk(3, dim=-1)  # views of one storage
        group = self.group("core_attn", q)
        with group as q:
            out = (q * k.sigmoid() + v * q).tanh()  # tanh saves its output
        out = group.group_offload(out, forced_released_tensors=[q, k, v])
        group = self.group("attn_proj", out)
        with group as out:  # saved again
            y = self.proj(out)
        y = group.group_offload(y)
        group = self.group("mlp", y)
        with group as y:
            z = self.mlp(y * y).exp()
        return group.group_offload(z) * 0.1 + x


class Model(torch.nn.Module):
    def __init__(self, modules: Sequence[str], stage: int = 0, num_layers: int = LAYERS) -> None:
        super().__init__()
        self.stage = stage
        self.layers = torch.nn.ModuleList(Layer(modules) for _ in range(num_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Interface.init_chunk_handler(0, None, self.stage, 0, 0, 1.0)
        for layer in self.layers:
            x = layer(x)
        PipelineOffloadManager.get_instance().drain()
        return x.square().sum()


def batches(lengths: Sequence[int], seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(length, WIDTH, generator=generator, requires_grad=True) for length in lengths]


def no_memory(_: torch.Tensor) -> None:
    """Raises an out-of-memory error, as a hook."""
    raise MemoryError


def offloader(
    model: torch.nn.Module | None = None, copies: CopyEngine | None = None, nbytes: int = 1 << 22, **options: Any
) -> ActivationOffloader:
    """Makes an offloader of all modules and sizes, whose copies are late, and puts it into megatron-core's place."""
    settings = {"modules": MODULES, "fraction": 1.0, "min_elements": 0} | options
    keep = [] if model is None else [parameter.untyped_storage() for parameter in model.parameters()]
    host = torch.zeros(nbytes, dtype=torch.uint8)
    made = ActivationOffloader(ActivationOptions(**settings), host, copies or LateCopies(), keep)
    activation_offload.take_place(made)
    return made


def assert_equal(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> None:
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


@contextmanager
def suspended(offloader: ActivationOffloader) -> Iterator[None]:
    """Runs passes inside the block as if nothing were offloaded."""
    offloader.disable_offload()
    yield
    offloader.enable_offload()
