"""vLLM's weights from CUDA graphs on both sides: read back, they are those that were sent, and so are the answers."""

import importlib.util

import pytest
import torch
from support import engine_conformance

from nemo_offload_rl.generation import make_generation
from nemo_offload_rl.generation.hf_model import build_model, weights_by_name
from nemo_offload_rl.refit.checksum import require_equal_checksums
from nemo_offload_rl.refit.cuda_ipc import CudaIpcTransport
from nemo_offload_rl.refit.plan import ExportPlan
from nemo_offload_rl.refit.recorder import addresses_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.whole_gpu,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs the extra vllm"),
    pytest.mark.skipif(torch.cuda.device_count() != 1, reason="the engine must be on the GPU of this process"),
]

MOE = engine_conformance.QWEN3 | {
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}


class Weights:
    """A policy's weights on the GPU, each sent as a copy that the export makes."""

    def __init__(self, named):
        self.named = {name: tensor.cuda() for name, tensor in named.items()}

    def __iter__(self):
        return ((name, tensor * 1) for name, tensor in self.named.items())

    def addresses(self):
        return addresses_of(list(self.named.values()))

    def why_not_recorded(self):
        return ""


def named_weights(hf_config):
    generator = torch.Generator().manual_seed(0)
    named = {}
    for name, tensor in weights_by_name(build_model("tiny", hf_config, "float32")).items():
        noise = torch.randn(tensor.shape, generator=generator)
        named[name] = 1 + 0.1 * noise if tensor.dim() == 1 else 0.2 * noise
    return {name: tensor for name, tensor in named.items() if name != "lm_head.weight"}


@pytest.mark.parametrize(
    ("hf_config", "bucket_bytes"), [(engine_conformance.QWEN3, 1 << 30), (MOE, 30_000)], ids=["dense", "experts"]
)
def test_replayed_refits_bring_the_weights_and_the_answers(ray_cluster, tmp_path, hf_config, bucket_bytes):
    engine_conformance.save_numbers_tokenizer(tmp_path)
    policy = engine_conformance.policy("vllm", tmp_path) | {"hf_config": hf_config}
    engine = make_generation(policy, ray_cluster)
    try:
        weights = Weights(named_weights(hf_config))
        plan = ExportPlan.of(weights)
        engine.prepare_refit_info(plan)
        transport = CudaIpcTransport(engine.receivers, verify=True, graphs=True, min_gain_s=-100.0)
        sender = transport.connect(plan, rank=0, bucket_bytes=bucket_bytes)
        answers = []
        for step in range(4):
            engine.prepare_for_generation(["weights"])
            require_equal_checksums(sender.send(weights), engine.weights_checksum())
            assert sender.metrics["graphs"] == 1
            assert engine.memory_stats()["refit_graphs"] == len(sender._layouts)
            engine.prepare_for_generation(["kv_cache"])
            answers.append(engine.generate(engine_conformance.request(engine_conformance.GREEDY)).output_ids)
            engine.finish_generation()
            for tensor in weights.named.values():
                tensor.copy_(tensor.flip(0))
            if step == 2:
                weights.named = {name: tensor.clone() for name, tensor in weights.named.items()}
        assert answers[0] == answers[2]
        assert answers[1] == answers[3]
        assert answers[0] != answers[1]
        sender.close()
    finally:
        engine.shutdown()
