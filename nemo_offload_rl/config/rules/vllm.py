"""Rules for vLLM: the engine supports the settings, and its engines fit the policy."""

from typing import Any

from nemo_offload_rl.config.installed.vllm_arguments import why_refused
from nemo_offload_rl.config.key_table.row import same
from nemo_offload_rl.config.megatron.device_split import DeviceSplit, checked_split, engine_devices, engine_replicas
from nemo_offload_rl.config.model.model_kind import NUM_EXPERTS_KEYS, count_of, model_fields, model_kind
from nemo_offload_rl.config.problems import show
from nemo_offload_rl.config.rules.base import COLOCATED, GPUS, LENGTH, MODEL, MODEL_FIELDS, NODES, Verdict, rule

GENERATION = "policy.generation"
VLLM = f"{GENERATION}.vllm_cfg"
BACKEND, VLLM_TP, VLLM_EP = f"{GENERATION}.backend", f"{VLLM}.tensor_parallel_size", f"{VLLM}.expert_parallel_size"
# vLLM silently raises lower temperatures to this value.
LEAST_TEMPERATURE = 0.01

# Key of vllm_cfg: the only value that it may have, and why.
ONLY_VALUES: dict[str, tuple[Any, str]] = {
    "pipeline_parallel_size": (1, "pipeline parallelism in vLLM is not supported here; use tensor_parallel_size"),
    "load_format": ("dummy", "the first refit loads the policy's weights, which would replace weights read from disk"),
    "kv_cache_dtype": ("auto", "a quantised KV cache is not supported here"),
    "skip_tokenizer_init": (True, "prompts and answers are token ids here"),
    "logprobs_mode": (
        "processed_logprobs",
        "training compares the policy's log-probs with those of the distribution that vLLM samples from",
    ),
    "num_first_layers_in_bf16": (0, "fp8 is not supported here"),
    "num_last_layers_in_bf16": (0, "fp8 is not supported here"),
    "use_deep_gemm": (False, "fp8 is not supported here"),
    "http_refit_server_port": (None, "refits over HTTP are not supported here"),
    "zmq_refit_server_port": (None, "refits over ZeroMQ are not supported here"),
    "reset_encoder_cache_after_weight_update": (False, "multimodal models are not supported here"),
}

# Argument of vLLM's LLM: the key of the recipe that sets it.
KEY_OF_ARGUMENT: dict[str, str] = {
    "model": "policy.model_name",
    "hf_overrides": "policy.hf_config_overrides",
    "tokenizer": "policy.tokenizer.name",
    "trust_remote_code": "policy.trust_remote_code",
    "dtype": f"{VLLM}.precision",
    "seed": "grpo.seed",
    "enable_expert_parallel": f"{VLLM}.expert_parallel_size",
    **{
        name: f"{VLLM}.{name}"
        for name in (
            "tensor_parallel_size", "pipeline_parallel_size", "gpu_memory_utilization", "max_model_len",
            "enforce_eager", "enable_prefix_caching", "load_format", "kv_cache_dtype", "skip_tokenizer_init",
            "logprobs_mode",
        )
    },
}  # fmt: skip
# Arguments that the engine sets itself, or that would make its weights or log-probs differ from the policy's.
REFUSED_ARGUMENTS: dict[str, str] = {
    **dict.fromkeys(
        ("distributed_executor_backend", "worker_cls", "worker_extension_cls", "enable_sleep_mode", "generation_config",
         "disable_custom_all_reduce"),
        "this package sets it for vLLM",
    ),
    "override_generation_config": f"the keys of {GENERATION} set how answers are sampled",
    "data_parallel_size": (
        f"{VLLM}.expert_parallel_size above tensor_parallel_size sets it, and other GPUs have engines of their own"
    ),
    **dict.fromkeys(
        ("quantization", "quantization_config"),
        "refits load the policy's weights unquantised, and quantised weights would not be the ones that are trained",
    ),
    **dict.fromkeys(
        ("speculative_config", "spec_method", "spec_model", "spec_tokens"),
        "draft models are not refitted here",
    ),
    **dict.fromkeys(
        ("enable_eplb", "eplb_config"),
        "it moves experts between GPUs, and refits load them where they were at first",
    ),
    **dict.fromkeys(
        ("kv_transfer_config", "kv_offloading_size", "kv_offloading_backend"),
        "keys and values kept outside the GPU would outlive the weights from which they were computed",
    ),
    **dict.fromkeys(
        ("enable_lora", "cpu_offload_gb", "offload_group_size", "logits_processors"), "it is not supported here"
    ),
}  # fmt: skip
_KV_CACHE_BYTES = "kv_cache_memory_bytes"
_LIMITS = ("max_num_seqs", "max_num_batched_tokens", "block_size")
# Arguments that have a rule of their own here.
_NEVER = frozenset({*KEY_OF_ARGUMENT, *REFUSED_ARGUMENTS})
_WITH_A_RULE = _NEVER | {*_LIMITS, _KV_CACHE_BYTES}

