"""Runs the conformance suite for vLLM's engines of two GPUs: tensor parallelism, and replicas that share experts."""

import pytest
from support import engine_conformance
from support.engine_conformance import QWEN3, QWEN3_MOE

from nemo_offload_rl.generation import make_generation
from tests.unit.generation.test_conformance import TOLERANCES, with_vllm


@pytest.mark.parametrize(
    ("tensor", "expert", "hf_config"),
    [
        with_vllm(2, 1, QWEN3, gpus=2, id="tensor parallelism"),
        with_vllm(2, 2, QWEN3_MOE, gpus=2, id="experts of a tensor-parallel engine"),
        with_vllm(1, 2, QWEN3_MOE, gpus=2, id="experts of two replicas"),
    ],
)
def test_an_engine_of_two_gpus_keeps_the_promises_of_the_interface(tensor, expert, hf_config, ray_cluster, tmp_path):
    reference, weights = engine_conformance.tiny_model(hf_config)
    engine_conformance.save_numbers_tokenizer(tmp_path)
    policy = engine_conformance.policy("vllm", tmp_path) | {"hf_config": hf_config}
    policy["generation"]["vllm_cfg"] |= {"tensor_parallel_size": tensor, "expert_parallel_size": expert}
    engine = make_generation(policy, ray_cluster)
    try:
        assert len(engine.receivers) == 2
        # NCCL's communicators take more than a GiB: 2.43 in all, for replicas that share experts.
        engine_conformance.check(
            *(engine, weights, reference),
            filtered=True,
            tolerance=TOLERANCES["vllm"],
            verify=False,
            most_context_gib=3.0,
        )
    finally:
        engine.shutdown()
