import io
import logging
import time
from contextlib import suppress

import pytest
from rich.console import Console

from nemo_offload_rl.metrics.moves import median_moves, moves_table
from nemo_offload_rl.metrics.phases import bf16_peak_tflops, mean_in_phase, utilization_metrics
from nemo_offload_rl.metrics.report import LiveProgress, log_peaks, memory_table, phase_table
from nemo_offload_rl.metrics.samples import JudgedAnswer, as_plain_text, best_and_worst, samples_markdown, samples_table
from nemo_offload_rl.metrics.timer import Timer


def shown(renderable, width=120) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(renderable)
    return console.file.getvalue()


def cells(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in text.splitlines() if line[0] == "│"]


def row_of(text: str, phase: str) -> list[str]:
    return next(row for row in cells(text) if row[0] == phase)


def times(**phases):
    return {f"timing/train/{phase}": seconds for phase, seconds in phases.items()}


ROWS = [
    {"step": 0, "validation/accuracy": 0.4, "timing/train/validation": 2.0},
    {"step": 1, **times(sampling=1.0, training=0.5, total_step_time=2.0)},
    {"step": 2, **times(sampling=2.0, training=0.5, refit=1.0, total_step_time=6.0)},
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
    assert row_of(without_totals, "b")[-1] == "75.0%"
    assert "outside" not in without_totals


def test_progress_is_one_line_a_step_where_there_is_no_terminal():
    console = Console(file=io.StringIO(), width=40)  # narrower than a line: a log must not wrap
    with LiveProgress("grpo", 20, console) as progress:
        progress.update(1, {"train/reward": 0.5, "validation/accuracy": 0.25, "performance/tokens_per_sec": 12345.6})
        took = times(sampling=1.0, total_step_time=1.5)
        progress.update(2, {"train/reward": 0.75, "train/kl_penalty": 0.00123, **took})
    assert console.file.getvalue().splitlines() == [
        "grpo 1/20  reward 0.500  accuracy 0.250  tokens/s 12,346",
        # The last measured accuracy is shown, and the last tokens/s.
        "grpo 2/20  reward 0.750  accuracy 0.250  KL 1.23e-03  tokens/s 12,346  1.50 s (sampling 1.00)",
    ]


@pytest.mark.parametrize("interrupted", [False, True])
def test_progress_on_a_terminal_shows_the_last_step_and_gives_the_cursor_back(interrupted):
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    with suppress(KeyboardInterrupt), LiveProgress("sft", 8, console) as progress:
        progress.update(7, {"train/loss": 1.25, "timing/train/training": 0.25})
        if interrupted:
            raise KeyboardInterrupt
    text = console.file.getvalue()
    assert "7/8" in text and "1.2500" in text and "training 0.25" in text
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


PEAKS = [
    ({"train": 14.5, "logprobs": 9.5}, None),
    ({}, None),
    ({"train": 12.5, "logprobs": 9.25, "refit": 1.0}, "training 14.00 GiB, 1.50 more than planned; log-prob"),
    ({"logprobs": 9.25}, ": log-prob passes 9.50 GiB, 0.25 more than planned;"),
]


@pytest.mark.parametrize(("planned", "said"), PEAKS)
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
    tflops = {"performance/tflops_per_gpu/training": 100.0, "performance/tflops_per_gpu/logprobs": 50.0}
    utilization = "performance/model_flop_utilization"
    metrics = utilization_metrics(flops, seconds, num_gpus=2, peak_tflops=1000.0)
    assert metrics == tflops | {f"{utilization}/training": 0.1, f"{utilization}/logprobs": 0.05}
    assert utilization_metrics(flops, seconds, num_gpus=2, peak_tflops=None) == tflops


def row(seconds, tflops, share=None):
    rates = {"tflops_per_gpu": tflops, "model_flop_utilization": share}
    named = {f"performance/{name}/training": value for name, value in rates.items()}
    return {"step": 1, **times(training=seconds, refit=1.0, total_step_time=seconds + 1.0), **named}


def test_the_phase_table_shows_what_gpus_reached_where_steps_count_by_their_seconds():
    rows = [row(1.0, 100.0, 0.1), row(3.0, 200.0, 0.2)]
    assert mean_in_phase(rows, "performance/tflops_per_gpu/", "training") == 175.0
    assert mean_in_phase(rows, "performance/tflops_per_gpu/", "refit") is None
    assert row_of(shown(phase_table(rows), 140), "training")[-2:] == ["175", "17.5%"]
    without_peak = shown(phase_table([row(1.0, 0.25)]), 140)
    assert "0.25" in without_peak and "of peak" not in without_peak


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


BOXED = JudgedAnswer("What is\n1|2?", r"It is \boxed{<2>} [bold]", "2", 0.5)


@pytest.mark.parametrize(
    ("rewards", "number", "chosen"),
    [
        ([0.0, 1.0, 0.5, 1.0, 0.0, 0.25], 4, [1, 3, 0, 4]), ([0.0, 1.0, 0.5, 1.0, 0.0, 0.25], 3, [1, 3, 4]),
        ([0.0, 1.0], 1, [1]), ([0.0, 1.0], 5, [1, 0]), ([0.0, 1.0], 0, []), ([], 2, []),
    ],
)  # fmt: skip
def test_half_are_the_best_and_half_the_worst(rewards, number, chosen):
    assert best_and_worst(rewards, number) == chosen


def test_the_tables_have_the_texts_as_they_are():
    text = as_plain_text(samples_table(7, [BOXED]))
    for part in ("Answers of the validation after step 7", "1|2?", r"It is \boxed{<2>} [bold]", "0.5"):
        assert part in text
    assert max(map(len, text.splitlines())) <= 160
    assert samples_markdown([BOXED]).splitlines() == [
        "| prompt | answer | known answer | reward |",
        "| --- | --- | --- | --- |",
        r"| What is<br>1\|2? | It is \\boxed{&lt;2&gt;} \[bold\] | 2 | 0.5 |",
    ]


def test_control_characters_of_an_answer_reach_neither_terminal_nor_log():
    answer = JudgedAnswer("p", "a\x1b[2Jb\x00\nc\td", "2", 1.0)
    for shown in (as_plain_text(samples_table(1, [answer])), samples_markdown([answer])):
        assert not {"\x1b", "\x00"} & set(shown)
        assert all(letter in shown for letter in "abcd")
    assert answer.cells[1].endswith("b\ufffd\nc\td")


def test_a_long_text_is_shortened_in_its_middle():
    answer = JudgedAnswer("p", "a" * 600 + "b" * 3000, "2", 1.0)
    shown = answer.cells[1]
    assert shown.startswith("a" * 500 + " [... 2,600 characters ...] ")
    assert shown.endswith("b" * 500)
    assert answer.cells[3] == "1"


def moved(phase, target, **quantities):
    return {f"residency/{phase}/{target}/{name}": value for name, value in quantities.items()}


def out_and_back(exposed_s, **back):
    """Returns a step's metrics in which optimizer state moved to the host for the refit and back for training."""
    out = {"gb": 6.24, "copy_s": 0.1135, "gb_per_s": 54.98, "share_of_link": 0.997, "hidden_s": 0.1135 - exposed_s}
    return {
        **moved("refit", "optimizer_state", exposed_s=exposed_s, **out),
        "residency/refit/enter_s": exposed_s, "residency/refit/gpu_free_before_gib": 100.0,
        **moved("generate", "params", exposed_s=0.05, gb=3.0, copy_s=0.05, gb_per_s=60.0, hidden_s=0.0),
        **moved("train", "grads", exposed_s=0.001),
        **moved("train", "optimizer_state", exposed_s=0.0, gb=6.24, copy_s=0.2, gb_per_s=31.2, **back),
        "residency/host_rss_gib": 20.0, "train/loss": 1.0,
    }  # fmt: skip


def test_medians_are_over_the_steps_that_moved_it():
    steps = [{"validation/accuracy": 0.4}, *(out_and_back(exposed_s) for exposed_s in (0.01, 0.03, 0.02))]
    steps.append({"residency/train/grads/exposed_s": 0.003, "residency/host_rss_gib": 21.0})
    steps.append({"residency/train/grads/exposed_s": None})  # its value was not finite
    rows = [{"step": step, **row} for step, row in enumerate(steps)]
    medians = median_moves(rows)
    names = [" ".join(name) for name in medians]
    assert names == ["refit optimizer_state", "generate params", "train grads", "train optimizer_state"]
    assert medians["refit", "optimizer_state"]["exposed_s"] == 0.02
    assert medians["train", "grads"] == {"exposed_s": 0.001}


def test_the_table_has_a_row_for_each_copy_in_the_order_of_a_step():
    rows = [{"step": 1, **moved("train", "params", gb=3.0, copy_s=0.1), **out_and_back(0.01)}]
    text = shown(moves_table(rows), 100)
    assert moves_table([{"step": 1, **moved("train", "grads", exposed_s=0.1), "residency/host_rss_gib": 2.0}]) is None
    without_link = [{"step": 1, **moved("generate", "params", gb=3.0, copy_s=0.1, gb_per_s=30.0, exposed_s=0.1)}]
    assert "of the link" in text and "of the link" not in shown(moves_table(without_link))
    assert cells(text) == [
        ["train", "params", "3.000", "0.1000", "", "", "", ""],
        ["train", "optimizer state", "6.240", "0.2000", "31.2", "", "0.0000", ""],
        ["refit", "optimizer state", "6.240", "0.1135", "55.0", "100%", "0.0100", "0.1035"],
        ["generate", "params", "3.000", "0.0500", "60.0", "", "0.0500", "0.0000"],
    ]


def test_the_table_fits_into_100_columns_with_a_large_model():
    large = {name: 100 * value for name, value in out_and_back(0.01, share_of_link=0.9).items()}
    row = {**large, **moved("logprob", "reference_weights", gb=141.0, copy_s=2.6)}
    text = shown(moves_table([row]), 100)
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 100
    assert "…" not in text
    assert len(cells(text)) == 4  # no row spans two lines
    assert cells(text)[-1][:4] == ["logprob", "reference weights", "141.000", "2.6000"]
