"""Sizes of public models, which the benchmarks give random weights."""

from typing import Any

QWEN2_1_5B: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 1536,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "intermediate_size": 8960,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
}
"""Qwen2.5-1.5B's."""

QWEN3_8B: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}
"""Qwen3-8B's."""

QWEN3_EXPERTS: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}
"""Qwen3-30B-A3B's with 8 of its 48 layers: 5.5 B parameters, most of them in 3,072 matrices of experts."""

TINY_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "vocab_size": 512,
    "head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
"""What makes any of these a model for a try on a CPU."""
