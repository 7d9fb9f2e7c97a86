"""Refits vLLM's experts from CUDA graphs on both sides; test_conformance.py does so with a dense model."""

import importlib.util

import pytest
import torch
from support import engine_conformance, replayed_refits

from nemo_offload_rl.generation import make_generation
from nemo_offload_rl.generation.hf_model import build_model, weights_by_name

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs the extra vllm"),
    pytest.mark.skipif(torch.cuda.device_count() != 1, reason="the engine must be on the GPU of this process"),
]

MOE = engine_conformance.QWEN3_MOE


def named_weights(hf_config):
    generator = torch.Generator().manual_seed(0)
    named = {}
    for name, tensor in weights_by_name(build_model("tiny", hf_config, "float32")).items():
        noise = torch.randn(tensor.shape, generator=generator)
        named[name] = 1 + 0.1 * noise if tensor.dim() == 1 else 0.2 * noise
    return {name: tensor for name, tensor in named.items() if name != "lm_head.weight"}


def test_replayed_refits_bring_the_weights_and_the_answers_of_experts(ray_cluster, tmp_path):
    engine_conformance.save_numbers_tokenizer(tmp_path)
    engine = make_generation(engine_conformance.policy("vllm", tmp_path) | {"hf_config": MOE}, ray_cluster)
    try:
        replayed_refits.check(engine, named_weights(MOE), bucket_bytes=30_000)
    finally:
        engine.shutdown()
