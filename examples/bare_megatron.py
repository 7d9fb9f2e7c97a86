"""The offloader in a plain megatron-core loop: `python examples/bare_megatron.py [--no-offload|--streamed]`."""

import argparse

import torch

import nemo_offload_rl.mcore  # noqa: F401  # isort: skip  (lets megatron run without CUDA, so it comes before)
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

from nemo_offload_rl.mcore.model.local_spec import local_block_spec
from nemo_offload_rl.memory.pinned import PinnedArena
from nemo_offload_rl.residency.attach import attach
from nemo_offload_rl.residency.table import DEFAULT_TABLE, STREAMED_TABLE, Phase


def build() -> tuple[DistributedDataParallel, MegatronOptimizer]:
    """A tiny bf16 GPT and its DistributedOptimizer."""
    torch.distributed.init_process_group(store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    cfg = TransformerConfig(num_layers=2, hidden_size=64, num_attention_heads=4, params_dtype=torch.bfloat16, bf16=True)
    gpt = Float16Module(cfg, GPTModel(cfg, local_block_spec(cfg), vocab_size=128, max_sequence_length=32))
    model = DistributedDataParallel(cfg, DistributedDataParallelConfig(use_distributed_optimizer=True), gpt.cuda())
    adam = OptimizerConfig(optimizer="adam", lr=1e-3, bf16=True, use_distributed_optimizer=True)
    return model, get_megatron_optimizer(adam, [model], use_gloo_process_groups=False)


def train_step(model: DistributedDataParallel, optimizer: MegatronOptimizer, tokens: torch.Tensor) -> float:
    """A step on tokens [B, S]; returns the loss of predicting the next of each."""
    model.zero_grad_buffer()
    optimizer.zero_grad()
    loss = model(tokens, torch.arange(tokens.shape[1]).cuda().expand_as(tokens), None, labels=tokens.roll(-1, 1)).mean()
    loss.backward()
    finalize_model_grads([model])
    optimizer.step()
    return loss.item()


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--no-offload", action="store_true")
parser.add_argument("--streamed", dest="table", action="store_const", const=STREAMED_TABLE, default=DEFAULT_TABLE)
arguments = parser.parse_args()
(model, optimizer), tokens = build(), torch.randint(128, (8, 32)).cuda()
offloader = None if arguments.no_offload else attach([model], optimizer, PinnedArena(), table=arguments.table)
for step in range(5):
    print(f"step {step}: loss {train_step(model, optimizer, tokens):.9f}")
    for phase in (Phase.REFIT, Phase.GENERATE, Phase.TRAIN):
        if offloader is not None:
            offloader.residency.enter(phase)  # after REFIT weights are sent; after GENERATE the GPU is the generator's
if offloader is not None:
    print(*(f"{name}: {value:.6f}" for name, value in offloader.meter.take_metrics().items()), sep="\n")
    offloader.close()
torch.distributed.destroy_process_group()  # without it gloo's threads abort one exit in forty
