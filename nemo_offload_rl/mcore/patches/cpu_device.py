"""Runs megatron-core without CUDA; does nothing if CUDA is available.

megatron-core uses `torch.cuda` and `device="cuda"` in places that do not need CUDA. Only this file deals with them.
`install()` must run before the first import of `megatron`, since some modules bind names of `torch.cuda` when they are
imported.
"""

import contextlib
import functools
import importlib
import logging
import os
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

logger = logging.getLogger(__name__)

# Modules of megatron-core 0.19.2 that create tensors with a literal device="cuda". Their global name `torch` is
# replaced by a view of torch whose factory functions create on the CPU instead.
MODULES_WITH_LITERAL_CUDA = (
    "megatron.core.optimizer.clip_grads",
    "megatron.core.optimizer.optimizer",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.pipeline_parallel.p2p_communication",
    "megatron.core.utils",
    "megatron.core.transformer.utils",
    "megatron.core.tensor_parallel.data",
    "megatron.core.dist_checkpointing.exchange_utils",
    "megatron.core.dist_checkpointing.strategies.state_dict_saver",
)
_FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange", "as_tensor", "triu")


class _Stream:
    """Replaces `torch.cuda.Stream` on a CPU, where all work runs in order anyway."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def _in_order(self, *_: Any, **__: Any) -> None:
        pass

    wait_stream = wait_event = synchronize = _in_order

    def record_event(self, event: "_Event | None" = None) -> "_Event":
        return event if event is not None else _Event()


class _Event(_Stream):
    """Replaces `torch.cuda.Event` on a CPU, where every event has already completed."""

    record = wait = _Stream._in_order

    def query(self) -> bool:
        return True


class _CpuTorch(types.ModuleType):
    """Wraps torch with factory functions that treat device="cuda" as the CPU."""

    def __getattr__(self, name: str) -> Any:
        value = getattr(torch, name)
        if name not in _FACTORIES:
            return value

        @functools.wraps(value)
        def on_cpu(*args: Any, **kwargs: Any) -> Any:
            if "cuda" in str(kwargs.get("device")):
                kwargs["device"] = "cpu"
            return value(*args, **kwargs)

        setattr(self, name, on_cpu)
        return on_cpu


@contextlib.contextmanager
def _stream(_: Any) -> Iterator[None]:
    yield


def _itself(obj: Any, *_: Any, **__: Any) -> Any:
    return obj


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


def _type(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Replaces `Tensor.type`, to name a CPU tensor 'torch.cuda.FloatTensor', which megatron-core compares with."""
    result = _tensor_type(tensor, *args, **kwargs)
    if not isinstance(result, str) or result.startswith("torch.cuda."):  # a TorchFunctionMode calls this recursively
        return result
    return result.replace("torch.", "torch.cuda.", 1)


_tensor_type = torch.Tensor.type


def _as_numpy(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Replaces `maybe_move_tensor_to_cpu`, which makes the numpy arrays that its caller needs of CUDA tensors only."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


def _gather(
    of_one_size: Callable[..., torch.Tensor],
    tensor: torch.Tensor,
    group: torch.distributed.ProcessGroup,
    sizes: Sequence[int] | None = None,
    use_global_buffer: bool = False,
) -> torch.Tensor:
    """Replaces `_gather_along_first_dim`, which gathers the tokens of experts that ranks split: NCCL takes any sizes.

    Gloo takes one size, so shorter tensors are padded.
    """
    if sizes is None or group.size() == 1:
        return of_one_size(tensor, group, sizes, use_global_buffer)
    padded = tensor.new_zeros(max(sizes), *tensor.shape[1:])
    padded[: len(tensor)] = tensor
    parts = [torch.empty_like(padded) for _ in sizes]
    torch.distributed.all_gather(parts, padded, group=group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def _patch_torch() -> None:
    cpu = torch.device("cpu")
    stream = _Stream()
    cuda: Any = torch.cuda
    cuda.current_device = lambda: cpu
    cuda.set_device = cuda.synchronize = cuda.empty_cache = _nothing
    cuda.reset_peak_memory_stats = _nothing
    cuda.current_stream = cuda.default_stream = lambda *_: stream
    cuda.Stream, cuda.Event, cuda.stream = _Stream, _Event, _stream
    cuda.get_rng_state = lambda *_, **__: torch.default_generator.get_state()
    cuda.set_rng_state = lambda state, *_, **__: torch.default_generator.set_state(state)
    cuda.manual_seed = _manual_seed
    cuda.is_current_stream_capturing = lambda: False
    tensor: Any = torch.Tensor
    module: Any = torch.nn.Module
    tensor.cuda = module.cuda = _itself
    tensor.type = _type


def _patch_megatron() -> None:
    random: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    random._get_cuda_rng_state = lambda *_, **__: torch.default_generator.get_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.default_generator.set_state(state)
    dispatcher: Any = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    dispatcher.maybe_move_tensor_to_cpu = _as_numpy
    mappings: Any = importlib.import_module("megatron.core.tensor_parallel.mappings")
    mappings._gather_along_first_dim = functools.partial(_gather, mappings._gather_along_first_dim)
    view = _CpuTorch("torch")
    for name in MODULES_WITH_LITERAL_CUDA:
        module = importlib.import_module(name)
        assert module.__dict__["torch"] is torch, (
            f"{name} has no global torch: this is not the megatron-core that this patch was written for"
        )
        module.__dict__["torch"] = view


@functools.cache
def install() -> bool:
    """Prepare torch and megatron-core for a machine without CUDA; call it before importing `megatron`.

    Returns:
        True if this machine has no CUDA and the substitutes are in place; False if there was nothing to do.
    """
    if torch.cuda.is_available():
        return False
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # megatron's jit_fuser: compiling costs minutes on a CPU and gains nothing
    torch._dynamo.config.disable = True
    _patch_torch()
    _patch_megatron()
    logger.info("CUDA is not available: megatron-core runs on the CPU.")
    return True
