"""Tests the fuzzer itself: it must find each kind of failure."""

from support.fuzz_run import run_cases


def test_each_fate_of_a_case_is_told_apart():
    report = run_cases("self", 1, 6)
    assert (report.accepted, report.refused) == (1, 1)
    assert [failure.split(":")[0] for failure in report.failures] == [f"case {case} of seed 1" for case in (2, 3, 4, 5)]
    for word, failure in zip(
        ("ZeroDivisionError", "the process ended (-9)", "MemoryError", "_TooSlow"), report.failures, strict=True
    ):
        assert word in failure
    assert 0.5 < report.slowest_s < 5
