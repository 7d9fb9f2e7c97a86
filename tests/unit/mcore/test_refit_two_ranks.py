"""Exports recorded and replayed on one rank, and on two that exchange weights; numbers compare exactly.

On GPUs, each rank has one, or both share the only one (see `support.ranks`); on a CPU, recorded ops replace graphs.
"""

import contextlib
import weakref
from collections import deque
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from support.ranks import run_ranks, worker_of_rank
from support.recorded_ops import OpsRecorder
from support.refit_sides import Counting, look, start_engine
from support.tiny import TINY_QWEN3, TINY_QWEN3_MOE, layout_of, random_batch, tiny_policy

from nemo_offload_rl.algorithms.losses import NLLLoss
from nemo_offload_rl.mcore.model.bridge_import import have_transformer_engine
from nemo_offload_rl.plan.architecture import read_architecture
from nemo_offload_rl.plan.refit_graphs import export_temporaries
from nemo_offload_rl.refit import cuda_ipc, export
from nemo_offload_rl.refit.checksum import tensor_checksum
from nemo_offload_rl.refit.cuda_ipc import CudaIpcTransport
from nemo_offload_rl.refit.graphs import _RecordedExport
from nemo_offload_rl.refit.interface import Receiver
from nemo_offload_rl.refit.recorder import CudaRecorder
from tests.unit.mcore.test_hf_weights import QWEN2

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="is for machines without a GPU")
needs_te = pytest.mark.skipif(not have_transformer_engine(), reason="needs Transformer Engine (extra te)")
LAYOUTS = ["tp2 sp", "pp2", "moe ep2"]


class Buckets:
    """Buckets in plain memory of this process, which stay mapped (see `FixedBuckets`)."""

    def __init__(self, layouts, device):
        buffers = [torch.empty(layout.num_bytes, dtype=torch.uint8, device=device) for layout in layouts]
        self.all_slots = [layout.slots(buffer) for layout, buffer in zip(layouts, buffers, strict=True)]

    @contextlib.contextmanager
    def mapped(self):
        yield [SimpleNamespace(slots=lambda slots=slots: slots) for slots in self.all_slots]


def replay_all(device: str, rank: int, world_size: int, ports: list[int]) -> dict[str, Any]:
    return {layout: replay(layout, device, rank, world_size, port) for layout, port in zip(LAYOUTS, ports, strict=True)}


def replay(layout: str, device: str, rank: int, world_size: int, port: int) -> list[tuple[list[str], int]]:
    """In each of three steps, which tensors of a replayed export differ from a fresh one; and how many there are."""
    model = TINY_QWEN3_MOE if layout.startswith("moe") else TINY_QWEN3
    policy = tiny_policy(model, "bfloat16", **layout_of(layout))
    worker = worker_of_rank(policy, rank, world_size, port)
    export = worker._weight_export
    plan = export.connect(CudaIpcTransport([], verify=False))
    assert export.collectives()
    assert device == "cpu" or not export.why_not_recorded()
    buckets = Buckets(plan.buckets(plan.num_bytes // 3), device)
    recorded = _RecordedExport(CudaRecorder() if device == "cuda" else OpsRecorder())
    for _ in range(2):
        deque(export, maxlen=0)
    recorded.record(buckets, export)
    found, ranks = [], worker.parallel_ranks()
    for step in range(3):
        batch = random_batch(4, seed=step * ranks["dp_size"] + ranks["dp_rank"])
        worker.train(batch, NLLLoss(), gbs=4 * ranks["dp_size"], mbs=2)
        assert export.agree(recorded.addresses == export.addresses())
        for number, slots in enumerate(buckets.all_slots):
            for slot in slots:
                slot.fill_(7)
            recorded.fill(number, slots)
        slots = iter([slot for of_bucket in buckets.all_slots for slot in of_bucket])
        compared = [(name, torch.equal(next(slots), tensor)) for name, tensor in export]
        found.append(([name for name, equal in compared if not equal], len(compared)))
    recorded.forget()
    worker.shutdown()
    return found


@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=on_cpu), pytest.param("cuda", marks=[pytest.mark.gpu, needs_te])]
)
def test_a_replayed_export_is_a_fresh_one_on_both_ranks(device, monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    for of_rank in run_ranks(partial(replay_all, device), 2, num_ports=len(LAYOUTS), timeout_s=240):
        for layout, found in of_rank.items():
            assert [differ for differ, _ in found] == [[]] * 3, layout
            assert min(number for _, number in found) > 10, layout


@pytest.mark.parametrize("hf_config", [TINY_QWEN3_MOE, QWEN2])
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


LLAMA = {"model_type": "llama", "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}
FAMILIES = [TINY_QWEN3, TINY_QWEN3_MOE, QWEN2, TINY_QWEN3 | LLAMA]


@pytest.mark.parametrize("hf_config", FAMILIES, ids=["qwen3", "experts", "qwen2", "tied llama with biases"])
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
