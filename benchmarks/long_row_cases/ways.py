"""Defines the models, and the ways to train them on long rows, as overrides of a recipe."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model_shapes import QWEN2_1_5B, QWEN3_8B, TINY_SIZES

from nemo_offload_rl.config import load
from nemo_offload_rl.config.validate import for_machine

_RECIPES = Path(__file__).parents[2] / "examples" / "configs"
MODELS: Mapping[str, Mapping[str, Any]] = {
    "1.5b": QWEN2_1_5B,
    "8b": QWEN3_8B | {"dtype": "bfloat16"},  # in float32 its weights would be made on the CPU, which takes minutes
    "tiny": QWEN2_1_5B | TINY_SIZES,
}
_MEGATRON = "policy.megatron_cfg"


@dataclass(frozen=True)
class Way:
    """Describes what a step keeps of the forward pass, where, and what it computes again.

    Attributes:
        modules: `offload_modules`; empty where activations stay on the GPU.
        segment: layers that are recomputed from one input; 0 where none is recomputed.
        tiles: whether MLPs are computed in tiles.
    """

    modules: tuple[str, ...] = ()
    segment: int = 1
    tiles: bool = True

    @property
    def overrides(self) -> list[str]:
        """Returns what makes a recipe train in this way."""
        again = [
            f"{_MEGATRON}.activation_checkpointing=true",
            f"++{_MEGATRON}.recompute_method=uniform",
            f"++{_MEGATRON}.recompute_num_layers={self.segment}",
        ]
        moved = [
            f"{_MEGATRON}.fine_grained_activation_offloading=true",
            f"{_MEGATRON}.offload_modules=[{','.join(self.modules)}]",
        ]
        tiles = f"{_MEGATRON}.mlp_tile_tokens={'auto' if self.tiles else 'null'}"
        return [*(again if self.segment else ()), *(moved if self.modules else ()), tiles]

    @property
    def layer_passes(self) -> float:
        """Returns the forward passes of a layer in a step: a segment's last layer runs twice, the others thrice."""
        if not self.segment:
            return 1.0
        return 2 + (self.segment - 1) / self.segment if "layer_input" in self.modules else 2.0

    @property
    def attention_passes(self) -> float:
        """Returns the forward passes of a layer's attention in a step."""
        return 1.0 if "core_attn" in self.modules else self.layer_passes


WAYS: Mapping[str, Way] = {
    "ours_attention_kept": Way(("layer_input", "core_attn")),
    "ours": Way(("layer_input",)),
    "segments2": Way(("layer_input",), segment=2),
    "segments4": Way(("layer_input",), segment=4),
    "recompute": Way(tiles=False),
    "modules": Way(("qkv_linear", "core_attn", "attn_proj"), segment=0, tiles=False),
}


@dataclass(frozen=True)
class Case:
    """Describes what a process measures.

    Attributes:
        model: of `MODELS`.
        tokens: of the only row of a step.
        way: of `WAYS`.
        algorithm: sft for training alone, grpo with log-prob passes before it.
    """

    model: str
    tokens: int
    way: str
    algorithm: str = "sft"

    def config(self, *, has_gpus: bool) -> Any:
        """Returns the recipe for a machine with GPUs or without; all state but the optimizer's stays on the GPU."""
        overrides = [
            f"policy.max_total_sequence_length={self.tokens}",
            "policy.train_global_batch_size=1",
            "policy.train_micro_batch_size=1",
            "policy.sequence_packing.enabled=false",
            "++policy.residency.table={train: {optimizer_state: streamed}, generate: {params: keep}}",
            "policy.offload_optimizer_for_refit=false",
            f"{_MEGATRON}.scheduler.lr_decay_iters=1000",
            f"{_MEGATRON}.use_fused_linear_logprobs=true",
            *WAYS[self.way].overrides,
        ]
        if self.algorithm == "grpo" and self.model == "8b":  # reference weights would take another 15 GiB of the host
            overrides.append("loss_fn.reference_policy_kl_penalty=0")
        recipe = {"sft": "sft.yaml", "grpo": "grpo_math_1B_megatron.yaml"}[self.algorithm]
        config, _ = for_machine(dict(load(_RECIPES / recipe, overrides).config), has_gpus=has_gpus)
        return config | {"policy": config["policy"] | {"hf_config": dict(MODELS[self.model])}}
