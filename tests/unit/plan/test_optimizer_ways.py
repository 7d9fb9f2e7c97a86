"""Tests the ways to keep optimizer state against hand counts for a bf16 model of 1,543,714,304 parameters."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.model_shapes import QWEN2_1_5B, QWEN3_8B
from nemo_offload_rl.cli import main
from nemo_offload_rl.config import load
from nemo_offload_rl.memory.units import GIB, MIB, show_gib
from nemo_offload_rl.placement.host import HostFacts
from nemo_offload_rl.placement.rates import H200_RATES
from nemo_offload_rl.plan.colocation import check_awake_engine_fits
from nemo_offload_rl.plan.generation import check_refit_fits, check_share_beside_policy, engine_bytes_beside_policy
from nemo_offload_rl.plan.optimizer_ways import (
    OVERLAPPED_FACTOR,
    Host,
    cpu_speed,
    fastest_that_fits,
    measured_cpu_params_per_s,
    plan_ways,
    reason,
)
from nemo_offload_rl.plan.planner import plan_run
from tests.unit.plan.test_report import BENCHMARK, printed, row

DOCS = Path(BENCHMARK).parents[2] / "docs"
N = 1_543_714_304
OPTIMIZER = "policy.megatron_cfg.optimizer"
CONTEXT = GIB  # of the transformers engine, on the same GPU
STREAMED = "++policy.residency.table.train.optimizer_state=streamed"
ELSEWHERE = ("--host-memory", "128")
CPU = [f"{OPTIMIZER}.optimizer_cpu_offload=true", f"{OPTIMIZER}.overlap_cpu_optimizer_d2h_h2d=true"]

SHARE = ["policy.generation.vllm_cfg.gpu_memory_utilization=0.5"]
OWN_KV_CACHE = [f"++policy.generation.vllm_kwargs.kv_cache_memory_bytes={7 * GIB}"]
BUCKETS_NEED_MOST = [
    f"++policy.generation.vllm_kwargs.kv_cache_memory_bytes={GIB}",
    "policy.generation.vllm_cfg.enforce_eager=true",
    "policy.refit_buffer_size_gb=20",
    "policy.megatron_cfg.activation_checkpointing=true",
    "++policy.megatron_cfg.use_fused_linear_logprobs=true",
]


def planned(*overrides, link=50e9, model=QWEN2_1_5B, **speeds):
    def plan_with(more):
        config = load(BENCHMARK, [*overrides, *more]).config
        return plan_run(config, model, algorithm="grpo", link_bytes_per_s=link)

    ways = plan_ways(load(BENCHMARK, list(overrides)).config["policy"], plan_with, **speeds)
    return {one.way.name: one for one in ways}


def measured_rows(case):
    """Returns the rows of a case in docs/results/cpu_optimizer.json, by way."""
    rows = json.loads((DOCS / "results" / "cpu_optimizer.json").read_text())["rows"]
    return {one["way"]: one for one in rows if one["case"] == case}


def cpu_step(step_s, waited_s, copied_gib):
    """Returns a step's metrics of the CPU optimizer."""
    values = {"step_s": step_s, "waited_s": waited_s, "copied_gib": copied_gib}
    return {f"residency/cpu_optimizer/{name}": value for name, value in values.items()}


def host(gib):
    """Returns a machine 95% of whose memory is available."""
    nbytes = int(gib * GIB)
    return Host("this machine", HostFacts("a", "", nbytes, nbytes, None, None), "measured")


def is_accepted(run, gpu_bytes):
    """Returns whether a run's checks of a GPU of this size accept the plan."""
    try:
        for check in (check_share_beside_policy, check_refit_fits, check_awake_engine_fits):
            check(run.plan, run.engine, gpu_bytes)
    except ValueError:
        return False
    return True


