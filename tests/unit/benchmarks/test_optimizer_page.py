"""Tests the table of the results page of benchmarks/optimizer_offload.py, from rows as the benchmark writes them."""

import json
from pathlib import Path

from offload_ways.report import with_table

PAGE = Path(__file__).parents[3] / "docs/results/optimizer_offload.md"


def test_the_page_has_the_table_of_its_result():
    rows = json.loads(PAGE.with_suffix(".json").read_text(encoding="utf-8"))["rows"]
    # From three runs: the cases beside a stream were measured again.
    shown = [row for row in rows if row["commit"] == ("c56dd3f" if row["case"] == "beside_compute" else "048cc2f")]
    text = PAGE.read_text(encoding="utf-8")
    assert with_table(text, shown) == text
