"""Runs one suite for every engine; for vLLM only with a GPU and the extra installed."""

import importlib.util

import pytest
import torch
from support import engine_conformance, replayed_refits

from nemo_offload_rl.config.schema.policy import FILTERED_LOGPROBS
from nemo_offload_rl.generation import make_generation
from nemo_offload_rl.generation.hf_model import build_model, weights_by_name

# Of log-probs. vLLM's attention of float32 models is a Triton kernel that multiplies in TF32: 10 bits.
TOLERANCES = {"transformers": 1e-3, "vllm": 1e-2}
HAS_VLLM = torch.cuda.is_available() and importlib.util.find_spec("vllm") is not None


@pytest.mark.parametrize(
    "backend",
    [
        "transformers",
        pytest.param(
            "vllm",
            marks=[
                pytest.mark.gpu,
                pytest.mark.slow,
                pytest.mark.skipif(not HAS_VLLM, reason="needs a CUDA GPU and the extra vllm"),
            ],
        ),
    ],
)
def test_an_engine_keeps_the_promises_of_the_interface(backend, ray_cluster, tmp_path):
    reference = build_model("tiny", engine_conformance.QWEN3, "float32")
    generator = torch.Generator().manual_seed(0)
    for parameter in reference.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(1 + 0.1 * noise if parameter.dim() == 1 else 0.2 * noise)
    weights = {name: tensor for name, tensor in weights_by_name(reference).items() if name != "lm_head.weight"}
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
