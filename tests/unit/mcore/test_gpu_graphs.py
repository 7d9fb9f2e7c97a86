"""Tests Transformer Engine's CUDA graphs in training steps on a GPU: equal numbers, and counted replays."""

from typing import Any

import pytest
import torch
from support.gpu import EXACTLY, SHAPE
from support.phases import checksums, delay_moves, each_delay
from support.ranks import off_and_on, run_ranks, worker_of_rank
from support.tiny import TINY_QWEN3, TINY_QWEN3_MOE, offloading_activations, packed_rows, random_batch, tiny_policy

from nemo_offload_rl.algorithms.losses import NLLLoss
from nemo_offload_rl.data.batch import BatchedData
from nemo_offload_rl.residency.table import Phase, Target

pytestmark = EXACTLY

LONGEST = 128  # at lengths that are no multiple of 128, captured attention uses another kernel than eager passes
LAYERS = 4
MBS = 2
WARMUP_STEPS = 2
# Rows of each step: the number of micro-batches changes, and an odd number leaves one half filled.
ROWS = (8, 8, 12, 4, 8, 2, 7, 12, 8, 6)

AUX_LOSS = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.01}
SCOPES: dict[str, tuple[str, list[str], dict[str, Any]]] = {
    "attn": ("dense", ["attn"], {}),
    "mlp": ("dense", ["mlp"], {}),
    "attn+mlp": ("dense", ["attn", "mlp"], {}),
    "moe attn": ("moe", ["attn"], {}),
    "moe router": ("moe", ["moe_router"], {}),
    "moe attn+moe_router": ("moe", ["attn", "moe_router"], {}),
    "moe attn+moe_router+moe_preprocess": ("moe", ["attn", "moe_router", "moe_preprocess"], {}),
    # The loss is scaled by the number of micro-batches, which the graph must read in each replay.
    "moe aux_loss attn+moe_router": ("moe", ["attn", "moe_router"], AUX_LOSS),
}
OVERLAP = {"grad_reduce_in_fp32": False, "overlap_grad_reduce": True, "overlap_param_gather": True}


