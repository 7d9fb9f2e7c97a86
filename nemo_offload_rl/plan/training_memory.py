"""Estimates the GPU memory of activations and logits: the least of a training step, and the most of a pass."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from nemo_offload_rl.activation_offload.schedule import ActivationOptions
from nemo_offload_rl.config.megatron import megatron_field, tokens_of_tile
from nemo_offload_rl.config.rules.modules import KEPT_ATTENTION, recomputes_layers
from nemo_offload_rl.config.schema.megatron import MegatronConfig
from nemo_offload_rl.config.schema.policy import PolicyConfig, filters_logprobs, sampling_of
from nemo_offload_rl.memory.units import MIB
from nemo_offload_rl.plan.activations import module_bytes, slab_bytes
from nemo_offload_rl.plan.architecture import Architecture, read_architecture
from nemo_offload_rl.plan.saved_tensors import QUERIES_KEYS_VALUES, SAVED_BY, ActivationFacts

# Tokens whose log-probs are computed in float32 at one time, and the most float32 copies of their logits, where no
# kernel reads the logits once (mcore.logprob). To find the tokens of top_p, all are sorted, and their probabilities
# summed up in float64: the logits, the sorted ones, and three tensors in float64.
_FLOAT32_TOKENS, _FLOAT32_COPIES, _FLOAT32_COPIES_TO_SORT = 1024, 3, 8
# Tensors of the hidden size beside the logits: the last layer's output and its norm's.
_TENSORS_BESIDE_LOGITS = 2
# Workspaces of cuBLAS and Transformer Engine, allocated before a pass (docs/results/plan_accuracy.md).
_WORKSPACE_BYTES = 96 * MIB
_FP32_BYTES = 4
_ATTENTION = ("qkv_linear", "core_attn", "attn_proj")
# Layers whose activations are on the GPU while they are being copied to or from the host.
_LAYERS_UNDER_WAY = 2
# Tensors of the hidden size that a layer's backward pass has beside those that the layer saves, where its MLP is tiled:
# 6.6 of Qwen2.5-1.5B's shape and of Qwen3-8B's (docs/results/long_rows.md).
_TENSORS_BESIDE_TILES = 7
# The same with a whole MLP, beside the gradient of its gate and up projection, as large as the projection: 1.3 of
# Qwen2.5-1.5B's shape there.
_TENSORS_BESIDE_MLP = 2
# Tensors of the queries' size that attention has beside its own where context-parallel ranks share a row, parts of its
# output that it puts together: 1.7 to 1.9 (docs/results/context_parallel.md).
_TENSORS_OF_SHARED_ROWS = 2


def least_activation_bytes(
    hf_config: Mapping[str, Any], policy: PolicyConfig, stages: Sequence[ActivationFacts]
) -> tuple[int, ...]:
    """Returns the least GPU memory that one rank of each pipeline stage needs for its longest micro-batch.

    It counts the micro-batch's logits, in the model's type, and the tensors that layers save, or
    only their inputs with recomputation. It leaves out offloaded activations, temporary tensors and fragmentation.

    Args:
        hf_config: the model's Hugging Face config with every field, as its `to_dict()` gives it.
        policy: the recipe's `policy` section, validated.
        stages: the activation sizes of each stage.
    """
    model, cfg = read_architecture(hf_config, policy["megatron_cfg"]), policy["megatron_cfg"]
    tensor = cfg["tensor_model_parallel_size"]
    saved = [_saved_bytes(facts, cfg, model.dense_ffn_hidden_size // tensor) for facts in stages]
    tokens = stages[-1].num_tokens
    if cfg["use_fused_linear_logprobs"]:
        tokens = min(tokens, cfg["fused_linear_logprobs_chunk_size"])
    saved[-1] += tokens * -(-model.vocab_size // tensor) * stages[-1].element_size
    return tuple(saved)


def training_pass_bytes(
    hf_config: Mapping[str, Any],
    policy: PolicyConfig,
    stages: Sequence[ActivationFacts],
    offloaded: ActivationOptions | None,
) -> tuple[int, ...]:
    """Returns the most GPU memory that one rank of each pipeline stage takes for a training step's longest micro-batch.

    Beside the tensors that `least_activation_bytes` counts, it includes the layer that is being recomputed or
    differentiated, the activations that offloading leaves on the GPU, and the float32 log-probs of some tokens.

    Args:
        hf_config: the model's Hugging Face config with every field, as its `to_dict()` gives it.
        policy: the recipe's `policy` section, validated.
        stages: the activation sizes of each stage.
        offloaded: the options of activation offloading; None where it is off.
    """
    cfg = policy["megatron_cfg"]
    model = read_architecture(hf_config, cfg)
    chunk = cfg["fused_linear_logprobs_chunk_size"] if cfg["use_fused_linear_logprobs"] else None
    logits = _output_layer_bytes(model, policy, stages[-1], chunk, trains=True)
    out = []
    for number, facts in enumerate(stages, start=1):
        layer, gradients = _layer_bytes(model, cfg, facts), _gradient_bytes(model, cfg, facts)
        in_flight = facts.num_layers * facts.num_chunks_in_flight // facts.num_model_chunks
        if recomputes_layers(cfg["activation_checkpointing"], cfg["recompute_granularity"]):
            kept = _kept_beside_recomputation(cfg, facts, layer, offloaded) - _moved_bytes(facts, offloaded)
            # megatron-core recomputes all layers of a segment before their backward pass; layer_input their inputs.
            again = layer if offloaded is None else facts.residual_bytes
            recomputed = layer + (facts.num_layers_of_segment - 1) * again
        else:
            kept, recomputed = in_flight * layer - _moved_bytes(facts, offloaded), 0
        working = recomputed + gradients + _shared_row_bytes(cfg, facts)
        # Logits are freed before the last layer's gradients are computed.
        working = max(working, logits) if number == len(stages) else working
        out.append(_WORKSPACE_BYTES + kept + working)
    return tuple(out)


def forward_pass_bytes(
    hf_config: Mapping[str, Any], policy: PolicyConfig, stages: Sequence[ActivationFacts]
) -> tuple[int, ...]:
    """Returns the GPU memory that one rank of each pipeline stage takes for a forward pass that computes log-probs.

    Args:
        hf_config: the model's Hugging Face config with every field, as its `to_dict()` gives it.
        policy: the recipe's `policy` section, validated.
        stages: the activation sizes of each stage, with the tokens of such a pass.
    """
    cfg = policy["megatron_cfg"]
    model = read_architecture(hf_config, cfg)
    fused = cfg["fused_linear_logprobs_chunk_size"] if cfg["use_fused_linear_logprobs"] else None
    # Nothing is saved for a backward pass.
    layers = [_forward_layer_bytes(model, cfg, facts) for facts in stages]
    chunk = policy["logprob_chunk_size"] or fused
    layers[-1] = max(layers[-1], _output_layer_bytes(model, policy, stages[-1], chunk, trains=False))
    return tuple(_WORKSPACE_BYTES + nbytes for nbytes in layers)


def _forward_layer_bytes(model: Architecture, cfg: MegatronConfig, facts: ActivationFacts) -> int:
    """Returns the most bytes that a layer's forward pass has at once: attention's or the MLP's, and its input."""
    saved = {tensor.name: tensor.nbytes for name in _ATTENTION for tensor in SAVED_BY[name](facts)}
    projection = facts.num_tokens * (facts.num_heads + 2 * facts.num_query_groups) * facts.head_dim
    attention = sum(saved.values()) + projection * facts.element_size + _shared_row_bytes(cfg, facts)
    mlp = _layer_bytes(model, cfg, facts) - sum(saved.values())
    if cfg["mlp_tile_tokens"] is not None:
        mlp += _tile_bytes(model, cfg, facts) + facts.residual_bytes  # tiles write into one output
    return facts.residual_bytes + max(attention, mlp)


