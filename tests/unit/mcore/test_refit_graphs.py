"""Tests that a recorded and replayed export of a policy equals a new one; on a CPU, recorded ops replace graphs."""

import weakref

import pytest
import ray
from support.refit_sides import Counting, look, start_engine
from support.tiny import TINY_QWEN3, TINY_QWEN3_MOE, random_batch, tiny_policy

from nemo_offload_rl.algorithms.losses import NLLLoss
from nemo_offload_rl.plan.architecture import read_architecture
from nemo_offload_rl.plan.refit_graphs import export_temporaries
from nemo_offload_rl.refit import cuda_ipc, export
from nemo_offload_rl.refit.checksum import tensor_checksum
from nemo_offload_rl.refit.cuda_ipc import CudaIpcTransport
from nemo_offload_rl.refit.interface import Receiver


@pytest.mark.parametrize("hf_config", [TINY_QWEN3_MOE, TINY_QWEN3 | {"model_type": "qwen2"}])
def test_a_replayed_export_is_a_fresh_one_after_every_step(make_worker, ray_cluster, monkeypatch, hf_config):
    if ray_cluster.has_gpus:
        pytest.skip("is for machines without a GPU")
    monkeypatch.setattr(cuda_ipc, "CudaRecorder", lambda: Counting("cpu"))
    monkeypatch.setattr(export, "why_not_recorded", lambda tensors: "")
    engine = start_engine(ray_cluster)
    ray.get(engine.start.remote("cpu"))
    policy = tiny_policy(hf_config)
    policy["refit_buffer_size_gb"] = 0.0005  # several buckets
    worker = make_worker(policy)
    worker.prepare_refit_info(CudaIpcTransport([Receiver(engine, (0,))], verify=False, graphs=True, min_gain_s=-100.0))
    for step in range(3):
        worker.train(random_batch(4), NLLLoss(), gbs=4, mbs=2)
        if step == 2:
            parameter = next(iter(worker.state.model[0].parameters()))
            parameter.data = parameter.data + 1
        worker.send_weights()
        metrics = worker.residency_metrics()
        assert metrics["refit/graphs"] == 1
        assert metrics["refit/send_s"] > metrics["refit/export_s"] > 0
        found = look(engine)
        assert found["sums"] == {name: tensor_checksum(tensor) for name, tensor in worker.hf_weights()}
        assert step == 0 or found["num_copied"] == 0
        worker.offload_after_refit()
    worker.prepare_refit_info(CudaIpcTransport([], verify=False))  # frees the buckets
    assert look(engine)["num_senders"] == 0
    ray.kill(engine)


@pytest.mark.parametrize(
    "hf_config",
    [
        TINY_QWEN3,
        TINY_QWEN3_MOE,
        TINY_QWEN3 | {"model_type": "qwen2"},
        TINY_QWEN3 | {"model_type": "llama", "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ],
    ids=["qwen3", "experts", "qwen2", "tied llama with biases"],
)
def test_an_export_makes_the_temporaries_that_the_plan_counts_and_no_others(make_worker, monkeypatch, hf_config):
    from megatron.bridge.models.conversion import param_mapping

    worker = make_worker(tiny_policy(hf_config))
    made: list[weakref.ref] = []

    def recorded(split):
        def record(*arguments):
            parts = split(*arguments)
            made.extend(map(weakref.ref, parts))
            return parts

        return record

    for name in ("split_qkv_weights", "split_qkv_biases"):
        monkeypatch.setattr(param_mapping, name, recorded(getattr(param_mapping, name)))
    parameters = {each.untyped_storage().data_ptr() for chunk in worker.state.model for each in chunk.parameters()}
    sizes, most = {}, 0
    for name, tensor in worker.hf_weights():
        most = max(most, sum(found.nbytes for one in made if (found := one()) is not None))
        if tensor.untyped_storage().data_ptr() not in parameters:
            sizes[name] = tensor.nbytes
    expected = export_temporaries(read_architecture(tiny_policy(hf_config)["hf_config"], {}), 4)
    of_first_layer = [size for name, size in sizes.items() if ".layers.0." in name]
    assert sorted(of_first_layer) == sorted(expected)
    assert sum(sizes.values()) == hf_config["num_hidden_layers"] * sum(expected)
    assert 0 < most <= sum(expected)
