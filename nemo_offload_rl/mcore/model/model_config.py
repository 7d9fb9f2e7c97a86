"""Makes Megatron's own configs from a recipe's policy section; pure apart from reading the Hugging Face config."""

import dataclasses
import enum
import functools
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig

from nemo_offload_rl.config.megatron import LAYER_INPUT
from nemo_offload_rl.config.model.families import check_model
from nemo_offload_rl.config.schema.megatron import MegatronConfig
from nemo_offload_rl.config.schema.policy import PolicyConfig
from nemo_offload_rl.hf_config import hf_config, trusts_remote_code
from nemo_offload_rl.mcore import architectures
from nemo_offload_rl.mcore.distributed import ParallelSizes
from nemo_offload_rl.mcore.model.bridge_import import auto_bridge, have_transformer_engine
from nemo_offload_rl.mcore.model.model_checks import check_layers
from nemo_offload_rl.mcore.weights import hf_config_of

# Settings that megatron-core's local layers support.
_WITHOUT_TRANSFORMER_ENGINE: Mapping[str, Any] = {
    "transformer_impl": "local",
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "persist_layer_norm": False,
    "apply_rope_fusion": False,
    "moe_permute_fusion": False,
    "moe_router_fusion": False,
    "moe_grouped_gemm": False,
}
# Features of Transformer Engine's layers on a GPU, and the value that turns each off. On a CPU recipes have them off;
# tests there use them without Transformer Engine.
_OFF_WITHOUT_TRANSFORMER_ENGINE: Mapping[str, Any] = {
    "fine_grained_activation_offloading": False,
    "cuda_graph_impl": "none",
}

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# Fields that NeMo-RL sets even to null, where the bridge has a value of its own (`_apply_moe_config` of its setup.py).
_NULL_COUNTS = frozenset({"moe_router_dtype", "moe_router_num_groups", "moe_router_group_topk"})


def parallel_sizes(megatron_cfg: MegatronConfig) -> ParallelSizes:
    """Returns the parallel sizes that the recipe's `megatron_cfg` asks for."""
    return ParallelSizes(
        tensor=megatron_cfg["tensor_model_parallel_size"],
        pipeline=megatron_cfg["pipeline_model_parallel_size"],
        virtual_pipeline=megatron_cfg["virtual_pipeline_model_parallel_size"],
        context=megatron_cfg["context_parallel_size"],
        expert=megatron_cfg["expert_model_parallel_size"],
        expert_tensor=megatron_cfg["expert_tensor_parallel_size"],
    )


def has_pretrained_weights(policy: PolicyConfig) -> bool:
    """Returns whether the policy starts from weights (a folder or hub name), not from random ones (`hf_config`)."""
    return policy["hf_config"] is None


def make_bridge(policy: PolicyConfig, config: Any) -> Any:
    """Returns an `AutoBridge` for the policy's model, with its weights if it starts from pretrained ones.

    Args:
        policy: the recipe's policy section.
        config: its `hf_config`, which the bridge may change.
    """
    bridge = bridge_of_config(config)
    if not has_pretrained_weights(policy):
        return bridge
    return with_weights_of(bridge, policy["model_name"], trust_remote_code=trusts_remote_code(policy))


def bridge_of_config(config: Any) -> Any:
    """Returns an `AutoBridge` for a Hugging Face config alone, without weights.

    Raises:
        ValueError: Megatron-Bridge has no classes for the config's architecture.
    """
    bridge = auto_bridge()
    try:
        return bridge.from_hf_config(config)
    except ValueError as error:  # forty lines, with all architectures that it knows
        raise ValueError(
            f"The model's architecture {', '.join(config.architectures)} (model_type {config.model_type}) is not one "
            "that Megatron-Bridge can build; choose a model of another family, such as qwen3 or llama."
        ) from error