def test_every_ways_bytes_and_seconds():
    ways = planned()
    state = {name: (one.training_bytes, one.generation_bytes, one.host_bytes) for name, one in ways.items()}
    params_and_grads, reference_and_params = 4 * N, 4 * N
    assert state == {
        "resident": (params_and_grads + 10 * N, 10 * N, reference_and_params),
        "page-locked around refit": (params_and_grads + 10 * N, 0, reference_and_params + 10 * N),
        "streamed": (params_and_grads + 512 * MIB, 0, reference_and_params + 10 * N),
        # State that is stepped on the GPU is float32 there, with float32 gradients during the step.
        "CPU optimizer, 0.5": (params_and_grads + (12 + 4) * N // 2, 0, reference_and_params + (12 + 16) * N // 2),
        "CPU optimizer, 1": (params_and_grads, 0, reference_and_params + 16 * N),
    }
    both_ways = 50e9 * 0.92
    assert [one.wait_s for one in ways.values()] == pytest.approx(
        [0, 0, 10 * N / both_ways, *(OVERLAPPED_FACTOR * n / H200_RATES.cpu_params_per_s for n in (N / 2, N))]
    )
    others = ways["resident"].transfer_s
    assert ways["streamed"].transfer_s - others == pytest.approx(10 * N / both_ways)
    assert ways["page-locked around refit"].transfer_s - others == pytest.approx(2 * 10 * N / 50e9)
    assert ways["CPU optimizer, 1"].transfer_s - others == pytest.approx(8 * N / 50e9)


def test_the_estimates_are_those_that_were_measured():
    """Compares with an H200: seconds of overlapped steps, and the peak, of which state takes 14 bytes per parameter."""
    ways, measured = planned(link=55e9), measured_rows("1.5B, 10 bytes a parameter")
    names = {"CPU optimizer, 0.5": "CPU 0.5, overlap", "CPU optimizer, 1": "CPU 1, overlap", "streamed": "streamed"}
    for name, way in names.items():
        assert ways[name].wait_s == pytest.approx(measured[way]["optimizer_ms"] / 1e3, rel=0.06), name
    peak = measured["resident"]["peak_gpu_mib"] * MIB
    copy_of_logits = 2048 * 151_936 * 2  # the gradient was not yet written over the logits
    assert ways["resident"].activation_bytes == pytest.approx(peak - 14 * N - copy_of_logits, rel=0.05)


def test_the_way_that_was_measured_to_be_faster_is_recommended():
    """Half of the parameters on the CPU took 218 ms on an H200, streamed state 315: without overlap it would lose."""
    measured = measured_rows("1.5B, 10 bytes a parameter")
    assert measured["CPU 0.5, overlap"]["exposed_ms"] < measured["streamed"]["exposed_ms"]
    chosen = fastest_that_fits(list(planned(link=55e9).values()), 25 * GIB, host(128))
    assert chosen.way.name == "CPU optimizer, 0.5"
    assert f"{OPTIMIZER}.overlap_cpu_optimizer_d2h_h2d=true" in chosen.way.overrides


def test_a_slow_link_limits_the_cpu_optimizer_by_the_copies_of_one_direction():
    one_way = 4 * N / (5e9 * 0.92)
    assert planned(link=5e9)["CPU optimizer, 1"].wait_s == pytest.approx(one_way)
    assert planned(link=5e9)["CPU optimizer, 1"].wait_s < planned(link=5e9)["streamed"].wait_s


def test_the_least_for_activations_and_logits():
    megatron = "policy.megatron_cfg"
    tokens, logits = 2048, 2048 * 151_936 * 2
    saved = tokens * 28 * 2 * (2 * 1536 + 2 * 1536 + 2 * 256 + 2 * 1536 + 3 * 8960)
    assert planned()["resident"].activation_bytes == pytest.approx(saved + logits, rel=0.01)
    again = planned(f"{megatron}.activation_checkpointing=true")["resident"]
    assert again.activation_bytes == tokens * 28 * 1536 * 2 + logits
    chunks = f"{megatron}.use_fused_linear_logprobs=true", f"{megatron}.activation_checkpointing=true"
    assert planned(*(f"++{one}" for one in chunks))["resident"].activation_bytes == tokens * 28 * 1536 * 2 + logits // 2


def test_activations_are_gone_when_a_step_makes_fp32_gradients():
    half = planned()["CPU optimizer, 0.5"]
    assert half.training_bytes - half.state_bytes == 2 * N
    needed = half.state_bytes + max(2 * N, half.activation_bytes) + 2 * GIB + CONTEXT
    assert (half.missing_bytes(needed), half.missing_bytes(needed - 1)) == (0, 1)


def test_without_the_precision_aware_optimizer_a_step_has_fp32_gradients_unless_the_buffer_has_them():
    aware = f"{OPTIMIZER}.use_precision_aware_optimizer=false"
    assert planned(aware)["resident"].training_bytes == (4 + 12 + 4) * N
    in_fp32 = "policy.megatron_cfg.distributed_data_parallel_config.grad_reduce_in_fp32=true"
    assert planned(aware, in_fp32)["resident"].training_bytes == (2 + 4 + 12) * N
    assert planned(aware)["streamed"].training_bytes == (4 + 4) * N + 512 * MIB


@pytest.mark.parametrize("start", [[], [STREAMED], [*CPU, f"{OPTIMIZER}.optimizer_offload_fraction=1.0"]])
def test_the_overrides_of_a_way_turn_it_on_from_any_other(start):
    ways, plain = planned(*start), planned()
    for name, one in ways.items():
        assert not one.refusal
        again = planned(*start, *one.way.overrides)
        assert again[name].way.overrides == ()
        assert (one.training_bytes, one.wait_s) == (plain[name].training_bytes, plain[name].wait_s)


@pytest.mark.parametrize(
    ("gib", "name"),
    [
        (40, "resident"),
        (24, "CPU optimizer, 0.5"),
        (20, "streamed"),  # the CPU optimizer at 0.5 has room for its state, but not for a micro-batch
        (16, "streamed"),
        (13.5, "CPU optimizer, 1"),
        (8, None),
    ],
)
def test_the_fastest_that_fits(gib, name):
    ways = list(planned().values())
    gpu = int(gib * GIB)
    chosen = fastest_that_fits(ways, gpu, host(500))
    assert (chosen and chosen.way.name) == name
    said = f"For a GPU of {gib:.2f} GiB use {name}" if name else "No option fits a GPU"
    assert reason(ways, gpu, host(500)).startswith(said)


HOSTS = [
    (79.1, 126, "streamed", "(resident lacks 31.84, page-locked around refit lacks 31.84, CPU optimizer, 0.5"),
    (35, 150, "CPU optimizer, 1", "streamed lacks 0.155 GiB)"),
    (35, 126, None, "CPU optimizer, 1 needs 122.05 GiB of host memory, but this machine has 119.70)"),
    (39.5, 60, None, "streamed needs 76.28 GiB of host memory, but this machine has 57.00; CPU optimizer, 1 needs"),
    (8, 60, None, "for the smallest option"),
]


@pytest.mark.parametrize(("gpu", "memory", "name", "why"), HOSTS)
def test_the_memory_of_the_host_is_looked_at_too(gpu, memory, name, why):
    """8,190,735,360 parameters: 10 bytes of each are 76.28 GiB, 16 are 122.05."""
    again = "policy.megatron_cfg.activation_checkpointing=true"
    recipe = again, "loss_fn.reference_policy_kl_penalty=0", "++policy.residency.table.generate.params=gpu"
    ways = list(planned(*recipe, model=QWEN3_8B).values())
    chosen = fastest_that_fits(ways, int(gpu * GIB), host(memory))
    assert (chosen and chosen.way.name) == name
    assert why in reason(ways, int(gpu * GIB), host(memory))


def test_all_ranks_of_a_host_share_its_memory():
    two = planned("cluster.gpus_per_node=2")
    for way in two.values():
        assert way.all_ranks_host_bytes == 2 * way.host_bytes
    streamed = two["streamed"]
    enough_gib = streamed.all_ranks_host_bytes / 0.95 / GIB
    assert streamed.fits(24 * GIB, host(enough_gib + 1e-6))
    assert not streamed.fits(24 * GIB, host(enough_gib - 1e-6))


def test_the_cpus_speed_is_that_of_a_ranks_threads_or_of_an_earlier_run():
    assert cpu_speed().params_per_s == cpu_speed(16).params_per_s == cpu_speed(48).params_per_s == 3.9e9
    assert cpu_speed(4).params_per_s == 3.9e9 / 4
    assert cpu_speed(4).source == "assumed for the 4 threads that a rank has here, from a measurement with 16 threads"
    assert planned(cpu_params_per_s=1e9)["CPU optimizer, 1"].wait_s == pytest.approx(OVERLAPPED_FACTOR * N / 1e9)
    steps = [cpu_step(*one) for one in ((0.6, 0.1, 4.0), (0.4, 0.15, 4.0), (0.0, 0.0, 0.0), (9.0, 1.0, 4.0))]
    assert measured_cpu_params_per_s([*steps, {"step": 5.0}]) == pytest.approx(GIB / 0.5)
    assert measured_cpu_params_per_s([{"step": 5.0}]) is None


def test_an_earlier_run_with_or_without_overlap_predicts_the_overlapped_step():
    """The H200 took 306 ms without overlap and 218 with it; what it waited for was not recorded, only computed here."""
    # With overlap copies have slowed the kernels, or the first and the last copy were waited for.
    for step_s, waited_s in ((0.306, 0.112), (0.218, 0.002), (0.218, 0.030)):
        speed = measured_cpu_params_per_s([cpu_step(step_s, waited_s, 4 * N / 2 / GIB)])
        half = planned(link=55e9, cpu_params_per_s=speed)["CPU optimizer, 0.5"]
        assert half.wait_s == pytest.approx(0.218, rel=0.03)


def test_a_way_that_the_recipe_cannot_have_says_why(capsys):
    scaled = [f"++{OPTIMIZER}.exp_avg_dtype=bfloat16"]
    ways = planned(*scaled)
    assert [name for name, one in ways.items() if one.refusal] == ["streamed", "CPU optimizer, 0.5", "CPU optimizer, 1"]
    assert ways["streamed"].refusal.startswith(f"{OPTIMIZER}.exp_avg_dtype: must be float32 with policy.residency")
    text = printed(capsys, BENCHMARK, *scaled, "--gpu-memory", "16", *ELSEWHERE)
    assert f"not with this recipe: streamed: {OPTIMIZER}.exp_avg_dtype: must be float32" in " ".join(text.split())
    assert "No option fits a GPU of 16.00 GiB, which lacks " in text


def test_a_recipe_without_the_section_of_residency_has_every_way():
    assert planned("~policy.residency") == planned()


def test_the_report_names_the_way_its_reason_and_its_overrides(capsys):
    sizes = (BENCHMARK, "--gpu-memory", "16", *ELSEWHERE)
    text = printed(capsys, *sizes)
    assert row(text, "streamed")[-1] == "yes"
    assert row(text, "resident")[-1] == "lacks 11.62"
    assert "For a GPU of 16.00 GiB use streamed, since it is the fastest that fits" in text
    assert text.rstrip().endswith(STREAMED)
    values = json.loads(printed(capsys, *sizes, "--json"))["optimizer_state_ways"]
    assert (values["chosen"], values["ways"][2]["way"]["overrides"]) == ("streamed", [STREAMED])
    text = printed(capsys, *sizes[:-1], "16")
    assert row(text, "streamed")[-1] == "host lacks 5.13"
    assert "streamed needs 20.13 GiB of host memory, but a machine of 16 GiB has 15.00" in " ".join(text.split())
    assert json.loads(printed(capsys, *sizes[:-1], "16", "--json"))["optimizer_state_ways"]["chosen"] is None


def test_the_report_says_where_speeds_are_from(capsys, tmp_path):
    def of_run(metrics):
        (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1} | metrics) + "\n")
        return " ".join(printed(capsys, BENCHMARK, "--link-of", str(tmp_path)).split())

    assumed = printed(capsys, BENCHMARK, *ELSEWHERE)
    assert "its kernels step 3.9 G parameters per s, assumed for 16 threads a rank" in assumed
    assert "that a rank has here, from a measurement with 16 threads" in printed(capsys, BENCHMARK)
    text = of_run(cpu_step(0.6, 0.1, 4.0))
    assert "times in s at 55 GB/s, assumed" in text
    assert f"its kernels step 2.15 G parameters per s, measured by the run in {tmp_path}" in text
    one_way = {"residency/refit/optimizer_state/gb_per_s": 36.0, "residency/refit/optimizer_state/share_of_link": 0.9}
    both_ways = {"residency/train/optimizer_state/gb_per_s": 80.0, "residency/train/optimizer_state/share_of_link": 1}
    assert "times in s at 40 GB/s, measured by the run in" in of_run(one_way | both_ways)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    assert main(["plan", BENCHMARK, "--link-of", str(tmp_path)]) == 2
    assert "has neither a share_of_link" in capsys.readouterr().err


