"""Provides a tiny bf16 GPT of megatron-core in training, without our worker, for the adapters; GPU or CPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import nemo_offload_rl.mcore  # noqa: F401  # isort: skip  (lets megatron run without CUDA, so it comes first)
import pytest
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from torch.nn.attention import SDPBackend, sdpa_kernel

from nemo_offload_rl.mcore.model.local_spec import local_block_spec
from nemo_offload_rl.residency.optimizer_state import state_tensors

VOCAB_SIZE, LENGTH = 64, 16


def each_device() -> list[Any]:
    """Returns a fixture's parameters: models are built on the GPU if there is one, else on the CPU."""
    on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="is for machines without a GPU")
    return [pytest.param("cpu", marks=on_cpu), pytest.param("cuda", marks=pytest.mark.gpu)]


@contextmanager
def one_rank() -> Iterator[None]:
    torch.set_num_threads(1)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    try:
        with sdpa_kernel(SDPBackend.MATH):  # other backends' backward passes may differ from run to run on a GPU
            yield
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


@dataclass
class TinyMegatron:
    model: Any
    optimizer: Any

    def batch(self, seed: int) -> torch.Tensor:
        """Returns random tokens [B, S]."""
        return torch.randint(VOCAB_SIZE, (4, LENGTH), generator=torch.Generator().manual_seed(seed)).cuda()

    def logits(self, seed: int) -> torch.Tensor:
        """Returns the logits of a batch, without gradients."""
        tokens = self.batch(seed)
        with torch.no_grad():
            return self.model(tokens, torch.arange(LENGTH).cuda().expand_as(tokens), None)

    def forward_backward(self, seed: int) -> float:
        """Accumulates the gradients of a batch chosen by the seed; returns the loss of predicting each next token."""
        tokens = self.batch(seed)
        positions = torch.arange(LENGTH).cuda().expand_as(tokens)
        loss = self.model(tokens, positions, None, labels=tokens.roll(-1, 1)).mean()
        loss.backward()
        finalize_model_grads([self.model])
        return float(loss.detach())

    def step(self, seed: int) -> tuple[float, float]:
        """Trains on a batch that the seed selects; returns the loss and the gradient norm."""
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss = self.forward_backward(seed)
        _, norm, _ = self.optimizer.step()
        return loss, float(norm)

    def everything(self) -> dict[str, torch.Tensor]:
        parameters = {name: tensor.detach().clone() for name, tensor in self.model.named_parameters()}
        return self.optimizer_state() | parameters

    def optimizer_state(self) -> dict[str, torch.Tensor]:
        device = next(self.model.parameters()).device
        return {name: tensor.detach().clone() for name, tensor in state_tensors(self.optimizer, device)}


def tiny_megatron(*, forward_only: bool = False, use_distributed_optimizer: bool = True, **ddp: Any) -> TinyMegatron:
    """Builds the model; every call gives the same numbers."""
    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2}
    config = TransformerConfig(**sizes, bf16=True, params_dtype=torch.bfloat16)
    gpt = GPTModel(config, local_block_spec(config), vocab_size=VOCAB_SIZE, max_sequence_length=LENGTH)
    model = Float16Module(config, gpt.cuda())
    if forward_only:
        return TinyMegatron(model, None)
    ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=use_distributed_optimizer, **ddp)
    model = DistributedDataParallel(config, ddp_config, model)
    adam = OptimizerConfig(optimizer="adam", lr=1e-2, bf16=True, use_distributed_optimizer=use_distributed_optimizer)
    return TinyMegatron(model, get_megatron_optimizer(adam, [model], use_gloo_process_groups=False))
