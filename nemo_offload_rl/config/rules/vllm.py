"""Rules for vLLM, and for generation on its own devices."""

from typing import Any

from nemo_offload_rl.config.installed.declared_fields import why_refused
from nemo_offload_rl.config.megatron import DeviceSplit, checked_split, engine_devices, engine_replicas
from nemo_offload_rl.config.model.families import NUM_EXPERTS_KEYS, count_of, has_experts, model_fields
from nemo_offload_rl.config.problems import show
from nemo_offload_rl.config.rules.base import COLOCATED, GPUS, MODEL, NODES, REFIT_TRANSPORT, RuleResult, rule

GENERATION = "policy.generation"
VLLM = f"{GENERATION}.vllm_cfg"
BACKEND, VLLM_TP, VLLM_EP = f"{GENERATION}.backend", f"{VLLM}.tensor_parallel_size", f"{VLLM}.expert_parallel_size"
# vLLM silently raises lower temperatures to this value.
LEAST_TEMPERATURE = 0.01

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
            "tensor_parallel_size", "gpu_memory_utilization", "max_model_len", "enforce_eager", "enable_prefix_caching",
        )
    },
}  # fmt: skip
# Arguments that the engine sets itself, or that would make its weights or log-probs differ from the policy's.
REFUSED_ARGUMENTS: dict[str, str] = {
    **dict.fromkeys(
        ("distributed_executor_backend", "worker_cls", "worker_extension_cls", "enable_sleep_mode", "generation_config",
         "disable_custom_all_reduce", "pipeline_parallel_size", "load_format", "kv_cache_dtype", "skip_tokenizer_init",
         "logprobs_mode"),
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
_COUNTS = ("max_num_seqs", "max_num_batched_tokens", "block_size", "kv_cache_memory_bytes")

# Environment variables that the engine's processes need; their values are in generation.vllm_arguments.
OWN_VARIABLES = (
    "VLLM_ALLREDUCE_USE_SYMM_MEM",
    "VLLM_ENABLE_V1_MULTIPROCESSING",
    "VLLM_HOST_IP",
    "VLLM_NO_USAGE_STATS",
    "VLLM_USE_FLASHINFER_SAMPLER",
)


@rule(f"{VLLM}.env_vars")
def vllm_env_vars(variables: dict[str, str] | None) -> RuleResult:
    """Refuses to override environment variables that the engine sets itself."""
    own = next((name for name in variables or {} if name in OWN_VARIABLES), None)
    return None if own is None else (f"{VLLM}.env_vars.{own}", "is set by this package for vLLM; delete it")


@rule(BACKEND, f"{VLLM}?")
def vllm_section(backend: str, section: dict[str, Any] | None) -> RuleResult:
    """Requires vllm_cfg, since the engines' sizes have no defaults."""
    if backend != "vllm" or section is not None:
        return None
    return f"is vllm, which needs the section {VLLM}; copy it from examples/configs/common/grpo.yaml"


@rule(f"{VLLM}.precision", "policy.precision")
def vllm_precision(precision: str, policy: str) -> RuleResult:
    """Requires the policy's dtype, since a refit copies the bits of the weights."""
    if precision == policy:
        return None
    return f"is {precision}, but refits send weights in policy.precision ({policy}); set it to {policy}"


@rule(VLLM_TP, VLLM_EP, GPUS, NODES, COLOCATED)
def vllm_engine_gpus(tp: int, ep: int, gpus: int, nodes: int, apart: dict[str, Any] | None) -> RuleResult:
    """Requires a whole number of engines on each node, or a whole number of nodes for each engine."""
    split = checked_split(gpus, nodes, apart)
    if not isinstance(split, DeviceSplit):
        return None
    size = engine_devices({"tensor_parallel_size": tp, "expert_parallel_size": ep})
    of_node, total = split.engine_devices_per_node, split.all_engine_devices
    if of_node % size == 0 or (size % of_node == 0 and total % size == 0):
        return None
    return VLLM_TP if size == tp else VLLM_EP, (
        f"gives engines of {size} GPUs, which neither divide the {of_node} GPUs of a node nor are a multiple of them "
        f"that divides generation's {total}; change either"
    )


@rule(VLLM_EP, VLLM_TP, *MODEL)
def vllm_expert_parallel_size(ep: int, tp: int, *model: Any) -> RuleResult:
    """Requires 1, the tensor-parallel size, or, for a model of experts, a multiple of it."""
    if ep in (1, tp):
        return None
    if ep % tp:
        return f"must be 1 or a multiple of {VLLM_TP} ({tp}); found {ep}"
    experts = count_of(model_fields(*model[:3]), NUM_EXPERTS_KEYS)
    if has_experts(*model) is False or (experts is not None and ep > experts):
        return f"is {ep}, more than the model's {experts or 0} experts; lower it, to 1 for a dense model"
    return None


@rule(f"{GENERATION}.vllm_kwargs", f"{VLLM}?")
def vllm_async_scheduling(arguments: dict[str, Any], section: dict[str, Any] | None) -> RuleResult:
    """Refuses asynchronous scheduling of replicas that share experts, with which one may miss a pass of the others."""
    if section is None or engine_replicas(section) == 1 or not arguments.get("async_scheduling"):
        return None
    return f"{GENERATION}.vllm_kwargs.async_scheduling", (
        f"is true, but {VLLM_EP} is above {VLLM_TP}, and replicas that share experts run every pass together; delete it"
    )


@rule("grpo.async_grpo.in_flight_weight_updates?", "grpo.async_grpo.enabled?", f"{VLLM}?")
def vllm_in_flight_replicas(in_flight: bool | None, ahead: bool | None, section: dict[str, Any] | None) -> RuleResult:
    """Refuses new weights during generation where replicas share experts, and would have to hold at one step."""
    if not in_flight or not ahead or section is None or engine_replicas(section) == 1:
        return None
    return f"is true, but {VLLM_EP} is above {VLLM_TP}, and replicas that share experts step together; set it to false"


@rule("policy.verify_refit?", BACKEND, f"{VLLM_TP}?", f"{VLLM_EP}?")
def vllm_verify_refit(verify: bool | None, backend: str, tp: int | None, ep: int | None) -> RuleResult:
    """Refuses checksums of engines with several GPUs, where each GPU holds parts of the weights that were sent."""
    if not verify or backend != "vllm" or (tp in (None, 1) and ep in (None, 1)):
        return None
    return f"is true, which needs {VLLM_TP} 1 and {VLLM_EP} 1, since engines of several GPUs shard weights; change one"


@rule(f"{GENERATION}.temperature", BACKEND)
@rule(f"{GENERATION}.val_temperature", BACKEND)
def vllm_temperature(temperature: float, backend: str) -> RuleResult:
    """Refuses temperatures that vLLM would raise, since log-probs are computed for the recipe's temperature."""
    if backend != "vllm" or not 0 < temperature < LEAST_TEMPERATURE:
        return None
    return f"is {temperature}, which vLLM raises to {LEAST_TEMPERATURE}; set it to {LEAST_TEMPERATURE} or more"


@rule(f"{GENERATION}.vllm_kwargs", VLLM)
def vllm_kwargs(arguments: dict[str, Any], section: dict[str, Any]) -> RuleResult:
    """Refuses arguments that a key or the engine sets, that vLLM lacks, or that the plan cannot compute with."""
    for name, value in arguments.items():
        path = f"{GENERATION}.vllm_kwargs.{name}"
        if name in KEY_OF_ARGUMENT:
            return path, f"is set by {KEY_OF_ARGUMENT[name]}; set that key instead, and delete this one"
        if name in REFUSED_ARGUMENTS:
            return path, f"cannot be set: {REFUSED_ARGUMENTS[name]}; delete it"
        is_count = isinstance(value, int) and not isinstance(value, bool) and value > 0
        if name in _COUNTS and value is not None and not is_count:
            return path, f"is {show(value)}, but must be an integer of 1 or more; delete it for vLLM's own"
        if name not in _COUNTS and (why := why_refused(name, value, {*KEY_OF_ARGUMENT, *REFUSED_ARGUMENTS})):
            return path, why
    return None


@rule(COLOCATED, GPUS, NODES)
def colocated_resources(colocated: dict[str, Any], gpus: int, nodes: int) -> RuleResult:
    """Refuses a split of the cluster that leaves the policy or generation without the devices that the recipe says."""
    split = checked_split(gpus, nodes, colocated)
    if isinstance(split, DeviceSplit):
        return None
    key, message = split
    return f"{COLOCATED.removesuffix('?')}.resources.{key}", message


@rule(REFIT_TRANSPORT)
def colocated_refit_transport(transport: str | None) -> RuleResult:
    """Refuses a transport on shared GPUs, as NeMo-RL does; an adaptation has already handled separate GPUs."""
    if transport is None:
        return None
    return f"is {transport}, but only non-colocated generation uses a transport; set it to null"
