"""Refits a vLLM engine from CUDA graphs on both sides, from this process, which shares the engine's GPU."""

from support import engine_conformance

from nemo_offload_rl.refit.checksum import require_equal_checksums
from nemo_offload_rl.refit.cuda_ipc import CudaIpcTransport
from nemo_offload_rl.refit.plan import ExportPlan
from nemo_offload_rl.refit.recorder import addresses_of


class Weights:
    """Holds a policy's weights on the GPU; the export sends a copy of each."""

    def __init__(self, named):
        self.named = {name: tensor.cuda() for name, tensor in named.items()}

    def __iter__(self):
        return ((name, tensor * 1) for name, tensor in self.named.items())

    def addresses(self):
        return addresses_of(list(self.named.values()))

    def why_not_recorded(self):
        return ""

    def collectives(self):
        return ""

    def agree(self, yes):
        return yes


def check(engine, named, *, bucket_bytes):
    """Checks weights and answers after four refits with sleep between them, the last from other addresses."""
    weights = Weights(named)
    plan = ExportPlan.of(weights)
    engine.prepare_refit_info(plan)
    transport = CudaIpcTransport(engine.receivers, verify=True, min_gain_s=-100.0)
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
