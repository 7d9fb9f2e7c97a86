import io

from rich.console import Console

from nemo_offload_rl.metrics.phases import bf16_peak_tflops, mean_in_phase, utilization_metrics
from nemo_offload_rl.metrics.report import phase_table

PEAKS = {
    "NVIDIA H100 80GB HBM3": 989.0, "NVIDIA H200": 989.0, "NVIDIA H100 PCIe": 756.0, "NVIDIA H100 NVL": 835.0,
    "NVIDIA H200 NVL": 835.0, "NVIDIA A100-SXM4-80GB": 312.0, "NVIDIA H100 80GB HBM3 MIG 1g.10gb": None,
    "NVIDIA GeForce RTX 9999": None, "cpu": None,
}  # fmt: skip


def test_peaks_are_known_by_name_or_not_at_all():
    assert {name: bf16_peak_tflops([name, name]) for name in PEAKS} == PEAKS
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
