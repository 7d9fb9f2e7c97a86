"""Tests the figures that benchmarks/activation_offload.py computes from its measurements."""

import json

import pytest
from activation_cases import figures
from activation_cases.soak import settled_and_now
from activation_cases.table import FIELDS, ResultError, ResultFile, Setting, join, merged, share


def test_r_is_the_fall_of_the_peak_over_what_should_have_left():
    assert figures.recovered_share(1000, 802, 200.0) == pytest.approx(0.99)
    assert figures.recovered_share(1000, 1000, 0.0) is None
    assert figures.recovered_share(1000, 1010, 100.0) == pytest.approx(-0.1)


def test_overhead_is_of_medians():
    assert figures.overhead_percent([1.0, 1.0, 9.0], [1.003, 1.003, 0.1]) == pytest.approx(0.3)


def test_the_link_is_waited_for_only_where_copies_outlast_the_forward_pass():
    def bound(forward_s):
        return figures.link_bound_percent(100.0, 1000.0, forward_s, num_micro_batches=4, plain_step_s=1.0)

    assert bound(0.2) == 0
    assert bound(0.09) == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("is_moe", "micro_batch", "bound", "bar"),
    [
        (True, 1, 0.0, 3.0),
        (True, 1, 10.0, 11.0),
        (False, 4, 10.0, 0.3),
        (False, 1, 10.0, 11.0),
        (False, 1, 0.0, None),
        (False, 8, 0.0, None),
    ],
)
def test_bars_of_overhead(is_moe, micro_batch, bound, bar):
    found = figures.overhead_bar_percent(is_moe=is_moe, micro_batch=micro_batch, bound_percent=bound)
    assert found == (None if bar is None else pytest.approx(bar))


def test_the_forward_pass_has_a_bar_where_the_link_is_the_limit():
    def bar(is_moe, micro_batch, link_ms):
        return figures.forward_bar_ms(is_moe=is_moe, micro_batch=micro_batch, link_ms=link_ms, forward_ms=17.0)

    assert bar(False, 1, 20.0) == pytest.approx(22.0)
    assert [bar(False, 1, 16.0), bar(False, 4, 20.0), bar(True, 1, 20.0)] == [None] * 3


@pytest.mark.parametrize("promise", [0.8, 0.99, 1.0, 1.25])
@pytest.mark.parametrize("longest", [1, 31, 32, 33, 63, 64, 100, 127])
def test_the_search_ends_at_the_longest_length_that_fits(longest, promise):
    """Shorter lengths may report too high or too low a fill, by the factor `promise`."""
    fills: dict[int, float | None] = {}
    while (length := figures.next_length(fills, 32 * 1024, 1024)) is not None:
        assert length not in fills
        assert length % 1024 == 0
        fills[length] = min(1.0, length / (longest * 1024) / promise) if length <= longest * 1024 else None
    assert max(length for length, fill in fills.items() if fill is not None) == longest * 1024
    assert len(fills) <= 11


def test_the_search_is_short_where_memory_grows_with_the_length():
    fills: dict[int, float | None] = {}
    while (length := figures.next_length(fills, 32 * 1024, 1024)) is not None:
        fills[length] = length / (100.5 * 1024) if length <= 100 * 1024 else None
    assert list(fills) == [32 * 1024, 100 * 1024, 101 * 1024]


def test_the_search_ends_where_nothing_fits():
    fills: dict[int, float | None] = {}
    while (length := figures.next_length(fills, 4096, 1024)) is not None:
        fills[length] = None
    assert min(fills) == 1024


def test_rows_survive_from_run_to_run_and_are_replaced_by_newer_ones(tmp_path):
    path = tmp_path / "results" / "result.json"
    first = ResultFile(path)
    first.add("parity", "a", "offloaded", {"bit_equal": False})
    first.add("parity", "b", "offloaded", {"bit_equal": True})
    second = ResultFile(path)
    second.add("parity", "a", "offloaded", {"bit_equal": True})
    second.add("parity", "a", "late copies", {"bit_equal": True})
    rows = json.loads(path.read_text())["rows"]
    assert [(row["part"], row["way"], row["bit_equal"]) for row in rows] == [
        ("a", "offloaded", True),
        ("b", "offloaded", True),
        ("a", "late copies", True),
    ]
    assert all(set(FIELDS) <= set(row) for row in rows)
    assert [item.name for item in path.parent.iterdir()] == [path.name]