def with_weights_of(bridge: Any, name: str, *, trust_remote_code: bool) -> Any:
    """Returns an `AutoBridge` for the same Hugging Face config, with the weights of a folder or hub name.

    `AutoBridge.from_hf_pretrained` would read the config again, without `policy.hf_config_overrides`.
    """
    from megatron.bridge.models.hf_pretrained.causal_lm import PreTrainedCausalLM

    source = PreTrainedCausalLM.from_pretrained(name, trust_remote_code=trust_remote_code)
    source.config = bridge.hf_pretrained
    return type(bridge)(source)


def _gradient_accumulation_fusion(cfg: MegatronConfig) -> bool:
    """Returns whether to fuse gradient accumulation; without the key, if the kernel is installed.

    Megatron-Bridge would turn it on with Transformer Engine, which lacks the kernel.
    """
    installed = importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None
    wanted = cfg.get("gradient_accumulation_fusion")
    if wanted and not installed:
        raise ValueError(
            "policy.megatron_cfg.gradient_accumulation_fusion is true, but its kernel fused_weight_gradient_mlp_cuda "
            "(of Apex) is not installed; set it to false or leave it out."
        )
    return installed if wanted is None else wanted


def _recompute_fields(cfg: MegatronConfig) -> dict[str, Any]:
    # NeMo-RL's meaning: the recompute keys count only with activation_checkpointing.
    if not cfg["activation_checkpointing"]:
        return {"recompute_granularity": None, "recompute_method": None, "recompute_num_layers": None}
    granularity = cfg["recompute_granularity"] or "full"
    fields: dict[str, Any] = {"recompute_granularity": granularity}
    if granularity == "full":
        fields |= {"recompute_method": "uniform", "recompute_num_layers": 1}
        fields |= {k: v for k in ("recompute_method", "recompute_num_layers") if (v := cfg.get(k)) is not None}
    elif cfg["recompute_modules"] is not None:
        fields["recompute_modules"] = list(cfg["recompute_modules"])
    return fields


def _dtype_or_same(value: Any) -> Any:
    return getattr(torch, value) if isinstance(value, str) and hasattr(torch, value) else value


def _converted(key: str, value: Any, provider: Any) -> Any:
    """Returns a recipe's value of one of the provider's fields as that field's type: a dtype or a member of an enum."""
    kind = type(getattr(provider, key))
    if issubclass(kind, enum.Enum) and isinstance(value, str):  # megatron-core compares members, and ignores strings
        if value not in kind.__members__:
            raise ValueError(
                f"policy.megatron_cfg.{key} is {value!r}, which megatron-core does not know; set it to one of "
                f"{', '.join(kind.__members__)}."
            )
        return kind[value]
    return _dtype_or_same(value) if key.endswith("_dtype") and key != "moe_router_dtype" else value


