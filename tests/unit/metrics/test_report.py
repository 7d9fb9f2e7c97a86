import io
import logging
import time
from contextlib import suppress

import pytest
from rich.console import Console

from nemo_offload_rl.metrics.phases import bf16_peak_tflops, mean_in_phase, utilization_metrics
from nemo_offload_rl.metrics.report import LiveProgress, log_peaks, memory_table, phase_table
from nemo_offload_rl.metrics.timer import Timer


def shown(renderable) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(renderable)
    return console.file.getvalue()


def row_of(table_text: str, phase: str) -> list[str]:
    line = next(line for line in table_text.splitlines() if phase in line)
    return [cell.strip() for cell in line.strip("│┃ ").split("│")]


ROWS = [
    {"step": 0, "validation/accuracy": 0.4, "timing/train/validation": 2.0},
    {"step": 1, "timing/train/sampling": 1.0, "timing/train/training": 0.5, "timing/train/total_step_time": 2.0},
    {"step": 2, "timing/train/sampling": 2.0, "timing/train/training": 0.5, "timing/train/refit": 1.0}
    | {"timing/train/total_step_time": 6.0},
]


def test_phase_table_sums_calls_and_shares_of_the_whole_time():
    text = shown(phase_table(ROWS))
    for row in (
        ["sampling", "2", "3.00", "1.500", "30.0%"],
        ["training", "2", "1.00", "0.500", "10.0%"],
        ["refit", "1", "1.00", "1.000", "10.0%"],
        ["outside the phases", "2", "3.00", "1.500", "30.0%"],
        ["validation", "1", "2.00", "2.000", "20.0%"],
        ["whole run", "", "10.00", "", "100.0%"],
    ):
        assert row_of(text, row[0]) == row
    without_totals = shown(phase_table([{"step": 1, "timing/train/a": 1.0, "timing/train/b": 3.0}]))
    assert row_of(without_totals, "b ")[-1] == "75.0%"
    assert "outside" not in without_totals


def test_progress_is_one_line_a_step_where_there_is_no_terminal():
    console = Console(file=io.StringIO(), width=40)  # narrower than a line: a log must not wrap
    with LiveProgress("grpo", 20, console) as progress:
        progress.update(1, {"train/reward": 0.5, "validation/accuracy": 0.25, "performance/tokens_per_sec": 12345.6})
        progress.update(
            2,
            {"train/reward": 0.75, "train/kl_penalty": 0.00123, "timing/train/sampling": 1.0,
             "timing/train/total_step_time": 1.5},
        )  # fmt: skip
    lines = console.file.getvalue().splitlines()
    assert lines[0] == "grpo 1/20  reward 0.500  accuracy 0.250  tokens/s 12,346"
    # The last measured accuracy is shown, and the last tokens/s.
    assert lines[1] == ("grpo 2/20  reward 0.750  accuracy 0.250  KL 1.23e-03  tokens/s 12,346  1.50 s (sampling 1.00)")
    assert len(lines) == 2


@pytest.mark.parametrize("interrupted", [False, True])
def test_progress_on_a_terminal_shows_the_last_step_and_gives_the_cursor_back(interrupted):
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    try:
        with LiveProgress("sft", 8, console) as progress:
            progress.update(7, {"train/loss": 1.25, "timing/train/training": 0.25})
            if interrupted:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert interrupted
    text = console.file.getvalue()
    assert "7/8" in text
    assert "1.2500" in text
    assert "training 0.25" in text
    assert text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l")  # show cursor comes after hide cursor


POLICY = "performance/memory/policy"
PEAKS_OF_STEPS = [
    {"step": 1, f"{POLICY}/gpu_peak_train_gib": 14.0, f"{POLICY}/gpu_peak_logprobs_gib": 9.0},
    {"step": 2, f"{POLICY}/gpu_peak_train_gib": 11.0, f"{POLICY}/gpu_peak_logprobs_gib": 9.5},
]


def cells_of(table):
    return list(zip(*(column.cells for column in table.columns), strict=True))


def test_the_table_has_the_largest_of_all_steps_beside_what_was_planned():
    table = memory_table(PEAKS_OF_STEPS, {"train": 12.5})
    assert cells_of(table) == [("GPU: training", "14.00", "12.50"), ("GPU: log-prob passes", "9.50", "")]


def test_without_gpus_it_has_host_memory_alone_and_no_peaks_are_logged(caplog):
    caplog.set_level(logging.INFO)
    log_peaks([{"step": 1, f"{POLICY}/host_rss_gib": 2.0}], {})
    assert caplog.records == []
    table = memory_table([{"step": 1, f"{POLICY}/host_rss_gib": 2.0}], {"train": 1.0})
    assert cells_of(table) == [("host: a process of the policy", "2.00")]
    assert memory_table([{"step": 1}], {}) is None