# Environment variables that the engine's processes need; their values are in generation.vllm_arguments.
OWN_VARIABLES = (
    "VLLM_ALLREDUCE_USE_SYMM_MEM",
    "VLLM_ENABLE_V1_MULTIPROCESSING",
    "VLLM_HOST_IP",
    "VLLM_NO_USAGE_STATS",
    "VLLM_USE_FLASHINFER_SAMPLER",
)


@rule(f"{VLLM}.env_vars")
def vllms_own_variables_stay(variables: dict[str, str] | None) -> Verdict:
    """Refuses to override environment variables that the engine sets itself."""
    own = next((name for name in variables or {} if name in OWN_VARIABLES), None)
    if own is None:
        return None
    return f"{VLLM}.env_vars.{own}", "cannot be set: this package sets it for vLLM; delete it"


@rule(BACKEND, f"{VLLM}?")
def vllm_has_its_section(backend: str, section: dict[str, Any] | None) -> Verdict:
    """Requires vllm_cfg, since the engines' sizes have no defaults."""
    if backend != "vllm" or section is not None:
        return None
    return f"is vllm, which needs the section {VLLM}; copy it from examples/configs/common/grpo.yaml"


@rule(VLLM)
def vllm_is_asked_for_what_it_does_here(section: dict[str, Any]) -> Verdict:
    """Refuses values of NeMo-RL's keys that turn on features which the engine lacks here."""
    for name, (only, why) in ONLY_VALUES.items():
        if name in section and not same(section[name], only):
            return f"{VLLM}.{name}", f"must be {show(only)}, since {why}; found {show(section[name])}"
    return None


@rule(f"{VLLM}.precision", "policy.precision")
def vllm_computes_in_the_policys_type(precision: str, policy: str) -> Verdict:
    """Requires the policy's dtype, since a refit copies the bits of the weights."""
    if precision == policy:
        return None
    return f"is {precision}, but refits send weights in policy.precision ({policy}); set it to {policy}"


@rule(f"{VLLM}.max_model_len", LENGTH)
def vllm_takes_whole_sequences(longest: int, total: int) -> Verdict:
    """Refuses a max_model_len that would cut answers off before the recipe's limit."""
    if longest >= total:
        return None
    return f"is {longest}, below {LENGTH} ({total}), which limits a prompt plus its answer; set it to {total} or more"


@rule(VLLM_TP, VLLM_EP, GPUS, NODES, COLOCATED)
def vllm_engines_share_out_the_nodes(tp: int, ep: int, gpus: int, nodes: int, apart: dict[str, Any] | None) -> Verdict:
    """Requires a whole number of engines on each node, or a whole number of nodes for each engine."""
    split = checked_split(gpus, nodes, apart)
    size = engine_devices({"tensor_parallel_size": tp, "expert_parallel_size": ep})
    if not isinstance(split, DeviceSplit) or _fit(size, split.engine_devices_per_node, split.all_engine_devices):
        return None
    of_node, total = split.engine_devices_per_node, split.all_engine_devices
    key = GPUS if of_node == gpus else f"{GENERATION}.colocated.resources.gpus_per_node"
    path, found = (VLLM_TP, tp) if size == tp else (VLLM_EP, ep)
    return path, (
        f"is {found}, so an engine has {size} GPUs, which neither divides {key} ({of_node}) nor is a multiple of it "
        f"that divides generation's {total} GPUs; change one of the two"
    )


def _fit(size: int, of_node: int, total: int) -> bool:
    return of_node % size == 0 or (size % of_node == 0 and total % size == 0)


@rule(VLLM_TP, *MODEL_FIELDS)
def vllm_splits_whole_heads(tp: int, *model: Any) -> Verdict:
    """Requires whole attention heads on each GPU; key and value heads fewer than GPUs are replicated."""
    fields = model_fields(*model)
    heads = count_of(fields, ("num_attention_heads", "n_head"))
    if heads is not None and heads % tp:
        return f"is {tp}, which does not divide the model's {heads} attention heads; choose a divisor"
    groups = count_of(fields, ("num_key_value_heads",))
    if groups is not None and max(groups, tp) % min(groups, tp):
        return (
            f"is {tp}, but the model has {groups} key-value heads, and one of the two must divide the other; choose "
            "another size"
        )
    return None


@rule(VLLM_EP, VLLM_TP, *MODEL)
def vllm_divides_experts_among_its_gpus(ep: int, tp: int, *model: Any) -> Verdict:
    """Requires 1, the tensor-parallel size, or, for a model of experts, a multiple of it."""
    if ep in (1, tp):
        return None
    if ep % tp:
        return (
            f"must be 1, {VLLM_TP} ({tp}) or a multiple of it, since vLLM distributes experts over all GPUs of an "
            f"engine, whose replicas have {tp} each; found {ep}"
        )
    name, hf_config, overrides, _ = model
    kind, experts = model_kind(*model), count_of(model_fields(name, hf_config, overrides), NUM_EXPERTS_KEYS)
    if kind.has_experts is False:
        return f"is {ep}, but {kind.name} is a dense model, which has no experts to distribute; set it to 1"
    if experts is not None and ep > experts:
        return f"is {ep}, but the model has {experts} experts, at least one for each GPU; lower it"
    return None


