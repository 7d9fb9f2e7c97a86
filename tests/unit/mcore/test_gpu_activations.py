"""Tests activation offloading on a CUDA GPU: numbers compare exactly, and late copies show a missing wait."""

import random
import re
from typing import Any

import pytest
import torch
from megatron.core.pipeline_parallel.fine_grained_activation_offload import PipelineOffloadManager
from support.gpu import EXACTLY, SHAPE
from support.phases import checksums, delay_moves, each_delay
from support.tiny import (
    TINY_DEEPSEEK_V3,
    TINY_QWEN3,
    TINY_QWEN3_MOE,
    offloading_activations,
    packed_rows,
    random_batch,
    tiny_policy,
)

from nemo_offload_rl.algorithms.losses import NLLLoss

pytestmark = EXACTLY

MOE_SHAPE = SHAPE | {"moe_intermediate_size": 512}
ATTENTION = ["qkv_linear", "core_attn", "attn_proj"]
EXPERTS = ["expert_fc1", "moe_act"]
FULL = {"activation_checkpointing": True, "recompute_granularity": "full"}
LONGEST = 256
MBS = 2
NUM_STEPS = 10


def policy_of(model: str, *, packed: bool = False, **megatron: Any) -> dict[str, Any]:
    configs = {"dense": TINY_QWEN3 | SHAPE, "moe": TINY_QWEN3_MOE | MOE_SHAPE, "latent": TINY_DEEPSEEK_V3}
    policy = tiny_policy(configs[model], "bfloat16", moe_grouped_gemm=True, **megatron)
    policy["max_total_sequence_length"] = LONGEST
    if packed:
        policy["sequence_packing"] = packed_rows(2 * LONGEST)
    return policy


def steps(worker: Any, num_steps: int = NUM_STEPS, *, visit_phases: bool = False) -> list[dict[str, Any]]:
    """Returns loss, gradient norm and parameters of each step; micro-batches change in number and length."""
    chance = random.Random(0)
    out = []
    for seed in range(num_steps):
        rows = MBS * chance.randint(2, 6)
        report = worker.train(random_batch(rows, chance.randint(32, LONGEST), seed), NLLLoss(), gbs=rows, mbs=MBS)
        if visit_phases:
            worker.offload_before_refit()
            worker.offload_after_refit()
            worker.get_logprobs(random_batch(4, 64, seed=seed), mbs=2)
        out.append({name: report[name] for name in ("loss", "grad_norm")} | {"checksums": checksums(worker)})
    return out


CASES: dict[str, tuple[str, list[str], dict[str, Any]]] = {
    "core_attn": ("dense", ["core_attn"], {}),
    "attention": ("dense", ATTENTION, {}),
    "attention, packed": ("dense", ATTENTION, {"packed": True}),
    "attention, half": ("dense", ATTENTION, {"activation_offload_fraction": 0.5}),
    "moe, all": ("moe", [*ATTENTION, "mlp_norm", *EXPERTS], {}),
    "moe, packed": ("moe", EXPERTS, {"packed": True}),
    "layer_input, segments": ("dense", ["layer_input"], FULL | {"recompute_num_layers": 2}),
    "layer_input, attention kept": ("dense", ["layer_input", "core_attn"], FULL),
    "layer_input, attention kept, packed": ("dense", ["layer_input", "core_attn"], FULL | {"packed": True}),
    "moe, layer_input, attention kept": ("moe", ["layer_input", "core_attn"], FULL),
}


@pytest.fixture(scope="module")
def plain() -> dict[Any, list[dict[str, Any]]]:
    return {}


@each_delay
@pytest.mark.parametrize("case", CASES)
def test_ten_steps_are_bit_equal_to_a_plain_run(make_worker, monkeypatch, plain, case, delay):
    model, modules, options = CASES[case]
    options = dict(options)
    key = (model, options.pop("packed", False))
    if key not in plain:
        plain[key] = steps(make_worker(policy_of(model, packed=key[1])))
    policy = offloading_activations(policy_of(model, packed=key[1]), modules, mbs=MBS, gbs=12, **options)
    policy["use_pinned_optimizer_offload"] = True
    worker = make_worker(policy)
    delay(monkeypatch, seconds=0.002)
    assert steps(worker, visit_phases=True) == plain[key]
    total = worker.activations.offloader.report.total()
    assert total.moved_bytes > 0
    assert total.refused_bytes == 0


@pytest.mark.parametrize("recomputed", [[], ["layernorm", "moe_act"]], ids=str)
def test_norms_of_their_own_may_be_recomputed(make_worker, monkeypatch, recomputed):
    """Recomputation empties what `qkv_linear` saves and refills it later, so it must stay on the GPU."""
    again = {
        "activation_checkpointing": bool(recomputed),
        "recompute_granularity": "selective",
        "recompute_modules": recomputed,
    }
    want = steps(make_worker(policy_of("latent", **again)), 4)
    policy = offloading_activations(policy_of("latent"), ["attn_norm", *ATTENTION, "mlp_norm", *EXPERTS], **again)
    policy["activation_offload"] = {"strict": True, "host_memory_limit_gib": 0.25}  # the plan does not know the sizes
    worker = make_worker(policy)
    delay_moves(monkeypatch, seconds=0.002)
    assert steps(worker, 4) == want
    modules = worker.activations.offloader.report.modules
    assert min(modules[name].moved_bytes for name in ("qkv_linear", "core_attn")) > 0
    for name in ("attn_norm", "mlp_norm", "moe_act"):  # the inputs of the recomputation
        assert modules[name].freed_bytes == modules[name].moved_bytes > 0


def test_a_gpu_that_waits_for_copies_is_said_once(make_worker, monkeypatch, caplog):
    """Delays every copy; the timed step computes what the others do."""
    want = steps(make_worker(policy_of("dense")), 3)
    worker = make_worker(offloading_activations(policy_of("dense"), ATTENTION))
    delay_moves(monkeypatch, seconds=0.003)
    assert steps(worker, 3) == want
    (told,) = [message for message in caplog.messages if message.startswith("the GPU waited")]
    found = re.match(r"the GPU waited ([\d.,]+) ms of a training step of ([\d.,]+) ms for copies of", told)
    assert found is not None
    waited, whole = (float(number.replace(",", "")) for number in found.groups())
    assert 0.02 * whole < waited < whole


def test_late_copies_show_in_the_manager_of_megatron_core(make_worker, monkeypatch):
    """With the same delays and the same model, ours computes what a plain run does; megatron-core's does not."""
    want = steps(make_worker(policy_of("dense")), 3)
    worker = make_worker(offloading_activations(policy_of("dense"), ATTENTION))
    delay_moves(monkeypatch, 0.005)
    copy, main = torch.Tensor.copy_, torch.cuda.current_stream()

    def late(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if self.device != source.device and torch.cuda.current_stream() != main:  # as megatron-core's manager copies
            torch.cuda._sleep(int(0.005 * 1.5e9))
        return copy(self, source, non_blocking=non_blocking)

    monkeypatch.setattr(torch.Tensor, "copy_", late)
    assert steps(worker, 3) == want
    worker.activations.close()
    PipelineOffloadManager.OFFLOAD_MGR = None
    worker = make_worker(offloading_activations(policy_of("dense"), ATTENTION))
    worker.activations.close()
    PipelineOffloadManager.reset_instance()
    assert steps(worker, 3) != want
