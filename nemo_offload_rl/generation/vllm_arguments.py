"""Makes vLLM's arguments, environment, and sampling settings of a request's rows; does not import vLLM."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_offload_rl.config.megatron import engine_devices, engine_replicas
from nemo_offload_rl.config.schema.policy import GRPOPolicyConfig
from nemo_offload_rl.generation.interface import GenerationRequest
from nemo_offload_rl.generation.sampling import row_seed
from nemo_offload_rl.generation.stop_strings import needs_tokenizer
from nemo_offload_rl.hf_config import trusts_remote_code

WORKER_EXTENSION = "nemo_offload_rl.generation.vllm_worker.RefitExtension"

# Variables that vLLM reads on import. Its FlashInfer sampler would need a package that the extra does not install.
ENVIRONMENT: Mapping[str, str] = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # engine, scheduler and model run in the actor's own process
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",  # torch's symmetric memory refuses processes that each see only their own GPU
    "VLLM_HOST_IP": "127.0.0.1",  # other nodes need not reach its ports; an engine on several nodes replaces it
    "VLLM_NO_USAGE_STATS": "1",
}


# vLLM refuses to start if less than `gpu_memory_utilization` of the GPU is free, and the policy may already have taken
# that. An engine built at the same time has a KV cache size in bytes, with which vLLM uses the share for nothing else.
_SHARE_BESIDE_POLICY = 0.001


def is_built_beside_policy(policy: GRPOPolicyConfig) -> bool:
    """Returns whether the engine is built at the same time as the policy, for which the driver found room on the GPU.

    Args:
        policy: The recipe's `policy` with `backend: vllm`, resolved for the machine: `plan.colocation` decides `auto`.
    """
    decided = policy["generation"]["vllm_cfg"]["build_beside_policy"]
    assert decided != "auto", "plan.resolve replaces auto by true or false"
    return decided


def engine_environment(policy: GRPOPolicyConfig, *, num_threads: int) -> dict[str, str]:
    """Returns the environment variables of an engine's process.

    Args:
        policy: The recipe's `policy`, validated, with `backend: vllm`.
        num_threads: Number of CPU threads that it may use.
    """
    section = policy["generation"]["vllm_cfg"]
    return {"OMP_NUM_THREADS": str(num_threads), **(section["env_vars"] or {}), **ENVIRONMENT}


def engine_arguments(policy: GRPOPolicyConfig, folder: Path, *, sleeps: bool = True) -> dict[str, Any]:
    """Returns the arguments of `vllm.LLM` for one engine.

    Args:
        policy: The recipe's `policy`, validated, with `backend: vllm`.
        folder: Folder with the model's config.json, and with stop strings or bad words the tokenizer.
        sleeps: Whether the engine frees its GPUs for the policy between generations.
    """
    generation = policy["generation"]
    section = generation["vllm_cfg"]
    replicas, has_one_gpu = engine_replicas(section), engine_devices(section) == 1
    arguments: dict[str, Any] = {
        "model": str(folder),
        "trust_remote_code": trusts_remote_code(policy),
        "skip_tokenizer_init": not needs_tokenizer(policy),
        "load_format": "dummy",
        "dtype": section["precision"],
        "tensor_parallel_size": section["tensor_parallel_size"],
        "enable_expert_parallel": section["expert_parallel_size"] > 1,
        "gpu_memory_utilization": (
            _SHARE_BESIDE_POLICY if is_built_beside_policy(policy) else section["gpu_memory_utilization"]
        ),
        "max_model_len": section["max_model_len"],
        "enforce_eager": section["enforce_eager"],
        "logprobs_mode": "processed_logprobs",
        "enable_sleep_mode": sleeps,
        "generation_config": "vllm",  # each request has all sampling settings
        "seed": 0,  # unused: each row has its own seed
        "worker_extension_cls": WORKER_EXTENSION,
        # As under torchrun, each GPU's process runs an engine of its own with all requests: it is placed with the
        # policy rank of that GPU, and gets its weights from that rank.
        "distributed_executor_backend": "uni" if has_one_gpu else "external_launcher",
        # A process sees only its own GPU, with which vLLM's custom all-reduce cannot work; NCCL can.
        "disable_custom_all_reduce": not has_one_gpu,
    }
    if replicas > 1:
        # vLLM's V2 model runner runs no pass where scheduling ahead leaves nothing to run, and then other replicas
        # would wait forever.
        arguments |= {"data_parallel_size": replicas, "async_scheduling": False}
    if section["enable_prefix_caching"] is not None:
        arguments["enable_prefix_caching"] = section["enable_prefix_caching"]
    return arguments | generation["vllm_kwargs"]


def sampling_arguments(request: GenerationRequest, row: int, max_sequence_length: int) -> dict[str, Any]:
    """Returns the arguments of `vllm.SamplingParams` for one row of a request.

    Args:
        request: The whole request.
        row: Index of a row whose prompt is shorter than `max_sequence_length`.
        max_sequence_length: Largest number of tokens of a prompt and its continuation together.
    """
    prompt, sampling = request.prompt_ids[row], request.sampling
    greedy = sampling.temperature == 0
    return {
        "max_tokens": min(sampling.max_new_tokens, max_sequence_length - len(prompt)),
        "temperature": sampling.temperature,
        "top_p": 1.0 if greedy else sampling.top_p,
        "top_k": 0 if greedy or sampling.top_k is None else sampling.top_k,
        "seed": None if greedy else row_seed(sampling.seed, request.step, prompt, request.sample_ids[row]),
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": True,  # the stop tokens include the model's own ends, as far as the recipe wants them
        "bad_words": list(sampling.bad_words),
        "logprobs": 0,  # only for the sampled token
        **_stop_arguments(sampling.stop_strings),
    }


def _stop_arguments(stop_strings: Sequence[str]) -> dict[str, Any]:
    if not stop_strings:
        return {"detokenize": False}
    return {
        "stop": list(stop_strings),
        "include_stop_str_in_output": True,
        "detokenize": True,
        "skip_special_tokens": False,  # a stop string may contain some
    }