def test_sizes_of_micro_batches_are_rows_of_their_own():
    one, other = ({"table": "cost", "part": "a", "way": "plain", "micro_batch": size} for size in (1, 4))
    assert merged([one], other) == [one, other]
    assert merged([one, other], dict(one)) == [one, other]


def test_a_failed_row_goes_when_its_part_succeeds():
    failed, fine, other = (
        {"table": "cost", "part": part, "way": way, "micro_batch": None}
        for part, way in (("a", "failed"), ("a", "plain"), ("b", "failed"))
    )
    assert merged([failed, other], fine) == [other, fine]
    assert merged([fine], failed) == [fine, failed]


def written(path, date, rows):
    """Writes a result file of rows: their parts, ways, commits and errors."""
    rows = [
        {"table": "parity", "part": part, "way": way, "micro_batch": None, "machine": "H200", "commit": commit} | extra
        for part, way, commit, extra in rows
    ]
    path.write_text(json.dumps({"machine": "x", "commit": "x", "command": path.stem, "date": date, "rows": rows}))
    return path


def test_joined_rows_take_the_place_of_older_ones_but_failed_ones(tmp_path):
    result = written(tmp_path / "result.json", "2026-01-01", [("a", "late", "old", {}), ("b", "late", "old", {})])
    one = written(tmp_path / "one.json", "2026-01-03", [("a", "late", "new", {}), ("c", "late", "new", {})])
    failed = {"error": "OutOfMemoryError"}
    two = written(tmp_path / "two.json", "2026-01-02", [("b", "late", "new", failed), ("d", "failed", "new", failed)])
    assert join(result, [one, two]) == (2, 2)
    joined = json.loads(result.read_text())
    found = [(row["part"], row["commit"]) for row in joined["rows"]]
    assert found == [("a", "new"), ("b", "old"), ("c", "new")]
    assert joined["machine"] == "H200"
    assert joined["commit"] == "new; old: as each row says"
    assert (joined["date"], joined["command"]) == ("2026-01-03", "result")
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize(
    ("content", "why"), [(None, "No such file"), ("{", "cannot be read as a result file"), ("[]", "no rows and date")]
)
def test_what_is_no_result_is_named_and_nothing_is_joined(tmp_path, content, why):
    result = written(tmp_path / "result.json", "2026-01-01", [("a", "late", "old", {})])
    fine = written(tmp_path / "fine.json", "2026-01-03", [("a", "late", "new", {})])
    before, other = result.read_text(), tmp_path / "other.json"
    if content is not None:
        other.write_text(content)
    with pytest.raises(ResultError, match=rf"other\.json.*{why}"):
        join(result, [fine, other])
    assert result.read_text() == before


@pytest.mark.parametrize("of", [1, 3, 7, 12])
def test_shares_are_neighbours_and_make_the_whole(of):
    parts = list(range(10))
    shares = [share(parts, number, of) for number in range(1, of + 1)]
    assert [part for each in shares for part in each] == parts
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_what_a_file_has_is_known_with_and_without_late_copies(tmp_path):
    file = ResultFile(tmp_path / "result.json")
    file.add("parity", "a", "failed", {"error": "RuntimeError"})
    assert file.has("parity", "a", late=False)
    assert not file.has("parity", "a", late=True)
    assert not file.has("soak", "a", late=False)


def test_a_setting_may_have_its_own_number_of_steps_and_time(tmp_path):
    file = ResultFile(tmp_path / "result.json")
    assert Setting(file).num_steps(10) == 10
    assert not Setting(file).time_is_up()
    assert Setting(file, steps=3, deadline=0.0).num_steps(10) == 3
    assert Setting(file, deadline=0.0).time_is_up()


def test_growth_is_counted_from_the_settled_step_on():
    row = settled_and_now({"pinned_mib": 10.0}, {"pinned_mib": 12.5})
    assert row == {"pinned_mib_at_step_20": 10.0, "pinned_mib_at_end": 12.5, "pinned_mib_growth": 2.5}
    assert settled_and_now({}, {"pinned_mib": 12.5})["pinned_mib_growth"] is None
