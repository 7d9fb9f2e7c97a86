"""Provides a tiny Qwen3-shaped policy, and batches for it."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from nemo_offload_rl.config import resolve_absent_keys
from nemo_offload_rl.data.batch import BatchedData

VOCAB_SIZE = 14

TINY_QWEN3: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128, "tie_word_embeddings": True,
    "vocab_size": VOCAB_SIZE,
}  # fmt: skip
TINY_QWEN3_MOE: dict[str, Any] = TINY_QWEN3 | {
    "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
    "norm_topk_prob": True, "decoder_sparse_step": 1,
}  # fmt: skip
TINY_DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3", "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 4, "intermediate_size": 1024, "vocab_size": VOCAB_SIZE, "tie_word_embeddings": False,
    "q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "first_k_dense_replace": 1, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "moe_intermediate_size": 256, "n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 0,
}  # fmt: skip
"""Multi-latent attention, whose layers begin with a norm of its own also where Transformer Engine computes them."""


def tiny_policy(hf_config: dict[str, Any] | None = None, precision: str = "float32", **megatron: Any) -> dict[str, Any]:
    """Returns a policy section; `megatron` overrides keys of megatron_cfg, and single keys of its three sections."""
    cfg: dict[str, Any] = {
        "enabled": True,
        "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "context_parallel_size": 1,
        "expert_model_parallel_size": 1, "expert_tensor_parallel_size": 1, "sequence_parallel": False,
        "activation_checkpointing": False, "recompute_granularity": "full", "recompute_modules": None,
        "freeze_moe_router": False, "moe_router_load_balancing_type": "none", "moe_token_dispatcher_type": "alltoall",
        "apply_rope_fusion": False, "cuda_graph_impl": "none", "empty_unused_memory_level": 0,
        "optimizer": {
            "optimizer": "adam", "lr": 1e-3, "min_lr": 1e-3, "weight_decay": 0.01, "clip_grad": 1.0,
            "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_eps": 1e-8,
            "bf16": precision == "bfloat16", "fp16": False, "params_dtype": "float32",
            "use_distributed_optimizer": True, "use_precision_aware_optimizer": False,
        },
        "scheduler": {
            "lr_warmup_init": 1e-4, "override_opt_param_scheduler": True, "lr_warmup_iters": 2, "lr_decay_iters": 100,
            "lr_decay_style": "constant", "start_weight_decay": 0.01, "end_weight_decay": 0.01,
            "weight_decay_incr_style": "constant",
        },
        "distributed_data_parallel_config": {
            "grad_reduce_in_fp32": False, "overlap_grad_reduce": False, "overlap_param_gather": False,
        },
    }  # fmt: skip
    sections = ("optimizer", "scheduler", "distributed_data_parallel_config")
    megatron |= {name: cfg[name] | megatron[name] for name in sections if name in megatron}
    policy = {
        "model_name": "tiny", "hf_config": TINY_QWEN3 if hf_config is None else hf_config, "precision": precision,
        "max_total_sequence_length": 32, "make_sequence_length_divisible_by": cfg["tensor_model_parallel_size"] * 2,
        "megatron_cfg": {"fine_grained_activation_offloading": False} | cfg | megatron,
    }  # fmt: skip
    resolve_absent_keys({"policy": policy})
    return policy


LAYOUT_WORDS = {
    "tp2": {"tensor_model_parallel_size": 2}, "sp": {"sequence_parallel": True}, "cp2": {"context_parallel_size": 2},
    "pp2": {"pipeline_model_parallel_size": 2}, "vpp2": {"virtual_pipeline_model_parallel_size": 2},
    "ep2": {"expert_model_parallel_size": 2}, "recomputed": {"activation_checkpointing": True},
}  # fmt: skip


def layout_of(name: str, **words: dict[str, Any]) -> dict[str, Any]:
    """Returns megatron_cfg's keys of a layout like `pp2 vpp2`; `words` adds others, and unknown ones have no keys."""
    known = LAYOUT_WORDS | words
    return {key: value for word in name.split() for key, value in known.get(word, {}).items()}


