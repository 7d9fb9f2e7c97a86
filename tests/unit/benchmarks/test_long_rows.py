"""Tests the benchmark of long rows, on a tiny model without a GPU."""

import json
import subprocess
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import long_rows
import pytest
import torch
from long_row_cases import measure as measuring
from long_row_cases.ways import WAYS, Case

from nemo_offload_rl.algorithms.losses import NLLLoss

ROOT = Path(__file__).parents[3]
GPU_ONLY = {"peak_gib", "reserved_gib", "driver_peak_gib", "mfu", "kernels_s", "exposed_s", "logprob_peak_gib"}
OF_GRPO = {"logprob_s", "reference_s"}


def measured(case):
    return long_rows.row_of(case, partial(measuring.measure, case, case.config(has_gpus=False), num_steps=1))


@pytest.mark.parametrize(("way", "algorithm"), [("ours_attention_kept", "grpo"), ("modules", "sft")])
def test_a_row_has_every_column(way, algorithm):
    row = measured(Case("tiny", 64, way, algorithm))
    assert set(row) == {*long_rows.CASE, *long_rows.COLUMNS}
    absent = GPU_ONLY | {"why"} | (set() if algorithm == "grpo" else OF_GRPO)
    assert {name for name, value in row.items() if value is None} == absent
    assert (row["model"], row["tokens"], row["way"], row["fits"], row["steps"]) == ("tiny", 64, way, True, 1)
    assert row["step_s"] > 0
    assert row["host_gib"] > 0  # optimizer state is streamed


def test_a_way_that_runs_out_of_memory_is_a_row_that_says_so(monkeypatch):
    class TooLong(NLLLoss):
        def __call__(self, *_):
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")

    monkeypatch.setattr(measuring, "NLLLoss", TooLong)
    row = measured(Case("tiny", 64, "recompute"))
    assert set(row) == {*long_rows.CASE, *long_rows.COLUMNS}
    assert (row["fits"], row["why"], row["step_s"]) == (False, "OutOfMemoryError: CUDA out of memory.", None)


def test_the_next_way_runs_where_a_process_was_killed(monkeypatch, tmp_path, capsys):
    fitting = {"peak_gib": 8.0, "driver_peak_gib": 10.0, "planned_gib": 9.0, "step_s": 4.0, "kernels_s": 3.2}

    def run(command, **_):
        case = json.loads(command[command.index("--child") + 1])
        if case["way"] == "recompute":
            return subprocess.CompletedProcess(command, -9)
        row = long_rows.row_of(Case(**case), lambda: fitting | {"exposed_s": 0.1})
        Path(command[command.index("--output") + 1]).write_text(json.dumps(row))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setenv("NEMO_OFFLOAD_RL_COMMIT", "1234567")  # or git would be asked
    monkeypatch.setattr(long_rows.subprocess, "run", run)
    output = tmp_path / "rows.json"
    for tokens in ("64", "128"):
        arguments = ["--tokens", tokens, "--ways", "recompute", "ours", "--append", "--output", str(output)]
        monkeypatch.setattr("sys.argv", ["long_rows.py", *arguments])
        assert long_rows.main() == 0
    rows = {(row["tokens"], row["way"]): row for row in json.loads(output.read_text())["rows"]}
    assert {case: row["fits"] for case, row in rows.items()} == {
        (64, "recompute"): False, (64, "ours"): True, (128, "recompute"): False, (128, "ours"): True,
    }  # fmt: skip
    assert rows[64, "recompute"]["why"] == "its process ended with status -9"
    printed = capsys.readouterr().out
    assert "1.5b 128 ours sft: step / kernels 1.250, planned / driver 0.900, planned / allocated 1.125" in printed
    assert "exposed share 0.025" in printed


def test_a_way_counts_the_passes_that_it_makes():
    passes = {name: (way.layer_passes, way.attention_passes) for name, way in WAYS.items()}
    assert passes == {
        "ours_attention_kept": (2, 1), "ours": (2, 2), "segments2": (2.5, 2.5), "segments4": (2.75, 2.75),
        "recompute": (2, 2), "modules": (1, 1),
    }  # fmt: skip


@pytest.mark.parametrize("model", ["1.5b", "8b"])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_is_a_recipe_of_streamed_state(model, way):
    policy = Case(model, 131072, way).config(has_gpus=True)["policy"]
    assert policy["residency"]["table"]["train"]["optimizer_state"] == "streamed"
    assert policy["megatron_cfg"]["fine_grained_activation_offloading"] is bool(WAYS[way].modules)
    assert policy["megatron_cfg"]["optimizer"]["use_precision_aware_optimizer"] is True


def test_the_plan_is_near_the_peaks_that_were_measured():
    rows = [
        row for row in json.loads((ROOT / "docs" / "results" / "long_rows.json").read_text())["rows"] if row["fits"]
    ]
    assert len(rows) >= 9
    roomy = SimpleNamespace(hostname="roomy", available_bytes=1 << 40, cgroup_free_bytes=None, memlock_bytes=None)
    for row in rows:
        case = Case(row["model"], row["tokens"], row["way"], row["algorithm"])
        planned = measuring.planned_gib(case.algorithm, case.config(has_gpus=True), roomy)
        assert 0.985 <= planned / row["peak_gib"] <= 1.06, case
