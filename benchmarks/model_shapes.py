"""Lists sizes of public models, from their config.json, for benchmarks (with random weights), tests and docs."""

from collections.abc import Mapping
from typing import Any

QWEN2_0_5B: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
}
"""Qwen2.5-0.5B's."""

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

QWEN2_7B: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "tie_word_embeddings": False,
    "vocab_size": 152064,
}
"""Qwen2.5-7B's, and those of Qwen2.5-Math-7B."""

_LLAMA_3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_theta": 500000.0,
}

LLAMA_1B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 8192,
    "tie_word_embeddings": True,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_parameters": _LLAMA_3_ROPE | {"factor": 32.0},
}
"""Llama-3.2-1B's."""

LLAMA_8B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_parameters": _LLAMA_3_ROPE | {"factor": 8.0},
}
"""Llama-3.1-8B's."""

LLAMA_70B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 28672,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_parameters": _LLAMA_3_ROPE | {"factor": 8.0},
}
"""Llama-3.1-70B's, and those of Llama-3.3-70B."""

QWEN3_0_6B: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
}
"""Qwen3-0.6B's."""

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

QWEN3_32B: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 5120,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 25600,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}
"""Qwen3-32B's."""

QWEN3_30B_A3B: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
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
"""Qwen3-30B-A3B's."""

QWEN3_EXPERTS: dict[str, Any] = QWEN3_30B_A3B | {"num_hidden_layers": 8}
"""Qwen3-30B-A3B's with 8 of its 48 layers: 5.5 B parameters, most of them in 3,072 matrices of experts."""

QWEN3_235B_A22B: dict[str, Any] = QWEN3_30B_A3B | {
    "hidden_size": 4096,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
}
"""Qwen3-235B-A22B's."""

SIZES_OF_NAME: Mapping[str, dict[str, Any]] = {
    "Qwen/Qwen2.5-1.5B": QWEN2_1_5B,
    "Qwen/Qwen2.5-7B-Instruct": QWEN2_7B,
    "Qwen/Qwen2.5-Math-7B": QWEN2_7B,
    "Qwen/Qwen3-0.6B": QWEN3_0_6B,
    "Qwen/Qwen3-235B-A22B": QWEN3_235B_A22B,
    "Qwen/Qwen3-30B-A3B": QWEN3_30B_A3B,
    "Qwen/Qwen3-32B": QWEN3_32B,
    "meta-llama/Llama-3.1-70B": LLAMA_70B,
    "meta-llama/Llama-3.1-8B": LLAMA_8B,
    "meta-llama/Llama-3.1-8B-Instruct": LLAMA_8B,
    "meta-llama/Llama-3.2-1B-Instruct": LLAMA_1B,
    "meta-llama/Llama-3.3-70B-Instruct": LLAMA_70B,
}
"""By the names that recipes of NeMo-RL have for them."""

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
