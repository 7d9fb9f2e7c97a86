"""Tests activation offloading in megatron-core's own layers and schedules, without a GPU and with late copies."""

import gc
import random
from contextlib import nullcontext
from typing import Any

import pytest
from megatron.core.pipeline_parallel.fine_grained_activation_offload import PipelineOffloadManager
from support.late_copies import LateCopies
from support.phases import assert_ends, checksums
from support.tiny import TINY_QWEN3, TINY_QWEN3_MOE, offloading_activations, random_batch, tiny_policy

from nemo_offload_rl.algorithms.losses import NLLLoss
from nemo_offload_rl.mcore.patches import activation_offload
from nemo_offload_rl.memory.link import LinkSpeed
from nemo_offload_rl.memory.pinned import PinnedArena
from nemo_offload_rl.memory.streams import Waits
from nemo_offload_rl.residency import context
from nemo_offload_rl.worker.activations import NoEffectError

ATTENTION = ["qkv_linear", "core_attn", "attn_proj"]
DENSE = ["attn_norm", *ATTENTION, "mlp_norm"]
MBS = 2
AGAIN = {"activation_checkpointing": True, "recompute_granularity": "selective", "recompute_modules": ["layernorm"]}


def steps(worker: Any) -> list[dict[str, Any]]:
    """Runs steps whose micro-batches change in number and length, with log-probs between them."""
    chance = random.Random(0)
    out = []
    for seed in range(3):
        rows = MBS * chance.randint(1, 6)
        report = worker.train(random_batch(rows, chance.randint(8, 32), seed), NLLLoss(), gbs=rows, mbs=MBS)
        report["checksums"] = checksums(worker)
        worker.offload_before_refit()
        worker.offload_after_refit()
        report["logprobs"] = worker.get_logprobs(random_batch(4, seed=seed), mbs=2)["logprobs"].tolist()
        report["num_micro_batches"] = rows // MBS
        out.append(report)
    return out


def plain_steps(make_worker: Any, once: Any, config: dict[str, Any], **megatron: Any) -> Any:
    return once(f"{config['model_type']} {megatron}", lambda: steps(make_worker(tiny_policy(config, **megatron))))


