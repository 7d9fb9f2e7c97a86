"""Tests what the worker logs about modules that offloaded nothing, and about a GPU that waited for copies."""

import re

import pytest

from nemo_offload_rl.activation_offload import report as reports
from nemo_offload_rl.activation_offload.report import ModuleReport, StepReport, suggested_fraction, why_no_effect
from nemo_offload_rl.memory.streams import Waits
from nemo_offload_rl.memory.units import MIB

REASONS = [
    ("attn_norm", None, "Transformer Engine fuses this norm into the linear layer after it"),
    ("moe_act", None, "no layer of this pipeline stage offloads it"),
    ("core_attn", ModuleReport(distinct_bytes=3 * MIB, refused_bytes=3 * MIB), "3 MiB did not fit into the host"),
    ("core_attn", ModuleReport(distinct_bytes=MIB, resident_bytes=MIB), "activation_offload_fraction"),
    ("core_attn", ModuleReport(small_bytes=MIB // 2), r"0\.5 MiB are .* below .*min_offloaded_tensor_size"),
    ("core_attn", ModuleReport(), "saved nothing"),
    ("core_attn", ModuleReport(moved_bytes=MIB), "moved 1 MiB to the host but freed none: .* offload attn_proj"),
    ("mlp_norm", ModuleReport(moved_bytes=MIB, duplicate_bytes=MIB), "keeps all of it on the GPU, or its backward"),
]


@pytest.mark.parametrize(("module", "report", "words"), REASONS)
def test_a_module_without_effect_has_a_reason(module, report, words):
    assert re.search(words, why_no_effect(module, report, [module], offloads_later=True) or "")


def test_a_module_of_which_only_the_first_micro_batch_left_has_no_effect_either():
    report = ModuleReport(distinct_bytes=4 * MIB, moved_bytes=MIB, freed_bytes=MIB, resident_bytes=3 * MIB)
    assert why_no_effect("core_attn", report, ["core_attn"], offloads_later=True) is None
    for refused_bytes in (0, MIB):  # more room would not change that
        report.refused_bytes = refused_bytes
        reason = why_no_effect("core_attn", report, ["core_attn"], offloads_later=False) or ""
        assert reason.startswith("all of its 4 MiB, except in the first micro-batch, stay on the GPU because of")


def test_a_module_with_one_has_none():
    report = ModuleReport(distinct_bytes=2, moved_bytes=1, freed_bytes=1, refused_bytes=1)
    assert why_no_effect("core_attn", report, ["core_attn"], offloads_later=True) is None
    # Its input was offloaded with core_attn, as that module's output; without attn_proj the memory would not be freed.
    assert why_no_effect("attn_proj", ModuleReport(duplicate_bytes=1), ["attn_proj"], offloads_later=False) is None


def test_the_table_has_a_line_for_each_module():
    report = StepReport({"core_attn": ModuleReport(moved_bytes=2 * MIB, freed_bytes=MIB)}, 1, 0, 0)
    head, line = reports.table(report).splitlines()
    assert head.split()[:3] == ["module", "moved", "freed"]
    assert line.split() == ["core_attn", "2.0", "1.0", "0.0", "0.0", "0.0"]
    assert report.total() == report.modules["core_attn"]


SUGGESTED = [
    (1.0, 0.182, 0.076, 0.6), (1.0, 0.190, 0.026, 0.85), (0.5, 1.0, 0.5, 0.25),  # of 0.58, as on an H200, and 0.86
    (0.55, 1.0, 0.01, 0.5), (1.0, 1.0, 0.0, 0.95),  # of 0.54, which is nearest to the present fraction
    (1.0, 1.0, 0.98, None), (0.05, 1.0, 0.1, None), (1.0, 0.01, 0.02, None), (1.0, 0.0, 0.0, None),
]  # fmt: skip


@pytest.mark.parametrize(("fraction", "link_s", "waited_s", "suggested"), SUGGESTED)
def test_the_fraction_is_what_moved_without_waits(fraction, link_s, waited_s, suggested):
    assert suggested_fraction(fraction, link_s, waited_s) == suggested


REMEDIES = r"; lower \S+_fraction, raise \S+_max_inflight_offloads, or check what else uses the link\.$"


@pytest.mark.parametrize(
    ("waits", "mib", "link_speed", "max_inflight", "words"),
    [
        (Waits(0.042, 0.5), 9600, 53e9, None, r"takes 190 ms at 53 GB/s, .*activation_offload_fraction 0\.80\.$"),
        (Waits(0.042, 1.5), 96, None, None, "42 ms of a .* step of 1,500 ms for copies of 96 MiB.*" + REMEDIES),
        (Waits(0.042, 0.5), 96, 53e9, None, "although an idle link copies 96 MiB in 1.9 ms at 53 GB/s" + REMEDIES),
        (Waits(0.001, 0.02), 96, 53e9, 1, "1.0 ms of a .* step of 20 ms for .*, although.*" + REMEDIES),
    ],
    ids=["too slow", "speed unknown", "the link is not it", "few in flight"],
)
def test_a_link_that_is_too_slow_is_said_with_a_fraction_that_fits(waits, mib, link_speed, max_inflight, words):
    said = reports.gpu_waited(waits, mib * MIB, link_speed=link_speed, fraction=1.0, max_inflight=max_inflight)
    assert re.search(words, said), said
