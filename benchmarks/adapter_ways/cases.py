"""Builds what is moved: models with random weights, their gradients and optimizers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from model_shapes import QWEN2_1_5B

_RECIPE = ("policy.max_total_sequence_length=512", "policy.sequence_packing.enabled=false")
_PRECISION_AWARE = "policy.megatron_cfg.optimizer.use_precision_aware_optimizer"

EXPERTS: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 512,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 1024,
    "tie_word_embeddings": True,
    "vocab_size": 32768,
    "num_experts": 64,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 256,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
}
"""0.7 B parameters in 3,600 tensors, of which the optimizer makes 10,800."""
_TINY = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "vocab_size": 512, "head_dim": 16}
_TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2}
_TINY_EXPERTS = {"num_experts": 4, "moe_intermediate_size": 64}


@dataclass(frozen=True)
class Case:
    """Describes a model and how its optimizer keeps its state."""

    name: str
    hf_config: Mapping[str, Any]
    overrides: tuple[str, ...]

    def scaled(self, scale: str) -> "Case":
        """Returns the case, or ("tiny") the same case with a tiny model."""
        if scale == "full":
            return self
        tiny = _TINY | (_TINY_EXPERTS if "num_experts" in self.hf_config else {})
        return Case(self.name, {**self.hf_config, **tiny}, self.overrides)


CASES: Mapping[str, Case] = {
    case.name: case
    for case in (
        Case("1.5B, 12 bytes a parameter", QWEN2_1_5B, (*_RECIPE, f"{_PRECISION_AWARE}=false")),
        Case("1.5B, 10 bytes a parameter", QWEN2_1_5B, (*_RECIPE, f"{_PRECISION_AWARE}=true")),
        Case("experts, 10,000 tensors", EXPERTS, (*_RECIPE, f"{_PRECISION_AWARE}=false")),
    )
}
