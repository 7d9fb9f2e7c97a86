"""Measures the rates of one GPU and its host, from which the plan predicts seconds."""

import contextlib
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from nemo_offload_rl.memory.numa import gpu_numa_node
from nemo_offload_rl.memory.units import GIB
from nemo_offload_rl.placement.gpus import torch_pci_bus_id
from nemo_offload_rl.placement.link import benchmark_link
from nemo_offload_rl.placement.rates import AttentionRates, Curve, Rates

_FORWARD_PRODUCTS, _BACKWARD_PRODUCTS = 2, 5  # of attention, a pair of tokens: the backward pass computes scores again
_ROUNDS = 3
# What Transformer Engine prefers on Hopper, then what torch has.
_BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True)
class Workload:
    """Says what is measured, and for how long.

    Attributes:
        products: matrix products, as (tokens, inputs, outputs) of a linear layer.
        sequences: lengths of attention's sequences, in tokens.
        tokens: tokens of attention's batch; a single sequence may be longer.
        heads: pairs of the number of heads and the size of a head.
        block_bytes: size of the copied block.
        num_operations: small operations of which the host's time is measured.
        cpu_params: parameters that the CPU steps.
        min_s: least seconds of a measurement, so that the GPU's clock is that of sustained work.
    """

    products: tuple[tuple[int, int, int], ...] = (
        (512, 1024, 1024),
        (1024, 2048, 1536),
        (2048, 2048, 2048),
        (4096, 2048, 4096),
        (8192, 2048, 8192),
        (8192, 4096, 16_384),
        (16_384, 2048, 65_536),
    )
    sequences: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16_384, 65_536)
    tokens: int = 16_384
    heads: tuple[tuple[int, int], ...] = ((32, 64), (16, 128))
    block_bytes: int = GIB
    num_operations: int = 1000
    cpu_params: int = 1 << 25
    min_s: float = 0.4


def calibrate(device: torch.device, workload: Workload | None = None) -> Rates:
    """Measures the rates of a GPU and its host, in half a minute; the GPU should be idle, with 8 GiB free.

    Args:
        device: the GPU; on a CPU everything but the link is measured, for tests.
        workload: what is measured; None for the sizes of layers.

    Raises:
        RuntimeError, MemoryError: the GPU or page-locked memory cannot be used.
    """
    work = Workload() if workload is None else workload
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
    scope = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with scope:
        memory = _memory_bytes_per_s(device, work)
        return Rates(
            source=f"measured by nemo-offload-rl doctor --calibrate on {where}, {time.strftime('%Y-%m-%d')}",
            matmul=Curve(tuple(sorted(_matmul(device, work, *sizes) for sizes in work.products))),
            attention=tuple(_attention(device, work, *heads) for heads in work.heads),
            memory_bytes_per_s=memory,
            link_bytes_per_s=_link_bytes_per_s(device, memory),
            launch_s=_launch_s(device, work),
            cpu_params_per_s=_cpu_params_per_s(work),
        )


def calibrate_here() -> tuple[Rates, str]:
    """Measures the current GPU; returns its rates and its name.

    Raises:
        ValueError: torch can use no GPU, or it or page-locked memory does not suffice for the measurement.
    """
    if not torch.cuda.is_available():
        raise ValueError(
            "--calibrate measures a GPU, but torch can use none on this machine; run it on a machine with the GPU that "
            "the plan is for, and give its file to nemo-offload-rl plan with --calibration FILE"
        )
    try:
        rates = calibrate(torch.device("cuda", torch.cuda.current_device()))
    except (RuntimeError, MemoryError) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ValueError(f"--calibrate cannot measure this GPU: {reason}; free the GPU, and run again") from error
    return rates, torch.cuda.get_device_name()


def _matmul(device: torch.device, work: Workload, tokens: int, inputs: int, outputs: int) -> tuple[float, float]:
    """Returns the FLOPs of a linear layer's product, and the FLOP/s of its three products in training."""
    x, gradient = (_random(device, tokens, size) for size in (inputs, outputs))
    weight = _random(device, outputs, inputs)

    def products() -> None:
        x @ weight.T
        gradient @ weight
        gradient.T @ x

    flops = 2.0 * tokens * inputs * outputs
    return flops, 3 * flops / _seconds(products, device, work.min_s)


