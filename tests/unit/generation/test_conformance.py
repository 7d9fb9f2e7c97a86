"""Runs one suite for every engine; for vLLM only with GPUs and the extra installed."""

import importlib.util

import pytest
import torch
from support import engine_conformance, replayed_refits
from support.engine_conformance import QWEN3, QWEN3_MOE

from nemo_offload_rl.config.schema.policy import FILTERED_LOGPROBS
from nemo_offload_rl.generation import make_generation

# Of log-probs. vLLM's attention of float32 models is a Triton kernel that multiplies in TF32: 10 bits; so are experts.
TOLERANCES = {"transformers": 1e-3, "vllm": 1e-2}
HAS_VLLM = torch.cuda.is_available() and importlib.util.find_spec("vllm") is not None


def with_vllm(*values, gpus=None, **options):
    """Returns a parameter for vLLM, on machines with this number of GPUs."""
    missing = not HAS_VLLM or gpus not in (None, torch.cuda.device_count())
    skip = pytest.mark.skipif(missing, reason=f"needs the extra vllm and {gpus or 'any number of'} GPUs")
    return pytest.param(*values, marks=[pytest.mark.gpu, pytest.mark.slow, skip], **options)


@pytest.mark.parametrize("backend", ["transformers", with_vllm("vllm")])
def test_an_engine_keeps_the_promises_of_the_interface(backend, ray_cluster, tmp_path):
    reference, weights = engine_conformance.tiny_model(QWEN3)
    engine_conformance.save_numbers_tokenizer(tmp_path)
    engine = make_generation(engine_conformance.policy(backend, tmp_path), ray_cluster)
    try:
        engine_conformance.check(
            engine, weights, reference, filtered=backend in FILTERED_LOGPROBS, tolerance=TOLERANCES[backend]
        )
        if backend == "vllm" and torch.cuda.device_count() == 1:  # the engine uses the GPU of this process
            engine.finish_generation()
            replayed_refits.check(engine, weights, bucket_bytes=1 << 30)
    finally:
        engine.shutdown()


@pytest.mark.parametrize("hf_config", [with_vllm(QWEN3_MOE, gpus=1, id="experts")])
def test_replayed_refits_bring_the_weights_and_the_answers_of_experts(hf_config, ray_cluster, tmp_path):
    engine_conformance.save_numbers_tokenizer(tmp_path)
    engine = make_generation(engine_conformance.policy("vllm", tmp_path) | {"hf_config": hf_config}, ray_cluster)
    try:
        replayed_refits.check(engine, engine_conformance.tiny_model(hf_config)[1], bucket_bytes=30_000)
    finally:
        engine.shutdown()
