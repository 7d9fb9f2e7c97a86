"""Estimates the least that activations and logits take of a GPU in a training step."""

from collections.abc import Mapping, Sequence
from typing import Any

from nemo_offload_rl.plan.architecture import read_architecture
from nemo_offload_rl.plan.saved_tensors import SAVED_BY, ActivationFacts


def least_activation_bytes(
    hf_config: Mapping[str, Any], policy: Mapping[str, Any], stages: Sequence[ActivationFacts]
) -> tuple[int, ...]:
    """Returns the GPU memory that one rank of each pipeline stage needs for its longest micro-batch, at least.

    Of logits it counts those of the micro-batch and their gradient, in the model's type; of layers what they save, or
    with recomputation their inputs alone. Offloaded activations, temporary tensors and fragmentation are left out.

    Args:
        hf_config: the model's Hugging Face config with every field, as its `to_dict()` gives it.
        policy: the recipe's section, validated.
        stages: the facts of activations of each stage.
    """
    model, cfg = read_architecture(hf_config, policy["megatron_cfg"]), policy["megatron_cfg"]
    tensor = cfg["tensor_model_parallel_size"]
    saved = [_saved_bytes(facts, cfg, model.dense_ffn_hidden_size // tensor) for facts in stages]
    tokens = stages[-1].num_tokens // cfg["context_parallel_size"]
    if cfg["use_fused_linear_logprobs"]:
        tokens = min(tokens, cfg["fused_linear_logprobs_chunk_size"])
    saved[-1] += 2 * tokens * -(-model.vocab_size // tensor) * stages[-1].element_size
    return tuple(saved)


def _saved_bytes(facts: ActivationFacts, cfg: Mapping[str, Any], dense_ffn_size: int) -> int:
    """Of the micro-batches in flight; divided by context-parallel ranks, as their tokens are."""
    if cfg["fine_grained_activation_offloading"]:
        return 0
    residual = facts.num_residual_tokens * facts.hidden_size * facts.element_size
    of_layer = residual
    if not cfg["activation_checkpointing"]:
        # Experts save one name's storage once, whether their MLP is one fused operation or several.
        apart = (saves for name, saves in SAVED_BY.items() if name != "fused_group_mlp")
        storages = {tensor.name: tensor.nbytes for saves in apart for tensor in saves(facts)}
        of_layer = sum(storages.values())
        if not facts.is_moe:
            # The MLP's input, its norm's output, gate and up projection in one, and their product.
            of_layer += 2 * residual + 3 * facts.num_tokens * dense_ffn_size * facts.element_size
    in_flight = facts.num_layers * facts.num_chunks_in_flight // facts.num_model_chunks
    return int(of_layer * in_flight // cfg["context_parallel_size"])