KINDS = {
    "attention": (TINY_QWEN3, ATTENTION, {}),
    "core_attn": (TINY_QWEN3, ["core_attn"], {}),
    "half": (TINY_QWEN3, ATTENTION, {"activation_offload_fraction": 0.5}),
    "moe, none in flight": (TINY_QWEN3_MOE, ATTENTION, {"fine_grained_offloading_max_inflight_offloads": 0}),
    "norms too": (TINY_QWEN3, DENSE, {}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_those_of_a_plain_run(make_worker, late, once, kind):
    config, modules, megatron = KINDS[kind]
    want = plain_steps(make_worker, once, config)
    policy = offloading_activations(tiny_policy(config), modules, **megatron)
    worker = make_worker(with_room(policy) if modules is DENSE else policy)
    assert steps(worker) == want
    report = worker.activations.offloader.report
    assert all(report.modules[name].moved_bytes > 0 for name in ("attn_norm", "mlp_norm") if name in modules)
    assert report.num_micro_batches == want[-1]["num_micro_batches"]
    assert report.total().moved_bytes > 0
    metrics = worker.residency_metrics()
    assert metrics["activations/moved_gib"] > 0
    assert metrics["activations/host_peak_gib"] <= metrics["activations/host_gib"]
    assert_ends(worker)


@pytest.mark.parametrize("recomputed", ["mlp", "moe"])
def test_beside_selective_recomputation(make_worker, late, recomputed):
    config = TINY_QWEN3_MOE if recomputed == "moe" else TINY_QWEN3
    selective = AGAIN | {"recompute_modules": [recomputed]}
    want = steps(make_worker(tiny_policy(config, **selective)))
    worker = make_worker(offloading_activations(tiny_policy(config), ATTENTION, **selective))
    assert steps(worker) == want
    assert worker.activations.offloader.report.total().moved_bytes > 0


@pytest.mark.parametrize("modules", [["qkv_linear"], ["qkv_linear", "mlp_norm"], DENSE], ids=str)
def test_a_norm_of_its_own_may_be_recomputed(make_worker, late, recomputing, once, modules):
    """`qkv_linear` saves the norm's output, which is emptied before the layer's copies are requested, and refilled."""
    want = plain_steps(make_worker, once, TINY_QWEN3, **AGAIN)
    worker = make_worker(with_room(offloading_activations(tiny_policy(), modules, **AGAIN)))
    assert steps(worker) == want
    report = worker.activations.offloader.report.modules
    assert report["qkv_linear"].moved_bytes > 0
    norms = [report[name] for name in ("attn_norm", "mlp_norm") if name in report]  # the inputs of the recomputation
    assert all(norm.freed_bytes == norm.moved_bytes > 0 for norm in norms)


def test_beside_mlps_in_tiles_whose_norm_is_recomputed(make_worker, late, recomputing, once):
    """An MLP in tiles saves the output of the norm, which is emptied, and refilled before the backward pass."""
    whole = plain_steps(make_worker, once, TINY_QWEN3)
    want = steps(make_worker(tiny_policy(mlp_tile_tokens=9, **AGAIN)))
    worker = make_worker(with_room(offloading_activations(tiny_policy(mlp_tile_tokens=9), DENSE, **AGAIN)))
    assert steps(worker) == want
    for name in ("loss", "grad_norm"):
        assert [step[name] for step in want] == pytest.approx([step[name] for step in whole], rel=1e-5)


def with_room(policy: dict[str, Any], nbytes: int = 2**22) -> dict[str, Any]:
    """Sets the host memory limit; the plan is for Transformer Engine's layers, whose norms save nothing extra."""
    policy["activation_offload"] = {"strict": False, "host_memory_limit_gib": nbytes / 2**30}
    return policy


def test_a_limit_of_the_host_memory_is_kept(make_worker, late, once):
    worker = make_worker(with_room(offloading_activations(tiny_policy(), ATTENTION), 2**15))
    got = steps(worker)
    report = worker.activations.offloader.report
    assert report.host_bytes == 2**15
    assert report.total().refused_bytes > 0
    assert got == plain_steps(make_worker, once, TINY_QWEN3)
    worker.shutdown()
    assert worker.activations.offloader is None  # the worker closes it


def test_a_module_without_effect_is_said_and_strictly_an_error(make_worker, late, caplog):
    policy = offloading_activations(tiny_policy(), ["core_attn", "attn_proj"], min_offloaded_tensor_size=10**9)
    make_worker(policy).train(random_batch(4), NLLLoss(), gbs=4, mbs=MBS)
    assert "core_attn: all of its 0." in caplog.text
    assert "below policy.megatron_cfg.min_offloaded_tensor_size elements" in caplog.text
    policy["activation_offload"] = {"strict": True, "host_memory_limit_gib": None}
    words = r"modules that have no effect in the first step: core_attn: .*strict to false"
    with pytest.raises(NoEffectError, match=words):
        make_worker(policy).train(random_batch(4), NLLLoss(), gbs=4, mbs=MBS)


OF_LAST_LAYER = "except in the first micro-batch, .* or because they belong to the last layer"


@pytest.mark.parametrize(("num_layers", "fraction", "says"), [(1, 1.0, OF_LAST_LAYER), (2, 0.01, "_fraction")])
def test_what_stays_in_all_passes_but_the_first_is_an_error_too(make_worker, late, num_layers, fraction, says):
    """It is an error even if the first step has moved something, or had no room for it."""
    tiny = tiny_policy(TINY_QWEN3 | {"num_hidden_layers": num_layers})
    policy = offloading_activations(tiny, ["core_attn", "attn_proj"], activation_offload_fraction=fraction)
    policy["activation_offload"] = {"strict": True, "host_memory_limit_gib": None}
    with pytest.raises(NoEffectError, match=f"core_attn: all of its .*{says}"):
        make_worker(policy).train(random_batch(4), NLLLoss(), gbs=4, mbs=MBS)


WAITS = {
    "a slow link": (0.026, "the copies would fit with policy.megatron_cfg.activation_offload_fraction 0.95"),
    "another cause": (0.026, "raise policy.megatron_cfg.fine_grained_offloading_max_inflight_offloads"),
    "little": (0.01, None),
    "copies in graphs": (0.26, None),
}


@pytest.mark.parametrize("why", WAITS)
def test_the_second_step_that_ends_says_that_the_gpu_waited(make_worker, late, caplog, monkeypatch, why):
    waited_s, words = WAITS[why]
    if why == "a slow link":  # copies take some seconds
        slow = LinkSpeed(d2h_bytes_per_s=1e4, h2d_bytes_per_s=1e4)
        monkeypatch.setattr(context, "measure_link", lambda device, arena: slow)
    worker, said = make_worker(offloading_activations(tiny_policy(), ATTENTION)), []
    offloader = worker.activations.offloader
    offloader.copies.waits = Waits(waited_s, 0.5)
    if why == "copies in graphs":
        assert offloader.captures.regions.take_all([256]) is not None

    def broken(logprobs, data, counts):
        raise ZeroDivisionError

    for loss in (NLLLoss(), broken, NLLLoss(), NLLLoss()):
        caplog.clear()
        with pytest.raises(ZeroDivisionError) if loss is broken else nullcontext():
            worker.train(random_batch(4), loss, gbs=4, mbs=MBS)
        said.append([message for message in caplog.messages if message.startswith("the GPU waited")])
    assert [len(messages) for messages in said] == [0, 0, words is not None, 0]
    assert words is None or (words in said[2][0] and "waited 26 ms of a training step of 500 ms" in said[2][0])


class DriverError(RuntimeError):
    pass


class Failing(LateCopies):
    def out(self, spans, after):
        if self.num_out > 2:
            raise DriverError
        return super().out(spans, after)

    def wait(self, handle):
        if self.num_out > 2:
            raise RuntimeError("the GPU has failed")
        super().wait(handle)


def test_no_room_for_streams_is_what_is_said(make_worker, monkeypatch):
    def no_stream(device, graphs):
        raise DriverError

    monkeypatch.setattr(activation_offload, "CudaCopies", no_stream)
    before = activation_offload.CheckpointWithoutOutput.checkpoint
    with pytest.raises(DriverError):
        make_worker(offloading_activations(tiny_policy(), ATTENTION))
    gc.collect()  # the error's frames hold views of the memory
    assert PinnedArena.live_bytes() == 0
    assert not isinstance(PipelineOffloadManager.OFFLOAD_MGR, activation_offload.ActivationOffloader)
    assert activation_offload.CheckpointWithoutOutput.checkpoint is before


def test_a_worker_that_never_trains_leaves_megatron_core_as_it_is(make_worker):
    make_worker(offloading_activations(tiny_policy(), ATTENTION), init_optimizer=False)
    assert PipelineOffloadManager.OFFLOAD_MGR is None


def test_a_refused_copy_is_what_is_said_though_the_worker_ends_behind_it(make_worker, monkeypatch):
    monkeypatch.setattr(activation_offload, "CudaCopies", lambda device, graphs: Failing(eager_share=0.0))
    worker = make_worker(offloading_activations(tiny_policy(), ATTENTION))

    def train() -> None:
        try:
            worker.train(random_batch(4), NLLLoss(), gbs=4, mbs=2)
        finally:
            worker.shutdown()

    with pytest.raises(DriverError) as caught:
        train()
    assert "Cleanup after this error failed, too: RuntimeError: the GPU has failed" in caught.value.__notes__
    del caught
    gc.collect()
    assert PinnedArena.live_bytes() == 0