def test_what_graphs_of_a_refit_keep_counts_beside_every_way():
    for way in planned("policy.generation.backend=vllm").values():
        without = replace(way, engine=replace(way.engine, refit_graph_bytes=0))
        assert way.missing_bytes(40 * GIB) - without.missing_bytes(40 * GIB) == 28 * MIB


@pytest.mark.parametrize("where", ["gpu", "discard"])
@pytest.mark.parametrize("sizes", [SHARE, OWN_KV_CACHE, BUCKETS_NEED_MOST], ids=["share", "own_kv_cache", "buckets"])
def test_an_option_fits_where_the_run_accepts_it_and_training_has_room_beside_vllm(where, sizes):
    runs, recipe = {}, ["policy.generation.backend=vllm", f"++policy.residency.generation_weights={where}", *sizes]

    def plan_with(more):
        runs[tuple(more)] = plan_run(load(BENCHMARK, [*recipe, *more]).config, QWEN2_1_5B, algorithm="grpo")
        return runs[tuple(more)]

    policy = load(BENCHMARK, recipe).config["policy"]
    fitting = set()
    for one in plan_ways(policy, plan_with):
        run = runs[one.way.overrides]
        for gpu_bytes in (gib * GIB for gib in range(12, 60)):
            beside = engine_bytes_beside_policy(policy, run.engine, gpu_bytes) + run.engine.refit_graph_bytes + 2 * GIB
            left = gpu_bytes - one.state_bytes - beside
            has_room = max(one.training_bytes - one.state_bytes, one.activation_bytes) <= left
            assert one.fits(gpu_bytes, host(500)) == (has_room and is_accepted(run, gpu_bytes)), gpu_bytes // GIB
            if fastest_that_fits([one], gpu_bytes, host(500)):
                fitting.add(one.way.name)
                assert f"it leaves {show_gib(left)} GiB in training" in reason([one], gpu_bytes, host(500))
    assert fitting >= {"streamed", "CPU optimizer, 1"}


def test_where_nothing_fits_beside_an_awake_engine_sleep_is_a_remedy():
    discard = "policy.residency.generation_weights=discard"
    for where, is_remedy in (("gpu", True), ("discard", False)):
        ways = planned("policy.generation.backend=vllm", f"++policy.residency.generation_weights={where}")
        text = reason(list(ways.values()), 12 * GIB, host(500))
        assert text.startswith("No option fits a GPU of 12.00 GiB")
        assert (discard in text) is is_remedy


def test_an_engine_on_gpus_of_its_own_takes_nothing_of_training():
    apart = ["++policy.generation.colocated.enabled=false", "++policy.generation.colocated.resources.gpus_per_node=1"]
    ways = planned("policy.generation.backend=vllm", *apart, "cluster.gpus_per_node=2")
    assert {(one.engine, one.asleep_bytes) for one in ways.values()} == {(None, 0)}