def model_overrides(policy: PolicyConfig, provider: Any) -> dict[str, Any]:
    """Returns the fields that the recipe sets on Megatron-Bridge's model provider.

    Args:
        policy: the policy section.
        provider: the provider made for the model; its fields tell which keys of `megatron_cfg` belong to the model.

    Returns:
        Field name to value; a null in the recipe leaves the provider's own value, except for `_NULL_COUNTS`.
    """
    cfg = policy["megatron_cfg"]
    dtype = DTYPES[policy["precision"]]
    names = {field.name for field in dataclasses.fields(provider)}
    recipe = {
        key: _converted(key, value, provider)
        for key, value in cfg.items()
        if key in names and not key.startswith("recompute_") and (value is not None or key in _NULL_COUNTS)
    }
    derived = _recompute_fields(cfg) | {
        "gradient_accumulation_fusion": _gradient_accumulation_fusion(cfg),
        "params_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": False,
        "autocast_dtype": dtype,
        "pipeline_dtype": dtype,
        "mtp_num_layers": None,
        "use_te_rng_tracker": cfg["cuda_graph_impl"] != "none",
        "seq_length": policy["max_total_sequence_length"],
        "variable_seq_lengths": policy["sequence_packing"]["enabled"] and cfg["pipeline_model_parallel_size"] > 1,
        # Pad the vocabulary only as far as tensor parallelism needs; some providers pad it whatever its size.
        "make_vocab_size_divisible_by": 1,
        "should_pad_vocab": provider.vocab_size % cfg["tensor_model_parallel_size"] != 0,
    }
    if derived["variable_seq_lengths"] and not provider.num_moe_experts:
        # The default is allgather, which megatron-core refuses with variable lengths, also in models without experts.
        derived["moe_token_dispatcher_type"] = "alltoall"
    needed: dict[str, Any] = {}
    if cfg["virtual_pipeline_model_parallel_size"] is not None:
        # Between two stages the batched form matches sends and receives of one pair in the wrong order, and trains on
        # swapped activations and gradients (seen: gradient norm 1196, not 2.79). megatron's own trainer refuses it.
        needed |= _agreed(cfg, {"overlap_p2p_comm": True, "batch_p2p_comm": False}, "virtual pipeline stages need")
    if not have_transformer_engine():
        from nemo_offload_rl.mcore.model.local_spec import local_block_spec

        if torch.cuda.is_available():
            _check_features_without_transformer_engine(cfg)
        if provider.multi_latent_attention:
            raise ValueError(
                f"The model has multi-latent attention ({type(provider).__name__}), which needs Transformer Engine; "
                "run it on a GPU with the extra te, or choose a model of another family."
            )
        needed |= _agreed(cfg, _WITHOUT_TRANSFORMER_ENGINE, "layers without Transformer Engine need")
        _check_local_layers(provider)
        needed["transformer_layer_spec"] = local_block_spec
    if not torch.cuda.is_available():
        needed |= {"use_cpu_initialization": True, "cross_entropy_loss_fusion": False}
    # RL computes log-probs of what was sampled: dropout is off unless the recipe asks for it.
    return {"attention_dropout": 0.0, "hidden_dropout": 0.0} | recipe | derived | needed


def _check_local_layers(provider: Any) -> None:
    """Refuse a model whose bridge has layers of its own, which the local layers would silently replace."""
    from megatron.bridge.models.ernie.ernie_45_bridge import _ernie45_decoder_block_spec
    from megatron.bridge.models.gpt_provider import default_layer_spec
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    spec = provider.transformer_layer_spec if hasattr(provider, "transformer_layer_spec") else None  # Mamba's have none
    usual = (
        default_layer_spec,
        get_gpt_decoder_block_spec,
        _ernie45_decoder_block_spec,
        architectures.transformer_engine_block_spec,
    )
    if (spec.func if isinstance(spec, functools.partial) else spec) not in usual or provider.softmax_type != "vanilla":
        raise ValueError(
            f"The model has custom layers ({type(provider).__name__}), which need Transformer Engine; run it on a "
            "GPU with the extra te, or choose a model of another family."
        )


def _agreed(cfg: MegatronConfig, needed: Mapping[str, Any], why: str) -> Mapping[str, Any]:
    """Returns `needed`, after checking that the recipe does not contradict it.

    Raises:
        ValueError: it does.
    """
    for key, value in needed.items():
        found = cfg.get(key)
        if found not in (None, value):
            raise ValueError(
                f"policy.megatron_cfg.{key} is {found}, but {why} {key} {value}; set it to that or leave it out."
            )
    return needed


def _check_features_without_transformer_engine(cfg: Mapping[str, Any]) -> None:
    for key, off in _OFF_WITHOUT_TRANSFORMER_ENGINE.items():
        found = cfg[key]
        if found != off:
            raise ValueError(
                f"policy.megatron_cfg.{key} is {str(found).lower()}, which needs Transformer Engine, but that is "
                f"not installed on this GPU machine; install it (extra te), or set {key} to {str(off).lower()}."
            )


