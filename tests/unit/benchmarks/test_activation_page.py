"""Tests the tables of the results page of benchmarks/activation_offload.py, from rows as the benchmark writes them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from activation_cases.page import END, PageError, read_rows, update_page, with_tables
from activation_cases.page_cells import MISSING
from activation_cases.page_tables import TABLES
from activation_cases.table import FIELDS

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "activation_offload.py"


def row(table, part, way, **fields):
    return (
        dict.fromkeys(FIELDS)
        | {"table": table, "part": part, "way": way, "machine": "1 x GPU", "commit": "c1"}
        | fields
    )


def page(*names):
    return (
        "# Results\n\n" + "".join(f"Of {name}.\n\n<!-- table: {name} -->\n{END}\n\n" for name in names) + "The end.\n"
    )


def table(name, rows):
    """Returns the cells of the Markdown table of that name, a dict per row, and the text around it."""
    lines = TABLES[name](rows).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("| ")]
    return [dict(zip(cells[0], values, strict=True)) for values in cells[1:]], [
        line for line in lines if line and not line.startswith("|")
    ]


def parity(part, way="offloaded", **fields):
    known = {"model": "tiny_moe", "modules": "expert_fc1, moe_act", "fraction": 1.0, "graphs": "none", "delay": False}
    known |= {"micro_batches": "changing packed", "phases": True, "recompute": "none", "parallel": "one GPU"}
    return row("parity", part, way, **(known | {"bit_equal": True, "steps": 10, "moved_mib": 12.25} | fields))


def test_parity_is_counted_with_what_failed_and_apart_from_plain_runs():
    rows = [
        parity("a"),
        parity("b", bit_equal=False, difference="rank 0, step 2: loss 1.0 for 1.5"),
        parity("d", graphs="moe_router", micro_batches="4", recompute="moe_act", moved_mib=0.0),
        row("parity", "c", "failed", error="RuntimeError: out of | memory\nTraceback"),
        parity("plain", modules="none"),
        parity("a", "late copies", parallel="dp2"),
        row("parity", "b", "late copies", error="RuntimeError: none was seen"),
        parity("refused/moe captured", bit_equal=None, refused="policy.x: may hold 'attn'; found 'moe': use others"),
        row("parity", "refused/gone", "failed", error="RuntimeError: validation accepts it"),
    ]
    shown, around = table("parity", rows)
    assert around == [
        "**2 of 4 combinations bit-equal** as copies are. Of plain runs taken twice, 1 of 1 are equal. "
        "**1 of 2 combinations bit-equal** with late copies. Combinations that validation refuses: 1.",
        "- **failed**: c, at c1: RuntimeError: out of \\| memory",
        "- **failed** with late copies: b, at c1: RuntimeError: none was seen",
        "- **failed**: refused/gone, at c1: RuntimeError: validation accepts it",
        "Machine: 1 x GPU. Commit: c1.",
        "- **not equal**: b, at c1: rank 0, step 2: loss 1.0 for 1.5",
    ]
    one, two = shown
    assert (one["models"], one["GPUs"], one["copies"]) == ("tiny_moe", "one GPU", "as they are")
    counts = ("combinations", "with CUDA graphs", "packed rows", "recomputation", "offloading anything", "equal")
    assert [one[name] for name in counts] == ["3", "1", "2", "1", "2", "2"]
    assert (two["GPUs"], two["copies"], two["combinations"], two["equal"]) == ("dp2", "late", "1", "1")


def cost(way, micro_batch=4, part="dense/attention", **fields):
    known = {
        "model": "dense",
        "modules": "qkv_linear, core_attn",
        "graphs": "none",
        "num_micro_batches": 2,
        "steps": 50,
    }
    return row("cost", part, way, micro_batch=micro_batch, **(known | fields))


PLAIN = cost("plain", modules="none", step_ms=500.0, tokens_per_s=65000, allocated_peak_mib=40000)
OFFLOADED = cost(
    "offloaded",
    step_ms=502.0,
    tokens_per_s=64741,
    allocated_peak_mib=35250,
    moved_mib=9600.0,
    distinct_mib=10240.0,
    kept_mib=640.0,
    refused_mib=0.0,
    late_mib=0.0,
    overhead_percent=0.4,
    overhead_low_95=0.1,
    overhead_high_95=0.75,
    bound_percent=0.0,
    bar_percent=0.3,
    link_ms=91.2,
    forward_ms=83.04,
    offloaded_forward_ms=92.36,
    forward_bar_ms=100.32,
    r=0.9896,
    r_bar=0.99,
    driver_saved_mib=4700,
)


def test_costs_stand_beside_the_plain_run_of_the_same_size():
    other = cost("plain", micro_batch=8, step_ms=1000.0)
    [shown], _ = table("cost", [other, PLAIN, OFFLOADED])
    assert shown == {
        "model": "dense",
        "modules": "`qkv_linear`, `core_attn`",
        "fraction": MISSING,
        "rows a micro-batch": "4",
        "plain, ms": "500.0",
        "offloaded, ms": "502.0",
        "overhead, % (95% interval)": "0.40 (0.10 to 0.75)",
        "bar, %": "0.3, **missed by 0.1**",
        "offloaded, MiB a micro-batch": "4,800",
        "link, ms a micro-batch": "91.2",
        "forward to the logits, ms": "83.0",
        "the same, offloaded": "92.4",
        "peak lower by, MiB": "4,750",
        "R": "0.99",
        "steps": "50",
    }


def test_what_a_row_does_not_have_is_a_dash():
    [shown], _ = table("cost", [cost("offloaded", step_ms=502.0)])
    assert shown["plain, ms"] == shown["bar, %"] == shown["overhead, % (95% interval)"] == MISSING
    assert shown["offloaded, MiB a micro-batch"] == shown["peak lower by, MiB"] == shown["R"] == MISSING


def test_graphs_are_a_table_of_their_own_failures_too():
    part = "dense/attention/graphs=attn"
    rows = [
        PLAIN,
        OFFLOADED,
        cost("eager offloaded", part=part, step_ms=510.0),
        cost("graphs offloaded", part=part, graphs="attn", step_ms=500.0, overhead_percent=-1.96, bar_percent=3.0),
        row("cost", "dense/attention/graphs=attn+mlp", "failed", error="RuntimeError: no graph was replayed"),
        row("cost", "moe/moe_act", "failed", error="OutOfMemoryError: out of memory"),
    ]
    [shown], around = table("graphs", rows)
    assert (shown["eager, ms"], shown["graphs, ms"], shown["bar, %"]) == ("510.0", "500.0", "3, met")
    assert [line for line in around if "failed" in line] == [
        "- **failed**: dense/attention/graphs=attn+mlp, at c1: RuntimeError: no graph was replayed"
    ]
    costs, around = table("cost", rows)
    assert len(costs) == 1
    assert [line for line in around if "failed" in line] == [
        "- **failed**: moe/moe_act, at c1: OutOfMemoryError: out of memory"
    ]


def test_the_longest_sequence_is_compared_with_the_plain_run_and_with_what_does_not_fit():
    def of(part, way, length, **fields):
        return row("longest_sequence", part, way, modules="none", seq_length=length, **fields)

    rows = [
        of("dense/off/tries", "65536 tokens", 65536, fits=False),
        of("dense/off/tries", "40960 tokens", 40960, fits=True),
        of("dense/off/tries", "41984 tokens", 41984, fits=False),
        of("dense/off", "longest", 40960),
        of("dense/offloaded", "longest", 61440) | {"modules": "core_attn"},
        of("dense/off/deterministic", "longest", 20480, deterministic=True),
        of("dense/off/deterministic/tries", "24576 tokens", 24576, fits=False, deterministic=True),
    ]
    shown, _ = table("longest_sequence", rows)
    assert [r["longest, tokens"] for r in shown] == ["40,960", "61,440", "20,480"]
    assert [r["of the plain run's"] for r in shown] == ["1.00", "1.50", "1.00"]  # the plain run with the same kernels
    assert [r["kernels"] for r in shown] == ["as they come", "as they come", "deterministic"]
    assert [r["does not fit"] for r in shown] == ["41,984", MISSING, "24,576"]


def test_commits_and_machines_are_columns_where_rows_differ():
    rows = [parity("a"), parity("b", commit="c2", machine="2 x GPU"), parity("c")]
    shown, around = table("parity", rows)
    assert [(r["commit"], r["machine"]) for r in shown] == [("c1", "1"), ("c2", "2")]
    assert around[-1] == "Machines: 1: 1 x GPU; 2: 2 x GPU."


@pytest.mark.parametrize("name", TABLES)
def test_no_rows_are_no_table(name):
    assert TABLES[name]([]) is None


def test_only_what_is_between_markers_changes():
    text = with_tables(page("graphs", "parity"), [parity("a")])
    assert text.startswith(
        f"# Results\n\nOf graphs.\n\n<!-- table: graphs -->\n\nNot measured.\n\n{END}\n\nOf parity.\n\n"
    )
    assert text.endswith(f"Machine: 1 x GPU. Commit: c1.\n\n{END}\n\nThe end.\n")
    assert with_tables(text, [parity("a")]) == text
    assert "**2 of 2 combinations bit-equal**" in with_tables(text, [parity("a"), parity("b")])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (page(), "<!-- table: parity --> 0 times"),
        (page("parity", "parity"), "<!-- table: parity --> 2 times"),
        (page("parity", "costs"), "a table costs; there are parity, cost"),
        (page("parity").replace(END, ""), "no <!-- end --> below <!-- table: parity -->"),
        (page("parity", "graphs").replace(END, "", 1), "no <!-- end --> below <!-- table: parity -->"),
    ],
)
def test_wrong_markers_are_named(text, message):
    with pytest.raises(PageError, match=message):
        with_tables(text, [parity("a")])


def test_the_page_beside_the_result_is_updated_or_left_alone(tmp_path):
    result = tmp_path / "result.json"
    with pytest.raises(PageError, match=r"result\.json is no file"):
        update_page(result)
    result.write_text(json.dumps({"rows": [parity("a")]}))
    with pytest.raises(PageError, match=r"result\.md is no file"):
        update_page(result)
    beside = tmp_path / "result.md"
    beside.write_text(page("parity"))
    assert update_page(result) == beside
    assert "**1 of 1 combinations bit-equal**" in beside.read_text()
    result.write_text(json.dumps({"rows": [parity("a"), {"table": "parity", "way": "offloaded"}]}))
    before = beside.read_text()
    with pytest.raises(PageError, match=r"row 2 of .* has no part"):
        update_page(result)
    assert beside.read_text() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["result.json", "result.md"]


def test_the_command_writes_a_page_and_says_what_is_wrong_with_one(tmp_path):
    result, beside = tmp_path / "result.json", tmp_path / "result.md"
    result.write_text(json.dumps({"rows": [PLAIN, OFFLOADED]}))
    beside.write_text(page())
    command = [sys.executable, str(SCRIPT), "--page", str(result)]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert refused.stderr.endswith(
        f"the page has <!-- table: cost --> 0 times; it must be there once, {END} below it\n"
    )
    beside.write_text(page("cost"))
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"{beside}\n"
    assert "| 0.3, **missed by 0.1** |" in beside.read_text()


def test_the_page_has_the_tables_of_its_results():
    page = Path(__file__).parents[3] / "docs/results/activation_offload.md"
    text = page.read_text(encoding="utf-8")
    assert with_tables(text, read_rows(page.with_suffix(".json"))) == text