@rule(f"{GENERATION}.vllm_kwargs", f"{VLLM}?")
def vllms_replicas_wait_for_each_other(arguments: dict[str, Any], section: dict[str, Any] | None) -> Verdict:
    """Refuses asynchronous scheduling of replicas that share experts, with which one may miss a pass of the others."""
    if section is None or engine_replicas(section) == 1 or not arguments.get("async_scheduling"):
        return None
    return f"{GENERATION}.vllm_kwargs.async_scheduling", (
        f"is true, but {VLLM_EP} ({section['expert_parallel_size']}) is above {VLLM_TP} "
        f"({section['tensor_parallel_size']}), and replicas that share experts run every pass together; delete it"
    )


@rule("policy.verify_refit?", BACKEND, f"{VLLM_TP}?", f"{VLLM_EP}?")
def vllm_checksums_are_of_whole_weights(verify: bool | None, backend: str, tp: int | None, ep: int | None) -> Verdict:
    """Refuses checksums of engines with several GPUs, where each GPU holds parts of the weights that were sent."""
    if not verify or backend != "vllm" or (tp in (None, 1) and ep in (None, 1)):
        return None
    return (
        f"is true, which needs {VLLM_TP} 1 and {VLLM_EP} 1 with vllm, since engines of several GPUs shard the weights "
        "that a refit sends; set it to false"
    )


@rule(f"{GENERATION}.temperature", f"{GENERATION}.val_temperature", BACKEND)
def vllm_has_a_least_temperature(temperature: float, validation: float, backend: str) -> Verdict:
    """Refuses temperatures that vLLM would raise, since log-probs are computed for the recipe's temperature."""
    if backend != "vllm":
        return None
    for name, value in (("temperature", temperature), ("val_temperature", validation)):
        if 0 < value < LEAST_TEMPERATURE:
            return (
                f"{GENERATION}.{name}",
                f"is {value}, but vLLM raises temperatures below {LEAST_TEMPERATURE} to {LEAST_TEMPERATURE}; set it to "
                f"{LEAST_TEMPERATURE} or more",
            )
    return None


@rule(f"{GENERATION}.vllm_kwargs", VLLM)
def vllm_arguments_are_not_the_recipes(arguments: dict[str, Any], section: dict[str, Any]) -> Verdict:
    """Refuses arguments that the recipe sets by a key, or that the engine sets itself."""
    for name in arguments:
        path = f"{GENERATION}.vllm_kwargs.{name}"
        if name in KEY_OF_ARGUMENT:
            return path, f"is set by {KEY_OF_ARGUMENT[name]}; set that key instead, and delete this one"
        if name in REFUSED_ARGUMENTS:
            return path, f"cannot be set: {REFUSED_ARGUMENTS[name]}; delete it"
    return None


@rule(f"{GENERATION}.vllm_kwargs")
def vllm_knows_its_arguments(arguments: dict[str, Any]) -> Verdict:
    """Refuses names and types that vLLM would refuse only when its engine is built; needs vLLM's source here."""
    for name, value in arguments.items():
        if name not in _WITH_A_RULE and (why := why_refused(name, value, _NEVER)):
            return f"{GENERATION}.vllm_kwargs.{name}", why
    return None


@rule(f"{GENERATION}.vllm_kwargs")
def vllms_limits_are_numbers(arguments: dict[str, Any]) -> Verdict:
    """Requires positive integers, which the plan computes with and vLLM would check only after it is built."""
    for name in _LIMITS:
        limit = arguments.get(name)
        if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
            return f"{GENERATION}.vllm_kwargs.{name}", f"is {show(limit)}, but must be an integer of 1 or more, or null"
    return None


@rule(f"{GENERATION}.vllm_kwargs")
def vllms_kv_cache_has_a_size(arguments: dict[str, Any]) -> Verdict:
    """Requires a number of bytes, which vLLM uses for each GPU whatever gpu_memory_utilization says."""
    if _KV_CACHE_BYTES not in arguments:
        return None
    nbytes = arguments[_KV_CACHE_BYTES]
    if isinstance(nbytes, int) and not isinstance(nbytes, bool) and nbytes > 0:
        return None
    path = f"{GENERATION}.vllm_kwargs.{_KV_CACHE_BYTES}"
    return path, (
        f"is {show(nbytes)}, but must be a number of bytes per GPU, an integer of 1 or more; delete it to size the KV "
        "cache by gpu_memory_utilization"
    )