def _attention(device: torch.device, work: Workload, num_heads: int, head_dim: int) -> AttentionRates:
    points = [(length, *_attention_flops_per_s(device, work, num_heads, head_dim, length)) for length in work.sequences]
    return AttentionRates(
        head_dim,
        forward=Curve(tuple((length, forward) for length, forward, _ in points)),
        backward=Curve(tuple((length, backward) for length, _, backward in points)),
    )


def _attention_flops_per_s(
    device: torch.device, work: Workload, num_heads: int, head_dim: int, length: int
) -> tuple[float, float]:
    """Returns the FLOP/s of causal attention's forward and backward pass on sequences of a length."""
    batch = max(1, work.tokens // length)
    queries, keys, values, gradient = (_random(device, batch, num_heads, length, head_dim) for _ in range(4))
    inputs = [one.requires_grad_() for one in (queries, keys, values)]

    def attend() -> torch.Tensor:
        return F.scaled_dot_product_attention(queries, keys, values, is_causal=True)

    with sdpa_kernel(_BACKENDS, set_priority=True):
        output = attend()
        forward_s = _seconds(attend, device, work.min_s)
    backward_s = _seconds(lambda: torch.autograd.grad(output, inputs, gradient, retain_graph=True), device, work.min_s)
    product = 2.0 * batch * num_heads * head_dim * length * (length + 1) / 2
    return _FORWARD_PRODUCTS * product / forward_s, _BACKWARD_PRODUCTS * product / backward_s


def _memory_bytes_per_s(device: torch.device, work: Workload) -> float:
    source = torch.zeros(work.block_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * work.block_bytes / _seconds(lambda: target.copy_(source), device, work.min_s)


def _link_bytes_per_s(device: torch.device, memory_bytes_per_s: float) -> float:
    if device.type != "cuda":
        return memory_bytes_per_s / 2  # a copy within the host's memory
    index = torch.cuda.current_device() if device.index is None else device.index
    speed = benchmark_link(index, numa_node=gpu_numa_node(torch_pci_bus_id(index)))
    return min(speed.d2h_gb_per_s, speed.h2d_gb_per_s) * 1e9


def _launch_s(device: torch.device, work: Workload) -> float:
    """Returns the host's seconds for one of many small operations and their backward passes, one kernel each."""
    start = torch.ones(64, device=device, requires_grad=True)

    def chain() -> None:
        x = start
        for _ in range(work.num_operations):
            x = x * 1.0
        torch.autograd.grad(x, start, torch.ones_like(x))

    return _seconds(chain, device, work.min_s) / (2 * work.num_operations)


def _cpu_params_per_s(work: Workload) -> float:
    """Returns the speed of the kernel that the CPU optimizer calls."""
    param = torch.zeros(work.cpu_params, requires_grad=True)
    param.grad = torch.ones_like(param)
    optimizer = torch.optim.AdamW([param], fused=True)
    optimizer.step()  # makes the moments
    return work.cpu_params / _seconds(optimizer.step, torch.device("cpu"), work.min_s)


def _random(device: torch.device, *shape: int) -> torch.Tensor:
    """Returns a tensor (bf16): a GPU takes more power, and so may be slower, with random numbers than with zeros."""
    return torch.randn(shape, device=device, dtype=torch.bfloat16)


def _seconds(call: Callable[[], object], device: torch.device, min_s: float) -> float:
    """Returns the seconds of a call: the median of rounds of as many calls as take `min_s` together."""
    call()  # compiles and chooses kernels
    num_calls = max(1, round(min_s / _ROUNDS / _round_s(call, device, 1)))
    return statistics.median(_round_s(call, device, num_calls) / num_calls for _ in range(_ROUNDS))


def _round_s(call: Callable[[], object], device: torch.device, num_calls: int) -> float:
    _finish(device)
    started = time.perf_counter()
    for _ in range(num_calls):
        call()
    _finish(device)
    return time.perf_counter() - started


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
