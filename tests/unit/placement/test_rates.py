"""Tests the rates of a machine: measured on a CPU, kept, read, and interpolated."""

import dataclasses
import errno
import io
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from nemo_offload_rl.cli import main
from nemo_offload_rl.config import load
from nemo_offload_rl.hf_config import hf_config
from nemo_offload_rl.placement import calibrate as calibrating
from nemo_offload_rl.placement import machine
from nemo_offload_rl.placement.calibrate import Workload, calibrate
from nemo_offload_rl.placement.doctor import rates_table, run_calibration
from nemo_offload_rl.placement.rates import H200_RATES, Curve, Rates, keep_rates, rates_of, rates_path, read_rates
from nemo_offload_rl.plan import resolve
from nemo_offload_rl.plan.decisions import Machine
from nemo_offload_rl.plan.fit import Fit
from nemo_offload_rl.run.preflight import machine_here
from tests.unit.config.conftest import CONFIGS

RECIPE = CONFIGS.parents[1] / "benchmarks" / "recipes" / "grpo_1_5B_random.yaml"
TINY = Workload(
    products=((16, 32, 32), (32, 64, 64)), sequences=(16, 32), tokens=64, heads=((2, 16),), block_bytes=1 << 16,
    num_operations=20, cpu_params=1 << 12, min_s=0.005,
)  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_what_is_measured_is_kept_for_this_kind_of_gpu_and_machine():
    rates = calibrate(torch.device("cpu"), TINY)
    assert [size for size, _ in rates.matmul.points] == [2 * 16 * 32 * 32, 2 * 32 * 64 * 64]
    [attention] = rates.attention
    assert [length for length, _ in attention.forward.points] == [16, 32]
    assert Rates.from_fields(json.loads(json.dumps(rates.as_fields()))) == rates
    assert rates_of(["NVIDIA H100 80GB HBM3"]) == H200_RATES
    path = keep_rates(rates, "NVIDIA H200")
    assert read_rates(path) == rates_of(["NVIDIA H100 80GB HBM3", "NVIDIA H200"]) == rates
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    faster = dataclasses.replace(rates, memory_bytes_per_s=1e12)
    assert keep_rates(faster, "NVIDIA H200") == path
    assert rates_of(["NVIDIA H200"]) == faster
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(rates_table("NVIDIA H200", faster))
    assert "1.00" in console.export_text()


def test_a_rate_between_two_sizes_and_outside():
    curve = Curve(((1e3, 100.0), (1e5, 300.0)))
    assert [curve.at(size) for size in (1, 1e3, 1e4, 1e5, 1e9)] == pytest.approx([100, 100, 200, 300, 300])
    assert H200_RATES.attention_of(256) == H200_RATES.attention_of(128)
    assert H200_RATES.attention_of(64).head_dim == 64


@pytest.mark.parametrize(
    "change",
    [
        {"launch_s": "fast"}, {"launch_s": 0}, {"launch_s": 10**400}, {"memory_bytes_per_s": float("inf")},
        {"matmul": {"points": [[2, 1], [1, 1]]}}, {"matmul": {"points": []}}, {"attention": [{"head_dim": 64}]},
        b"", b"[]", b"{}", b"\xff", b"[" * 100_000,
    ],
)  # fmt: skip
def test_a_file_with_other_values_or_damage_is_refused(change):
    path = rates_path("NVIDIA H200")
    path.parent.mkdir(parents=True)
    path.write_bytes(change if isinstance(change, bytes) else json.dumps(H200_RATES.as_fields() | change).encode())
    with pytest.raises(ValueError, match=f"{path}.*--calibrate"):
        read_rates(path)
    assert rates_of(["NVIDIA H200"]) == H200_RATES  # no run stops for a kept file


def test_ranks_of_a_host_share_the_measured_speed_of_its_cpu():
    measured = dataclasses.replace(H200_RATES, source="measured", cpu_params_per_s=8e9)
    assert measured.of_a_rank(4) == dataclasses.replace(measured, cpu_params_per_s=2e9)
    assert H200_RATES.of_a_rank(4) == H200_RATES  # those of a rank
    validated = load(RECIPE, ["policy.activation_memory=auto", "cluster.gpus_per_node=4"])
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resolve, "cheapest_fit", lambda _, planner: seen.append(planner.rates) or Fit((), 1.0, 0, 0, 1))
        resolve.resolve(
            validated.config, Machine(has_gpus=True, gpu_bytes=80 << 30, hosts=(), rates=measured),
            hf_config(validated.config["policy"]).to_dict(), algorithm=validated.algorithm,
        )  # fmt: skip
    assert [rates.cpu_params_per_s for rates in seen] == [2e9]


def test_a_cache_folder_that_cannot_be_used_stops_only_the_measurement(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    def homeless():
        raise RuntimeError("Could not determine home directory.")

    with monkeypatch.context() as patch:  # root may look into every folder
        patch.setattr(Path, "stat", refuse)
        patch.setattr(os, "stat", refuse)
        assert machine.rates_here() == rates_of(["NVIDIA H200"]) == H200_RATES
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    for not_absolute in ("", "cache"):
        monkeypatch.setenv("XDG_CACHE_HOME", not_absolute)
        assert keep_rates(H200_RATES, "NVIDIA H200").is_relative_to(tmp_path / ".cache")
    monkeypatch.setattr(Path, "home", homeless)
    assert machine.rates_here() == H200_RATES
    monkeypatch.setattr(calibrating, "calibrate_here", lambda: (H200_RATES, "NVIDIA H200"))
    console = Console(width=160, file=io.StringIO())
    with pytest.raises(ValueError, match="XDG_CACHE_HOME"):
        run_calibration(as_json=True, console=console)
    assert Rates.from_fields(json.loads(console.file.getvalue())) == H200_RATES  # half a minute's work is not lost


SEARCH = ("plan", str(RECIPE), "--fit", "--gpu-memory", "40", "--json")


def seconds_of(capsys, *arguments):
    """Returns the seconds of a search, and where the rates are from."""
    assert main([*SEARCH, *arguments]) == 0
    out, err = capsys.readouterr()
    return json.loads(out)["seconds"], err


def test_the_plan_takes_the_rates_that_were_measured(capsys, monkeypatch, tmp_path):
    slow = dataclasses.replace(H200_RATES, source="measured", matmul=Curve(((1, 1e14),)), launch_s=1e-5)
    gpus = [SimpleNamespace(name="NVIDIA H200")]
    monkeypatch.setattr(machine, "gpu_facts", lambda: gpus)
    elsewhere = seconds_of(capsys, "--host-memory", "500")
    assumed, source = seconds_of(capsys)
    assert H200_RATES.source in source
    kept = keep_rates(slow, "NVIDIA H200")
    measured, source = seconds_of(capsys)
    assert "are measured\n" in source
    assert measured > 2 * assumed
    assert machine_here().rates == slow
    assert seconds_of(capsys, "--host-memory", "500") == elsewhere  # for another machine
    gpus.clear()
    assert seconds_of(capsys)[0] == assumed
    assert seconds_of(capsys, "--calibration", str(kept))[0] == measured
    assert main([*SEARCH, "--calibration", str(tmp_path / "none.json")]) == 2
    assert "none.json" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="measures the GPU")
def test_without_a_gpu_the_doctor_says_that_it_needs_one(capsys):
    assert main(["doctor", "--calibrate"]) == 2
    assert "torch can use none" in capsys.readouterr().err