def _provider_of(bridge: Any, *, load_weights: bool) -> Any:
    """Returns Megatron-Bridge's provider for its model, which reads fields of the config without looking for them."""
    try:
        return bridge.to_megatron_provider(load_weights=load_weights)
    except (ArithmeticError, AttributeError, LookupError, NotImplementedError, TypeError) as error:
        raise ValueError(
            f"Megatron-Bridge cannot translate the model's Hugging Face config (model_type "
            f"{hf_config_of(bridge).model_type}): {type(error).__name__}: {error}; choose a model of "
            "another family, such as qwen3 or llama."
        ) from error


def make_provider(policy: PolicyConfig, bridge: Any) -> Any:
    """Returns a finalized model provider for the policy.

    Raises:
        ValueError: Megatron-Bridge cannot translate the model's config, the model or its layers do not allow what the
            recipe asks for, a feature needs Transformer Engine, or megatron-core's own checks refuse the combination.
    """
    config = hf_config_of(bridge)
    check_model(config.to_dict(), policy)
    provider = _provider_of(bridge, load_weights=has_pretrained_weights(policy))
    overrides = model_overrides(policy, provider)
    is_corrected = architectures.is_corrected(config)
    check_layers(policy, provider, overrides, is_corrected=is_corrected)
    recomputes_from_host = LAYER_INPUT in (overrides.get("offload_modules") or ())
    if recomputes_from_host:  # megatron-core does not know the module, and refuses an empty list
        overrides["offload_modules"] = ["core_attn"]
    provider.apply_overrides_and_finalize(overrides=overrides)
    if recomputes_from_host:
        provider.offload_modules = []  # layers that run twice offload nothing themselves
    if is_corrected:
        architectures.add_biases(config, provider)
    return provider


def make_optimizer_config(policy: PolicyConfig) -> OptimizerConfig:
    """Returns megatron-core's OptimizerConfig for the recipe.

    Raises:
        ValueError: if `optimizer.bf16` or `.fp16` contradicts `policy.precision`.
    """
    section = dict(policy["megatron_cfg"]["optimizer"])
    bf16 = policy["precision"] == "bfloat16"
    if section["bf16"] != bf16 or section["fp16"]:
        raise ValueError(
            f"policy.megatron_cfg.optimizer has bf16 {section['bf16']} and fp16 {section['fp16']}, but "
            f"policy.precision is {policy['precision']}; set bf16 to {str(bf16).lower()} and fp16 to false."
        )
    fields = {key: _dtype_or_same(value) if key.endswith("_dtype") else value for key, value in section.items()}
    return OptimizerConfig(**fields)


def make_ddp_config(policy: PolicyConfig) -> DistributedDataParallelConfig:
    """Returns megatron-core's DistributedDataParallelConfig for the recipe."""
    section = policy["megatron_cfg"]["distributed_data_parallel_config"]
    distributed = policy["megatron_cfg"]["optimizer"]["use_distributed_optimizer"]
    return DistributedDataParallelConfig(**(dict(section) | {"use_distributed_optimizer": distributed}))


def build_configs(policy: PolicyConfig) -> list[str]:
    """Build every Megatron config of a recipe, to run Megatron's own checks of them (`validate --deep`).

    Returns:
        One line for each thing that this machine cannot check.

    Raises:
        ValueError: one of the configs refuses the recipe.
    """
    from nemo_offload_rl.mcore.patches import cpu_device

    cpu_device.install()
    notes = []
    if has_pretrained_weights(policy) and not Path(policy["model_name"]).is_dir():
        notes.append(f"policy.model_name {policy['model_name']!r} is not a folder: its architecture was not checked")
    else:
        make_provider(policy, make_bridge(policy, hf_config(policy)))
    make_optimizer_config(policy)
    make_ddp_config(policy)
    if not torch.cuda.is_available():
        notes.append("CUDA is not available: fusions and options that need a GPU were not checked")
    if not have_transformer_engine():
        notes.append("Transformer Engine is not installed: options that need it were not checked")
    return notes
