"""Tests the table of the results page of benchmarks/optimizer_offload.py, from rows as the benchmark writes them."""

import json
from pathlib import Path

import pytest
from offload_ways.report import BEGIN, END, summary, verdicts, with_table

PAGE = Path(__file__).parents[3] / "docs/results/optimizer_offload.md"


def speed(way, share, released=1.0):
    bar = {"bar": 0.99, "bar_is": "at_least"} if way == "ours" else {}
    known = {"case": "state", "way": way, "direction": "d2h", "gb_per_s": 50 * share, "share_of_link": share}
    return known | {"released": released} | bar


ROWS = [
    {"case": "link", "way": "link", "direction": "d2h", "gb_per_s": 50.0, "share_of_link": 1.0},
    speed("ours", 0.98),
    speed("slow", 0.5),
    speed("leaks", 0.97, released=0.9),
    {"case": "soak", "way": "ours", "metric": "growth, bytes", "value": 0.0, "bar": 0, "bar_is": "at_most"},
    {"case": "state", "way": "absent", "not_run": "ImportError: none"},
]


def test_each_case_stands_beside_the_fastest_way_that_releases_and_missed_bars_are_named():
    assert summary(ROWS).splitlines()[2:] == [
        "| state | d2h | 49.00 | 98.00% | 99.00% | `slow` | 50.00% |",
        "",
        "1 of the 2 bars of the result's rows are met:",
        "",
        "- missed: state, ours, d2h, share of the link: 0.9800 (at least 0.99)",
        "- not run: state, absent",
    ]
    assert verdicts(ROWS) == [
        "MISSED: state, ours, d2h, share of the link: 0.9800 (at least 0.99)",
        "met: soak, ours, growth, bytes: 0.0000 (at most 0)",
        "state, d2h, ours is 1.960 times as fast as slow, the fastest other way that really releases",
    ]


def test_only_the_table_changes_and_a_page_without_its_place_is_refused():
    text = with_table(f"Before.\n\n{BEGIN}\nold\n{END}\n\nAfter.\n", ROWS)
    assert text == f"Before.\n\n{BEGIN}\n\n{summary(ROWS)}\n\n{END}\n\nAfter.\n"
    with pytest.raises(ValueError, match="no <!-- table: speed --> with <!-- end --> below it"):
        with_table(f"Before.\n\n{END}\n{BEGIN}\n", ROWS)


def test_the_page_has_the_table_of_its_result():
    rows = json.loads(PAGE.with_suffix(".json").read_text(encoding="utf-8"))["rows"]
    # From three runs: the cases beside a stream were measured again.
    shown = [row for row in rows if row["commit"] == ("c56dd3f" if row["case"] == "beside_compute" else "048cc2f")]
    text = PAGE.read_text(encoding="utf-8")
    assert with_table(text, shown) == text