def _shared_row_bytes(cfg: MegatronConfig, facts: ActivationFacts) -> int:
    """Returns the bytes that attention takes beside its own where context-parallel ranks share a row."""
    queries = facts.num_tokens * facts.num_heads * facts.head_dim * facts.element_size
    return _TENSORS_OF_SHARED_ROWS * queries if cfg["context_parallel_size"] > 1 else 0


def _layer_bytes(model: Architecture, cfg: MegatronConfig, facts: ActivationFacts) -> int:
    """Returns the bytes that a layer saves per micro-batch; an upper bound where only some layers have experts."""
    storages = {tensor.name: tensor.nbytes for saves in SAVED_BY.values() for tensor in saves(facts)}
    nbytes = sum(storages.values())
    if not facts.is_moe or model.has_dense_layers:
        # Too much for a model with experts, whose tensors are counted, too. In tiles an MLP saves its input.
        nbytes += facts.residual_bytes if cfg["mlp_tile_tokens"] is not None else _dense_mlp_bytes(model, cfg, facts)
    return nbytes


def _dense_mlp_bytes(model: Architecture, cfg: MegatronConfig, facts: ActivationFacts) -> int:
    """Returns the bytes that a dense MLP saves, whole or as one tile."""
    # Its input, its norm's output, gate and up projection (one tensor), their product, and the activated gate if the
    # kernels are not fused.
    ffn = facts.num_tokens * (model.dense_ffn_hidden_size // cfg["tensor_model_parallel_size"]) * facts.element_size
    return 2 * facts.residual_bytes + (3 if facts.fused_swiglu else 4) * ffn


def _tile_bytes(model: Architecture, cfg: MegatronConfig, facts: ActivationFacts) -> int:
    """Returns the bytes of one tile of an MLP; 0 if MLPs are not tiled."""
    tile = tokens_of_tile(cfg["mlp_tile_tokens"], model.hidden_size)
    if tile is None or tile >= facts.num_tokens:
        return 0 if tile is None else _dense_mlp_bytes(model, cfg, facts)
    rows = -(-facts.num_residual_tokens * tile // facts.num_tokens)
    return _dense_mlp_bytes(model, cfg, dataclasses.replace(facts, num_tokens=tile, num_residual_tokens=rows))


def _gradient_bytes(model: Architecture, cfg: MegatronConfig, facts: ActivationFacts) -> int:
    """Returns the bytes that the layer which is differentiated takes beside what it saved."""
    if cfg["mlp_tile_tokens"] is None:
        return _mlp_gradient_bytes(model, cfg, facts)
    # A tile's tensors and their gradients; of the weights' gradients a tile's and the float32 sums.
    weights = 3 * model.hidden_size * model.dense_ffn_hidden_size // cfg["tensor_model_parallel_size"]
    of_weights = (facts.element_size + _FP32_BYTES) * weights
    of_tile = facts.residual_bytes + 2 * _tile_bytes(model, cfg, facts)
    return of_weights + max(of_tile, _TENSORS_BESIDE_TILES * facts.residual_bytes)


def _mlp_gradient_bytes(model: Architecture, cfg: MegatronConfig, facts: ActivationFacts) -> int:
    """Returns the bytes of gradients while a whole MLP is differentiated."""
    projections = [facts.num_expert_tokens * facts.expert_ffn_size]
    if not facts.is_moe or model.has_dense_layers:
        projections.append(facts.num_tokens * (model.dense_ffn_hidden_size // cfg["tensor_model_parallel_size"]))
    return 2 * max(projections) * facts.element_size + _TENSORS_BESIDE_MLP * facts.residual_bytes


def _kept_beside_recomputation(
    cfg: MegatronConfig, facts: ActivationFacts, layer: int, offloaded: ActivationOptions | None
) -> int:
    """Returns what micro-batches in flight keep where layers are recomputed, as if nothing were offloaded.

    Args:
        cfg: the recipe's `policy.megatron_cfg` section.
        facts: the activation sizes of a stage.
        layer: the bytes that a layer saves which is not recomputed.
        offloaded: the options of activation offloading; None where it is off.
    """
    num_layers = -(-facts.num_layers // facts.num_model_chunks)
    inputs, whole = -(-num_layers // facts.num_layers_of_segment), 0
    if megatron_field(cfg, "recompute_method") == "block":  # only the first layers are recomputed, one at a time
        inputs = min(num_layers, megatron_field(cfg, "recompute_num_layers") or 1)
        whole = num_layers - inputs
    kept = facts.num_chunks_in_flight * (inputs * facts.residual_bytes + whole * layer)
    if offloaded is None or KEPT_ATTENTION not in offloaded.modules:
        return kept
    saved = SAVED_BY[KEPT_ATTENTION](facts)
    attention = sum(tensor.nbytes for tensor in saved if tensor.name not in QUERIES_KEYS_VALUES)
    # In a segment's backward pass the attention of its layers is there at once.
    return kept + (facts.num_chunks_in_flight * num_layers + facts.num_layers_of_segment - 1) * attention


def _moved_bytes(facts: ActivationFacts, offloaded: ActivationOptions | None) -> int:
    """Returns the GPU memory that offloading frees over all micro-batches in flight, less the layers being copied."""
    if offloaded is None:
        return 0
    modules = [module for module in module_bytes(facts, offloaded).values() if module.distinct]
    freed = sum(module.in_flight * (module.distinct - module.held) // module.distinct for module in modules)
    under_way = _LAYERS_UNDER_WAY * sum(module.distinct for module in modules)
    return max(0, min(freed, slab_bytes(facts, offloaded)) - under_way)


def _output_layer_bytes(
    model: Architecture, policy: PolicyConfig, facts: ActivationFacts, chunk: int | None, *, trains: bool
) -> int:
    """Returns the bytes of logits and log-probs, with the gradients of a training step.

    Args:
        model: the architecture.
        policy: the recipe's `policy` section.
        facts: the activation sizes of the last stage.
        chunk: tokens whose logits are computed at one time; None for all.
        trains: whether a backward pass follows.
    """
    cfg, tensor = policy["megatron_cfg"], policy["megatron_cfg"]["tensor_model_parallel_size"]
    columns = -(-model.vocab_size // tensor)
    num_logits = facts.num_tokens if chunk is None else min(chunk, facts.num_tokens)
    logits = num_logits * columns * facts.element_size
    residual = facts.num_tokens * facts.hidden_size * facts.element_size
    sampling = sampling_of(policy)
    are_filtered = filters_logprobs(sampling)
    is_scaled = sampling is not None and sampling["temperature"] != 1
    # One kernel reads them, and writes their gradient over them.
    has_kernel = not are_filtered and (chunk is not None or not (is_scaled or model.vocab_size % tensor))
    in_float32 = min(num_logits, _FLOAT32_TOKENS) if chunk is None else num_logits
    copies = 0 if has_kernel else _FLOAT32_COPIES * in_float32 * columns * _FP32_BYTES
    beside = _TENSORS_BESIDE_LOGITS * residual
    # A chunk's logits are freed once those of the next one have been computed.
    at_once = logits if chunk is None else 2 * logits
    forward = at_once + copies
    if are_filtered and sampling is not None and sampling["top_k"] is None:  # the whole vocabulary is sorted
        forward = at_once + _FLOAT32_COPIES_TO_SORT * in_float32 * tensor * columns * _FP32_BYTES
    if not trains:
        return beside + forward
    weight_gradient = columns * facts.hidden_size * facts.element_size
    if chunk is not None:  # the hidden states' gradient is summed up in float32
        of_hidden = facts.num_tokens * facts.hidden_size * _FP32_BYTES
        return beside + max(forward, weight_gradient + of_hidden + copies + max(at_once, logits + residual))
    if megatron_field(cfg, "gradient_accumulation_fusion"):
        weight_gradient = 0
    # With filters a step has log-probs without them, too, and another gradient.
    gradients = 0 if has_kernel else (1 + are_filtered) * logits + copies
    return beside + max(forward, residual + logits + max(gradients, weight_gradient))


def _saved_bytes(facts: ActivationFacts, cfg: MegatronConfig, dense_ffn_size: int) -> int:
    """Returns the bytes that a rank's layers save for the micro-batches in flight."""
    if cfg["fine_grained_activation_offloading"]:
        return 0
    of_layer = facts.residual_bytes
    if not cfg["activation_checkpointing"]:
        # Left out: the fused expert MLP saves the same storages as the separate modules.
        apart = (saves for name, saves in SAVED_BY.items() if name != "fused_group_mlp")
        storages = {tensor.name: tensor.nbytes for saves in apart for tensor in saves(facts)}
        of_layer = sum(storages.values())
        if cfg["mlp_tile_tokens"] is not None:
            of_layer += facts.residual_bytes
        elif not facts.is_moe:
            # The MLP's input, its norm's output, gate and up projection (one tensor), and their product.
            of_layer += 2 * facts.residual_bytes + 3 * facts.num_tokens * dense_ffn_size * facts.element_size
    in_flight = facts.num_layers * facts.num_chunks_in_flight // facts.num_model_chunks
    return int(of_layer * (in_flight // facts.num_layers_of_segment))