def policy_of(
    kind: str, modules: list[str] | None, *, packed_row: int | None = None, **megatron: Any
) -> dict[str, Any]:
    """Returns a policy whose batches are padded to LONGEST with and without graphs; `modules` None captures nothing."""
    graphs = {"cuda_graph_impl": "none", "cuda_graph_modules": [], "cuda_graph_warmup_steps": WARMUP_STEPS}
    if modules is not None:
        graphs |= {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": modules}
    hf_config = (TINY_QWEN3_MOE if kind == "moe" else TINY_QWEN3) | SHAPE
    policy = tiny_policy(hf_config, "bfloat16", **graphs, **megatron)
    policy["max_total_sequence_length"] = LONGEST
    policy["use_pinned_optimizer_offload"] = True
    policy["residency"] |= {"verify": modules is not None, "huge_pages": False}
    if packed_row is not None:
        policy["sequence_packing"] = packed_rows(packed_row) | {"sequence_length_round": packed_row}
    return policy


def training_batch(rows: int, seed: int) -> BatchedData:
    """Returns random rows of which each micro-batch has one of LONGEST tokens, so that eager steps pad them alike."""
    data = random_batch(rows, longest=LONGEST, seed=seed)
    data["input_lengths"][::MBS] = LONGEST
    return data


def train_step(worker: Any, rows: int, seed: int) -> dict[str, Any]:
    """Trains a step; returns its report and checksums, without the replay count."""
    report: dict[str, Any] = worker.train(training_batch(rows, seed), NLLLoss(), gbs=rows, mbs=MBS)
    report["metrics"].pop("num_graph_replays", None)
    report["checksums"] = checksums(worker)
    return report


def run_steps(worker: Any, *, visit_phases: bool, rows: tuple[int, ...] = ROWS) -> list[dict[str, Any]]:
    """Returns a report per step, with log-probs of other shapes and, if wanted, all phases after each."""
    reports = []
    for seed, count in enumerate(rows):
        report = train_step(worker, count, seed)
        if worker.graphs.fixed_shapes:
            expected = LAYERS * report["num_microbatches"] if seed >= WARMUP_STEPS else 0
            assert worker.graphs.num_replays == expected, f"step {seed}"
        if visit_phases:
            worker.offload_before_refit()
            worker.offload_after_refit()
        data = random_batch(4, longest=5 + seed, seed=seed)
        report["logprobs"] = worker.get_logprobs(data, mbs=3)["logprobs"].tolist()
        report["validation"] = worker.evaluate(data, NLLLoss(), mbs=2)["loss"]
        if visit_phases and seed % 3 == 2:
            worker.residency.prefetch(Phase.TRAIN)
        reports.append(report)
    return reports


@pytest.mark.parametrize("scope", SCOPES)
def test_ten_steps_are_bit_equal_to_eager_ones(make_worker, monkeypatch, scope):
    kind, modules, megatron = SCOPES[scope]
    plain = run_steps(make_worker(policy_of(kind, None, **megatron)), visit_phases=False)
    worker = make_worker(policy_of(kind, modules, **megatron))
    delay_moves(monkeypatch)
    assert run_steps(worker, visit_phases=True) == plain
    assert worker.graphs.num_captures == 1


ATTENTION = ["qkv_linear", "core_attn", "attn_proj"]
EXPERTS = ["expert_fc1", "moe_act"]
# The captured modules, the offloaded ones, and which of those are inside a graph.
OFFLOADED: dict[str, tuple[str, list[str], list[str], list[str], dict[str, Any]]] = {
    "attn": ("dense", ["attn"], ATTENTION, ATTENTION, {}),
    "attn, half": ("dense", ["attn"], ATTENTION, ATTENTION, {"activation_offload_fraction": 0.5}),
    "attn+mlp": ("dense", ["attn", "mlp"], [*ATTENTION, "mlp_norm"], ATTENTION, {}),
    "mlp": ("dense", ["mlp"], ATTENTION, [], {}),
    "moe attn+moe_router": ("moe", ["attn", "moe_router"], [*ATTENTION, *EXPERTS], ATTENTION, {}),
    "moe delayed": ("moe", ["attn", "moe_router"], EXPERTS, [], {"delay_offload_until_cuda_graph": True}),
}


@each_delay
@pytest.mark.parametrize("case", OFFLOADED)
def test_ten_offloaded_steps_are_bit_equal_to_eager_plain_ones(make_worker, monkeypatch, case, delay):
    kind, captured, modules, inside, megatron = OFFLOADED[case]
    plain = run_steps(make_worker(policy_of(kind, None, moe_grouped_gemm=True)), visit_phases=False)
    policy = policy_of(kind, captured, moe_grouped_gemm=True)
    worker = make_worker(offloading_activations(policy, modules, mbs=MBS, gbs=12, **megatron))
    delay(monkeypatch, seconds=0.002)  # inside graphs in each replay, too
    assert run_steps(worker, visit_phases=True) == plain
    assert worker.graphs.num_captures == 1
    report = worker.activations.offloader.report
    assert bool(report.captured_host_bytes) == bool(inside)
    assert sum(report.modules[name].moved_bytes for name in inside or modules if name in report.modules) > 0
    assert report.total().refused_bytes == 0


def test_packed_rows_replay_the_router(make_worker, monkeypatch):
    rows = (8, 8, 8, 12, 4, 8)
    plain = make_worker(policy_of("moe", None, packed_row=2 * LONGEST))
    want = [train_step(plain, count, seed) for seed, count in enumerate(rows)]
    worker = make_worker(policy_of("moe", ["moe_router"], packed_row=2 * LONGEST))
    for seed, count in enumerate(rows):
        report = train_step(worker, count, seed)
        assert report == want[seed], f"step {seed}"
        assert worker.graphs.num_replays == (LAYERS * report["num_microbatches"] if seed >= WARMUP_STEPS else 0)
        worker.offload_after_refit()
    assert worker.graphs.num_captures == 1
    assert len({report["num_microbatches"] for report in want}) > 1


def test_overlapped_reduction_and_gather_change_no_number(make_worker):
    plain = run_steps(make_worker(policy_of("dense", None)), visit_phases=False)
    worker = make_worker(policy_of("dense", ["attn", "mlp"], distributed_data_parallel_config=OVERLAP))
    assert run_steps(worker, visit_phases=True) == plain


def test_streamed_optimizer_state_changes_no_number(make_worker, monkeypatch):
    """Late updates would show, and so would a window whose address a graph holds."""
    plain = run_steps(make_worker(policy_of("dense", None)), visit_phases=False)
    policy = policy_of("dense", ["attn", "mlp"]) | {"offload_optimizer_for_refit": True}
    policy["residency"] |= {"table": {"train": {"optimizer_state": "streamed"}}, "stream_window_mib": 8}
    worker = make_worker(policy)
    assert sum(step.num_chunks for step in worker.offloader.targets[Target.OPTIMIZER_STATE].steps) > 8
    delay_moves(monkeypatch, seconds=0.001)
    assert run_steps(worker, visit_phases=True) == plain
    assert worker.graphs.num_captures == 1


def test_a_checkpoint_loaded_between_replays_is_trained_on(make_worker, tmp_path):
    worker = make_worker(policy_of("dense", ["attn", "mlp"]))
    for seed in range(4):
        train_step(worker, 8, seed)
    worker.save_checkpoint(str(tmp_path / "policy"), save_optimizer=True)
    want = [train_step(worker, 8, seed) for seed in range(4, 7)]
    worker.load_checkpoint(str(tmp_path / "policy"))
    assert [train_step(worker, 8, seed) for seed in range(4, 7)] == want
    assert worker.graphs.num_captures == 2


LAYOUTS: dict[str, tuple[str, list[str], dict[str, Any]]] = {
    "dp2": ("dense", ["attn", "mlp"], {"distributed_data_parallel_config": OVERLAP}),
    "tp2": ("dense", ["attn", "mlp"], {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "pp2": ("dense", ["attn", "mlp"], {"pipeline_model_parallel_size": 2}),
    "pp2_vpp2": ("dense", ["attn"], {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}),
    "ep2": ("moe", ["attn", "moe_router"], {"expert_model_parallel_size": 2}),
}
# One capture is enough if a shorter step replays a part of it; it is captured again for a longer one.
LAYOUT_ROWS = (8, 8, 8, 4, 16, 12, 8, 16)
NUM_CAPTURES = {"dp2": 1, "tp2": 1, "pp2": 2, "pp2_vpp2": 6, "ep2": 1}


def run_layout(layout: str, rank: int, world_size: int, port: int, *, graphs: bool) -> tuple[list[Any], list[int], int]:
    """Runs steps on one of two ranks; returns their reports, the replays in each, and the number of captures."""

    kind, modules, overrides = LAYOUTS[layout]
    worker = worker_of_rank(policy_of(kind, modules if graphs else None, **overrides), rank, world_size, port)
    ranks = worker.parallel_ranks()
    reports, replays = [], []
    for seed, rows in enumerate(LAYOUT_ROWS):
        share = rows // ranks["dp_size"]
        data = training_batch(rows, seed)
        mine = data.slice(ranks["dp_rank"] * share, (ranks["dp_rank"] + 1) * share)
        report = worker.train(mine, NLLLoss(), gbs=rows, mbs=MBS)
        report["metrics"].pop("num_graph_replays", None)
        report["checksums"] = checksums(worker)
        replays.append(worker.graphs.num_replays)
        reports.append(report)
        if graphs:
            worker.offload_before_refit()
            worker.offload_after_refit()
        worker.get_logprobs(mine, mbs=MBS)
    captures = worker.graphs.num_captures if graphs else 0
    worker.shutdown()
    return reports, replays, captures


def all_layouts(rank: int, world_size: int, ports: list[int]) -> dict[str, tuple[Any, Any]]:
    return off_and_on(LAYOUTS, ports, lambda layout, port, on: run_layout(layout, rank, world_size, port, graphs=on))


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, tuple[Any, Any]]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        return run_ranks(all_layouts, 2, num_ports=2 * len(LAYOUTS), timeout_s=480)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_are_bit_equal_to_eager_ones(two_ranks, layout):
    for rank, runs in enumerate(two_ranks):
        (plain, _, _), (reports, replays, captures) = runs[layout]
        assert reports == plain, f"rank {rank}"
        assert captures == NUM_CAPTURES[layout], f"rank {rank}"
        layers = LAYERS // 2 if layout.startswith("pp2") else LAYERS
        want = [layers * report["num_microbatches"] for report in plain]
        assert replays == [0] * WARMUP_STEPS + want[WARMUP_STEPS:], f"rank {rank}"
