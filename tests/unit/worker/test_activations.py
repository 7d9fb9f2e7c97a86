"""What the worker says of modules that did nothing."""

import re

import pytest

from nemo_offload_rl.offload.activation_report import ModuleReport, StepReport
from nemo_offload_rl.plan.units import MIB
from nemo_offload_rl.worker.activations import table, why_no_effect


@pytest.mark.parametrize(
    ("module", "report", "words"),
    [
        ("attn_norm", None, "Transformer Engine computes this norm inside the linear behind it"),
        ("moe_act", None, "no layer of this pipeline stage offloads it"),
        ("core_attn", ModuleReport(distinct_bytes=3 * MIB, refused_bytes=3 * MIB), "3 MiB did not fit the host memory"),
        ("core_attn", ModuleReport(distinct_bytes=MIB, kept_bytes=MIB), "activation_offload_fraction"),
        (
            "core_attn",
            ModuleReport(small_bytes=MIB // 2),
            r"0\.5 MiB are .* below .*min_offloaded_tensor_size",
        ),
        ("core_attn", ModuleReport(), "saved nothing"),
    ],
)
def test_a_module_without_effect_has_a_reason(module, report, words):
    reason = why_no_effect(module, report)
    assert reason is not None
    assert re.search(words, reason)


def test_a_module_with_one_has_none():
    assert why_no_effect("core_attn", ModuleReport(distinct_bytes=2, moved_bytes=1, refused_bytes=1)) is None
    # Its input left with core_attn, as that module's output; without it here the memory would not come free.
    assert why_no_effect("attn_proj", ModuleReport(duplicate_bytes=1)) is None


def test_the_table_has_a_line_for_each_module():
    report = StepReport({"core_attn": ModuleReport(moved_bytes=2 * MIB, freed_bytes=MIB)}, 1, 0, 0)
    head, line = table(report).splitlines()
    assert head.split()[:3] == ["module", "moved", "freed"]
    assert line.split() == ["core_attn", "2.0", "1.0", "0.0", "0.0", "0.0"]
    assert report.total() == report.modules["core_attn"]
