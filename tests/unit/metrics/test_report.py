import io

import pytest
from rich.console import Console

from nemo_offload_rl.metrics.report import LiveProgress, phase_table


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
