import logging

import pytest

from nemo_offload_rl.metrics.report import log_peaks, memory_table

POLICY = "performance/memory/policy"
ROWS = [
    {"step": 1, f"{POLICY}/gpu_peak_train_gib": 14.0, f"{POLICY}/gpu_peak_logprobs_gib": 9.0},
    {"step": 2, f"{POLICY}/gpu_peak_train_gib": 11.0, f"{POLICY}/gpu_peak_logprobs_gib": 9.5},
]


def cells(table):
    return list(zip(*(column.cells for column in table.columns), strict=True))


def test_the_table_has_the_largest_of_all_steps_beside_what_was_planned():
    table = memory_table(ROWS, {"train": 12.5})
    assert cells(table) == [("GPU: training", "14.00", "12.50"), ("GPU: log-prob passes", "9.50", "")]


def test_without_gpus_it_has_host_memory_alone_and_no_peaks_are_logged(caplog):
    caplog.set_level(logging.INFO)
    log_peaks([{"step": 1, f"{POLICY}/host_rss_gib": 2.0}], {})
    assert caplog.records == []
    table = memory_table([{"step": 1, f"{POLICY}/host_rss_gib": 2.0}], {"train": 1.0})
    assert cells(table) == [("host: a process of the policy", "2.00")]
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
    log_peaks(ROWS, planned)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == (0 if said is None else 1)
    assert said is None or said in warnings[0]
    assert "14.00" in caplog.records[0].getMessage()  # the table, in any case