@pytest.mark.parametrize(
    ("planned", "said"),
    [
        ({"train": 14.5, "logprobs": 9.5}, None),
        ({}, None),
        ({"train": 12.5, "logprobs": 9.25, "refit": 1.0}, "training 14.00 GiB, 1.50 more than planned; log-prob"),
        ({"logprobs": 9.25}, ": log-prob passes 9.50 GiB, 0.25 more than planned;"),
    ],
)
def test_one_warning_says_by_how_much_peaks_are_above_the_plan(planned, said, caplog):
    caplog.set_level(logging.INFO)
    log_peaks(PEAKS_OF_STEPS, planned)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == (0 if said is None else 1)
    assert said is None or said in warnings[0]
    assert "14.00" in caplog.records[0].getMessage()  # the table, in any case


BF16_PEAKS = {
    "NVIDIA H100 80GB HBM3": 989.0, "NVIDIA H200": 989.0, "NVIDIA H100 PCIe": 756.0, "NVIDIA H100 NVL": 835.0,
    "NVIDIA H200 NVL": 835.0, "NVIDIA A100-SXM4-80GB": 312.0, "NVIDIA H100 80GB HBM3 MIG 1g.10gb": None,
    "NVIDIA GeForce RTX 9999": None, "cpu": None,
}  # fmt: skip


def test_peaks_are_known_by_name_or_not_at_all():
    assert {name: bf16_peak_tflops([name, name]) for name in BF16_PEAKS} == BF16_PEAKS
    assert bf16_peak_tflops(["NVIDIA H200", "NVIDIA A100-SXM4-80GB"]) is None


def test_a_phase_has_tflops_and_a_share_only_of_a_known_peak():
    flops, seconds = {"training": 400e12, "logprobs": 50e12}, {"training": 2.0, "logprobs": 0.5, "refit": 1.0}
    metrics = utilization_metrics(flops, seconds, num_gpus=2, peak_tflops=1000.0)
    assert metrics == {
        "performance/tflops_per_gpu/training": 100.0,
        "performance/tflops_per_gpu/logprobs": 50.0,
        "performance/model_flop_utilization/training": 0.1,
        "performance/model_flop_utilization/logprobs": 0.05,
    }
    without_peak = utilization_metrics(flops, seconds, num_gpus=2, peak_tflops=None)
    assert list(without_peak) == ["performance/tflops_per_gpu/training", "performance/tflops_per_gpu/logprobs"]


def row(seconds, tflops, share=None):
    rates = {"tflops_per_gpu": tflops, "model_flop_utilization": share}
    times = {"training": seconds, "refit": 1.0, "total_step_time": seconds + 1.0}
    named = {f"performance/{name}/training": value for name, value in rates.items()}
    return {"step": 1} | {f"timing/train/{phase}": value for phase, value in times.items()} | named


def test_the_phase_table_shows_what_gpus_reached_where_steps_count_by_their_seconds():
    rows = [row(1.0, 100.0, 0.1), row(3.0, 200.0, 0.2)]
    assert mean_in_phase(rows, "performance/tflops_per_gpu/", "training") == 175.0
    assert mean_in_phase(rows, "performance/tflops_per_gpu/", "refit") is None
    assert ["175", "17.5%"] in [line[-2:] for line in table_lines(phase_table(rows))]
    without_peak = table_lines(phase_table([row(1.0, 0.25)]))
    assert any("0.25" in line for line in without_peak) and "of peak" not in str(without_peak)


def table_lines(table):
    console = Console(file=io.StringIO(), width=140)
    console.print(table)
    return [[cell.strip() for cell in line.strip("│┃ ").split("│")] for line in console.file.getvalue().splitlines()]


def test_a_phase_entered_twice_is_summed_also_if_it_raises_until_the_timer_is_reset(monkeypatch):
    moments = iter((0.0, 2.0, 2.0, 3.0, 10.0, 14.0))
    monkeypatch.setattr(time, "perf_counter", lambda: next(moments))
    timer = Timer()
    for phase in ("generation", "training", "generation"):
        with suppress(KeyError), timer.phase(phase):
            raise KeyError
    before = timer.seconds()
    assert list(before.items()) == [("generation", 6.0), ("training", 1.0)]
    timer.reset()
    assert (timer.seconds(), list(before)) == ({}, ["generation", "training"])