def policy_without_model(**keys: Any) -> dict[str, Any]:
    """Returns a policy section for a plan without model sizes: these keys, with defaults for absent ones."""
    policy = {"megatron_cfg": {"fine_grained_activation_offloading": False}, **keys}
    resolve_absent_keys({"policy": policy})
    return policy


def packed_rows(tokens: int) -> dict[str, Any]:
    """Returns the policy section's `sequence_packing` for rows of so many tokens."""
    algorithm = {"algorithm": "modified_first_fit_decreasing", "sequence_length_round": 8}
    return {"enabled": True, "train_mb_tokens": tokens, "logprob_mb_tokens": tokens} | algorithm


def with_plain_sgd(policy: dict[str, Any], rate: float = 1.0) -> dict[str, Any]:
    """Returns the policy with plain SGD, whose update is the gradient times its rate."""
    policy["megatron_cfg"]["optimizer"] |= {
        "optimizer": "sgd", "use_distributed_optimizer": False,  # it does not support sgd
        "lr": rate, "min_lr": rate, "weight_decay": 0.0, "sgd_momentum": 0.0, "clip_grad": 0.0,
    }  # fmt: skip
    policy["megatron_cfg"]["scheduler"] |= {
        "lr_warmup_init": 0.0, "lr_warmup_iters": 0, "start_weight_decay": 0.0, "end_weight_decay": 0.0,
    }  # fmt: skip
    return policy


def random_batch(rows: int, longest: int = 12, seed: int = 0) -> BatchedData:
    """Returns right-padded rows of unequal lengths; the first third of each row is a prompt."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB_SIZE, (rows, longest), generator=generator)
    lengths = torch.randint(4, longest + 1, (rows,), generator=generator)
    lengths[0] = longest
    return _batch(ids, lengths, longest // 3)


def batch_of_lengths(lengths: Sequence[int], prompt: int = 2, seed: int = 0) -> BatchedData:
    """Returns right-padded rows of these lengths; the first `prompt` tokens of each are its prompt."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB_SIZE, (len(lengths), max(lengths)), generator=generator)
    return _batch(ids, torch.tensor(lengths), prompt)


def _batch(ids: torch.Tensor, lengths: torch.Tensor, prompt: int) -> BatchedData:
    columns = torch.arange(ids.shape[1])[None]
    real = columns < lengths[:, None]
    return BatchedData(
        input_ids=torch.where(real, ids, 0), input_lengths=lengths, token_mask=(real & (columns >= prompt)).float(),
        sample_mask=torch.ones(len(ids)),
    )  # fmt: skip


def in_transformers(worker: Any) -> Any:
    """Returns the transformers model with a worker's weights."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        worker.state.bridge.hf_pretrained.save_pretrained(folder)
        weights = {name: tensor.clone() for name, tensor in worker.hf_weights()}
        save_file(weights, Path(folder) / "model.safetensors")
        return AutoModelForCausalLM.from_pretrained(folder)


def logprobs_in_transformers(folder: Path, data: BatchedData, **overrides: Any) -> torch.Tensor:
    """Returns float32 [B, S - 1]: each row's log-probs of its tokens from the second one on, by transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", **overrides
    ).eval()
    with torch.no_grad():
        logits = model(data["input_ids"]).logits.log_softmax(-1)
    return logits[:, :-1].gather(-1, data["input_ids"][:, 1:, None]).squeeze(-1)


def offloading_activations(
    policy: dict[str, Any], modules: list[str], *, mbs: int = 2, gbs: int = 12, **megatron: Any
) -> dict[str, Any]:
    """Returns the policy with these modules offloaded, small tensors too; `megatron` overrides megatron_cfg."""
    policy["megatron_cfg"] |= {
        "fine_grained_activation_offloading": True, "offload_modules": modules, "min_offloaded_tensor_size": 0,
        "num_layers_in_first_pipeline_stage": None, "num_layers_in_last_pipeline_stage": None,
    } | megatron  # fmt: skip
    off = {"enabled": False, "train_mb_tokens": 0, "logprob_mb_tokens": 0, "sequence_length_round": 1}
    return {"sequence_packing": off, "train_micro_batch_size": mbs, "train_global_batch_size": gbs} | policy
