"""Runs the conformance suite for vLLM's engines of two GPUs: tensor parallelism, and replicas that share experts."""

import importlib.util

import pytest
import torch
from support import engine_conformance

from nemo_offload_rl.generation import make_generation
from nemo_offload_rl.generation.hf_model import build_model, weights_by_name

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs the extra vllm"),
    pytest.mark.skipif(torch.cuda.device_count() != 2, reason="needs two GPUs"),
]

# Of log-probs, as in test_conformance.py. Experts are multiplied in TF32, too.
TOLERANCE = 1e-2
MOST_CONTEXT_GIB = 3.0  # NCCL's communicators take more than a GiB: 2.43 in all, for replicas that share experts


@pytest.mark.parametrize(
    ("tensor", "expert", "hf_config"),
    [
        pytest.param(2, 1, engine_conformance.QWEN3, id="tensor parallelism"),
        pytest.param(2, 2, engine_conformance.QWEN3_MOE, id="experts of a tensor-parallel engine"),
        pytest.param(1, 2, engine_conformance.QWEN3_MOE, id="experts of two replicas"),
    ],
)
def test_an_engine_of_two_gpus_keeps_the_promises_of_the_interface(tensor, expert, hf_config, ray_cluster, tmp_path):
    reference = build_model("tiny", hf_config, "float32")
    generator = torch.Generator().manual_seed(0)
    for parameter in reference.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(1 + 0.1 * noise if parameter.dim() == 1 else 0.2 * noise)
    weights = {name: tensor for name, tensor in weights_by_name(reference).items() if name != "lm_head.weight"}
    engine_conformance.save_numbers_tokenizer(tmp_path)
    policy = engine_conformance.policy("vllm", tmp_path) | {"hf_config": hf_config}
    policy["generation"]["vllm_cfg"] |= {"tensor_parallel_size": tensor, "expert_parallel_size": expert}
    engine = make_generation(policy, ray_cluster)
    try:
        assert len(engine.receivers) == 2
        engine_conformance.check(
            engine,
            weights,
            reference,
            filtered=True,
            tolerance=TOLERANCE,
            verify=False,
            most_context_gib=MOST_CONTEXT_GIB,
        )
    finally:
        engine.shutdown()
