"""Tests that a policy's export replayed from CUDA graphs, in memory mapped by another process, equals a new one."""

import itertools

import pytest
import ray
import torch
from support.gpu import NEEDS_TE
from support.phases import each_delay
from support.refit_sides import look, start_engine
from support.tiny import TINY_QWEN3, TINY_QWEN3_MOE, random_batch, tiny_policy

from nemo_offload_rl.algorithms.losses import NLLLoss
from nemo_offload_rl.refit.checksum import tensor_checksum
from nemo_offload_rl.refit.cuda_ipc import CudaIpcTransport
from nemo_offload_rl.refit.interface import Receiver

pytestmark = [
    *NEEDS_TE,
    pytest.mark.skipif(torch.cuda.device_count() > 1, reason="the engine must be on the GPU of this process"),
]


@pytest.fixture(scope="module")
def engine(ray_cluster):
    actor = start_engine(ray_cluster)
    yield actor
    ray.kill(actor)


def graphed(engine, verify=False):
    return CudaIpcTransport([Receiver(engine, (0,))], verify=verify, graphs=True, min_gain_s=-100.0)


@each_delay
@pytest.mark.parametrize("bucket_gib", [1.0, 0.0005])
@pytest.mark.parametrize("hf_config", [TINY_QWEN3, TINY_QWEN3_MOE, TINY_QWEN3 | {"model_type": "qwen2"}])
def test_replays_bring_what_a_fresh_export_has_after_every_phase(
    make_worker, engine, monkeypatch, hf_config, bucket_gib, delay
):
    ray.get(engine.start.remote("cuda"))
    policy = tiny_policy(hf_config, "bfloat16")
    policy["use_pinned_optimizer_offload"] = True
    policy["refit_buffer_size_gb"] = bucket_gib
    worker = make_worker(policy)
    transport = graphed(engine)
    worker.prepare_refit_info(transport)
    delay(monkeypatch, seconds=0.002)
    seen = []
    for step in range(4):
        worker.train(random_batch(4), NLLLoss(), gbs=4, mbs=2)
        worker.send_weights()
        metrics = worker.residency_metrics()
        assert metrics["refit/graphs"] == 1
        expected = {name: tensor_checksum(tensor) for name, tensor in worker.hf_weights()}
        found = look(engine)
        assert found["sums"] == expected
        assert step == 0 or found["num_copied"] == 0
        seen.append(expected)
        worker.offload_after_refit()
    assert all(one != other for one, other in itertools.pairwise(seen))
    worker.prepare_refit_info(transport)  # frees the graphs
    assert look(engine)["num_senders"] == 0


def test_a_parameter_that_moves_is_exported_from_where_it_is(make_worker, engine):
    ray.get(engine.start.remote("cuda"))
    worker = make_worker(tiny_policy(TINY_QWEN3, "bfloat16"))
    worker.prepare_refit_info(graphed(engine))
    worker.send_weights()
    parameter = next(iter(worker.state.model[0].parameters()))
    parameter.data = parameter.data + 1
    for _ in range(2):
        worker.send_weights()
        assert worker.residency_metrics()["refit/graphs"] == 1
        assert look(engine)["sums"] == {name: tensor_checksum(tensor) for name, tensor in worker.hf_weights()}


def test_the_checksums_of_a_verified_refit_are_those_of_an_export_driven_from_python(make_worker, engine):
    ray.get(engine.start.remote("cuda"))
    worker = make_worker(tiny_policy(TINY_QWEN3, "bfloat16"))
    worker.prepare_refit_info(graphed(engine, verify=True))
    for _ in range(3):
        worker.train(random_batch(4), NLLLoss(), gbs=4, mbs=2)
        assert worker.send_weights() == look(engine)["sums"]
        assert worker.residency_metrics()["refit/graphs"] == 1
