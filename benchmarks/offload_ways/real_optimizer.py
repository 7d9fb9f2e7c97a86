"""Builds a DistributedOptimizer of megatron-core with Qwen2.5-1.5B's sizes and the state it has after a step."""

import contextlib
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from model_shapes import QWEN2_1_5B
from ports import free_port

RECIPE = "examples/configs/grpo_math_1B_megatron.yaml"
OVERRIDES = [
    "policy.max_total_sequence_length=512",
    "policy.sequence_packing.enabled=false",
    "policy.megatron_cfg.optimizer.use_precision_aware_optimizer=false",  # fp32 masters: 12 bytes a parameter
]


def model_sizes(scale: float) -> dict[str, Any]:
    """Returns the model's sizes; below a scale of 1, fewer layers and a smaller vocabulary of a far narrower model."""
    sizes = dict(QWEN2_1_5B)
    if scale < 1:
        sizes |= {
            "hidden_size": 192,
            "intermediate_size": 512,
            "num_hidden_layers": max(1, round(28 * scale)),
            "vocab_size": max(512, round(151936 * scale)),
        }
    return sizes


@contextlib.contextmanager
def real_optimizer(scale: float) -> Iterator[tuple[list[torch.nn.Module], Any]]:
    """Builds model and optimizer with Qwen2.5-1.5B's sizes; see `model_and_optimizer`."""
    with model_and_optimizer(model_sizes(scale), OVERRIDES) as made:
        yield made


@contextlib.contextmanager
def model_and_optimizer(
    hf_config: Mapping[str, Any], overrides: Sequence[str]
) -> Iterator[tuple[list[torch.nn.Module], Any]]:
    """Builds model and optimizer in process groups of one rank; their state has random values.

    Args:
        hf_config: the model's sizes.
        overrides: of the recipe.

    Raises:
        ImportError: megatron-core or Megatron-Bridge is not installed.
    """
    from nemo_offload_rl.config import load
    from nemo_offload_rl.config.validate import for_machine
    from nemo_offload_rl.mcore import distributed
    from nemo_offload_rl.mcore.model import model_config

    config = load(RECIPE, list(overrides)).config
    config, _ = for_machine(config, has_gpus=torch.cuda.is_available())
    policy = dict(config["policy"]) | {"hf_config": dict(hf_config)}
    distributed.initialize(
        model_config.parallel_sizes(policy["megatron_cfg"]),
        rank=0,
        world_size=1,
        local_rank=0,
        master_addr="localhost",
        master_port=free_port(),
        seed=0,
        te_rng_tracker=False,
    )
    torch.manual_seed(0)  # megatron-core creates routers with the CPU's generator, other weights with the ranks' own
    try:
        yield _build(policy)
    finally:
        distributed.destroy()


def _build(policy: Any) -> tuple[list[torch.nn.Module], Any]:
    from megatron.core.optimizer import get_megatron_optimizer

    from nemo_offload_rl.mcore.model import model_config
    from nemo_offload_rl.mcore.optimizer.init_optimizer_state import init_optimizer_state
    from nemo_offload_rl.residency.optimizer_state import state_tensors

    provider = model_config.make_provider(policy, model_config.make_bridge(policy, model_config.hf_config(policy)))
    with contextlib.redirect_stdout(io.StringIO()):  # Megatron-Bridge prints the parameter count
        model = provider.provide_distributed_model(
            ddp_config=model_config.make_ddp_config(policy),
            overlap_param_gather_with_optimizer_step=False,
            use_cpu_initialization=provider.use_cpu_initialization,
        )
    optimizer = get_megatron_optimizer(model_config.make_optimizer_config(policy), model, use_gloo_process_groups=False)
    init_optimizer_state(optimizer)
    device = next(model[0].parameters()).device
    with torch.no_grad():
        for name, tensor in state_tensors(optimizer, device):
            if not name.startswith("master") and tensor.is_floating_point():
                tensor.uniform_(0.0, 1.0)
    return model, optimizer
