import io

from rich.console import Console

from nemo_offload_rl.metrics.moves import median_moves, moves_table


def moved(phase, target, **quantities):
    return {f"residency/{phase}/{target}/{name}": value for name, value in quantities.items()}


def out_and_back(exposed_s, **back):
    """Returns a step's metrics in which optimizer state moved to the host for the refit and back for training."""
    out = moved("refit", "optimizer_state", gb=6.24, copy_s=0.1135, gb_per_s=54.98, share_of_link=0.997)
    return {
        **out,
        "residency/refit/optimizer_state/exposed_s": exposed_s,
        "residency/refit/optimizer_state/hidden_s": 0.1135 - exposed_s,
        "residency/refit/enter_s": exposed_s,
        "residency/refit/gpu_free_before_gib": 100.0,
        **moved("generate", "params", exposed_s=0.05, gb=3.0, copy_s=0.05, gb_per_s=60.0, hidden_s=0.0),
        **moved("train", "grads", exposed_s=0.001),
        **moved("train", "optimizer_state", exposed_s=0.0, gb=6.24, copy_s=0.2, gb_per_s=31.2, **back),
        "residency/host_rss_gib": 20.0,
        "train/loss": 1.0,
    }


def shown(table, width=100) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    return console.file.getvalue()


def cells(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in text.splitlines() if line[0] == "│"]


def test_medians_are_over_the_steps_that_moved_it():
    rows = [
        {"step": 0, "validation/accuracy": 0.4},
        {"step": 1, **out_and_back(0.01)},
        {"step": 2, **out_and_back(0.03)},
        {"step": 3, **out_and_back(0.02)},
        {"step": 4, "residency/train/grads/exposed_s": 0.003, "residency/host_rss_gib": 21.0},
        {"step": 5, "residency/train/grads/exposed_s": None},  # its value was not finite
    ]
    medians = median_moves(rows)
    assert list(medians) == [
        ("refit", "optimizer_state"),
        ("generate", "params"),
        ("train", "grads"),
        ("train", "optimizer_state"),
    ]
    assert medians["refit", "optimizer_state"]["exposed_s"] == 0.02
    assert medians["train", "grads"] == {"exposed_s": 0.001}


def test_the_table_has_a_row_for_each_copy_in_the_order_of_a_step():
    rows = [{"step": 1, **moved("train", "params", gb=3.0, copy_s=0.1), **out_and_back(0.01)}]
    text = shown(moves_table(rows))
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
    text = shown(moves_table([row]))
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 100
    assert "…" not in text
    assert len(cells(text)) == 4  # no row spans two lines
    assert cells(text)[-1][:4] == ["logprob", "reference weights", "141.000", "2.6000"]
