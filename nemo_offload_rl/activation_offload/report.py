"""Counts the bytes that activation offloading moved in a step, by module, and suggests changes to the recipe."""

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field

from nemo_offload_rl.memory.streams import Waits
from nemo_offload_rl.memory.units import MIB

_FRACTION_STEP = 0.05


@dataclass
class ModuleReport:
    """Counts bytes of one module in one step on one rank."""

    distinct_bytes: int = 0
    """In storages that were large enough, each counted once for a micro-batch."""
    moved_bytes: int = 0
    """Of these, copied to the host."""
    prefetched_bytes: int = 0
    """Copied back ahead of need."""
    late_bytes: int = 0
    """Copied back only when they were needed: the backward pass of their own group had begun."""
    freed_bytes: int = 0
    """Freed on the GPU between the copy to the host and the copy back; other references keep the memory of the rest."""
    duplicate_bytes: int = 0
    """In storages that another module had saved before this one; not copied again."""
    resident_bytes: int = 0
    """Left on the GPU by choice: the module's last group, by the fraction, or by the pipeline rank's share."""
    refused_bytes: int = 0
    """Left on the GPU because the host memory was full."""
    small_bytes: int = 0
    """In storages below the minimum size."""

    def count_prefetch(self, nbytes: int, *, is_late: bool) -> None:
        """Count a storage of `nbytes` whose copy to the GPU was requested."""
        if is_late:
            self.late_bytes += nbytes
        else:
            self.prefetched_bytes += nbytes

    def scaled(self, times: int, by: int) -> "ModuleReport":
        """Returns the report scaled by `times` / `by`."""
        return ModuleReport(**{name: value * times // by for name, value in asdict(self).items()})

    def __add__(self, other: "ModuleReport") -> "ModuleReport":
        return ModuleReport(**{name: value + getattr(other, name) for name, value in asdict(self).items()})


@dataclass(frozen=True)
class StepReport:
    """Reports what activation offloading moved in one training step on one rank, module by module."""

    modules: Mapping[str, ModuleReport]
    num_micro_batches: int
    """Forward passes through model chunks that took part."""
    host_bytes: int
    """Host memory for activations, page-locked once."""
    host_peak_bytes: int
    """The most host memory that was in use at once."""
    captured_host_bytes: int = 0
    """The host memory that CUDA graphs keep until they are deleted."""

    def total(self) -> ModuleReport:
        """Returns the sums over all modules."""
        return sum(self.modules.values(), ModuleReport())


@dataclass
class Tally:
    """Collects the byte counts of a step's report."""

    num_chunks: int = 0
    modules: dict[str, ModuleReport] = field(default_factory=dict)

    def of(self, module: str) -> ModuleReport:
        """Return the report of one module."""
        if module not in self.modules:  # called for each group: setdefault would make a report each time
            self.modules[module] = ModuleReport()
        return self.modules[module]

    def add(self, modules: Mapping[str, ModuleReport]) -> None:
        """Add the counts of other reports."""
        for name, report in modules.items():
            self.modules[name] = self.of(name) + report


def why_no_effect(
    module: str, report: ModuleReport | None, modules: Collection[str], *, offloads_later: bool
) -> str | None:
    """Explains why all activations of a module stay on the GPU; None if some are offloaded, perhaps by another module.

    Args:
        module: its name.
        report: the module's counts of the first step; None if it has none.
        modules: all that the recipe offloads.
        offloads_later: whether later passes offload some of it; the first pass does not know the last layer.
    """
    if report is None:
        if module.endswith("_norm"):
            return (
                "Transformer Engine fuses this norm into the linear layer after it, so the norm saves nothing of "
                "its own"
            )
        return "no layer of this pipeline stage offloads it"
    if report.moved_bytes and not report.freed_bytes:
        return (
            f"it moved {report.moved_bytes / MIB:.0f} MiB to the host but freed none: another reference keeps all of "
            f"it on the GPU{_hint(module, modules)}, or its backward pass starts before its memory can be freed"
        )
    if (report.moved_bytes and offloads_later) or (report.duplicate_bytes and not report.moved_bytes):
        return None
    if report.refused_bytes and not report.moved_bytes:
        return (
            f"{report.refused_bytes / MIB:.0f} MiB did not fit into the host memory; raise "
            "policy.activation_offload.host_memory_limit_gib"
        )
    if report.resident_bytes or report.moved_bytes:
        first = ", except in the first micro-batch," if report.moved_bytes else ""
        return (
            f"all of its {report.distinct_bytes / MIB:.0f} MiB{first} stay on the GPU because of "
            "policy.megatron_cfg.activation_offload_fraction or delta_offload_bytes_across_pp_ranks, or because "
            "they belong to the last layer"
        )
    if report.small_bytes:
        return (
            f"all of its {report.small_bytes / MIB:.1f} MiB are in storages below "
            "policy.megatron_cfg.min_offloaded_tensor_size elements"
        )
    return "it saved nothing for the backward pass"


def table(report: StepReport) -> str:
    """Formats what each module moved as a table in MiB, one line for each module."""
    lines = [f"{'module':16s} {'moved':>10s} {'freed':>10s} {'duplicate':>10s} {'kept':>10s} {'no room':>10s}"]
    for name, m in report.modules.items():
        values = (m.moved_bytes, m.freed_bytes, m.duplicate_bytes, m.resident_bytes, m.refused_bytes)
        lines.append(f"{name:16s} " + " ".join(f"{value / MIB:10.1f}" for value in values))
    return "\n".join(lines)


def stays_alive(module: str, report: ModuleReport, modules: Collection[str]) -> str:
    """Formats a warning that not all bytes that a module moved were freed."""
    return (
        f"of the {report.moved_bytes / MIB:.0f} MiB that {module} moved in the first step, only "
        f"{report.freed_bytes / MIB:.0f} MiB were freed on the GPU; other references keep the rest"
        f"{_hint(module, modules)}."
    )


def _hint(module: str, modules: Collection[str]) -> str:
    if module != "core_attn" or "attn_proj" in modules or "layer_input" in modules:  # which recomputes attn_proj
        return ""
    return " (the attention's output is attn_proj's input: offload attn_proj as well)"


def suggested_fraction(fraction: float, link_s: float, waited_s: float) -> float | None:
    """Returns the `activation_offload_fraction` that the link would keep up with.

    While nothing waited, the link moved `link_s - waited_s` seconds' worth of bytes. The nearest multiple of 0.05 to
    that is low enough: a GPU at its power limit makes up for a part of each wait, 24 of 76 ms on an H200.

    Args:
        fraction: the fraction that was moved.
        link_s: seconds that the link alone takes to move it.
        waited_s: seconds of that for which the GPU waited.

    Returns:
        The fraction; None if the GPU waited as long as the link takes, or nearly: then the link's speed is not the
        cause.
    """
    if waited_s >= link_s:
        return None
    asked = fraction / _FRACTION_STEP
    num_steps = min(round(asked * (link_s - waited_s) / link_s), math.ceil(asked - 1e-9) - 1)  # less than `fraction`
    return round(num_steps * _FRACTION_STEP, 2) if num_steps else None


def gpu_waited(
    waits: Waits, moved_bytes: int, *, link_speed: float | None, fraction: float, max_inflight: int | None
) -> str:
    """Formats how long the GPU waited for copies, and how to change that.

    Args:
        waits: the waits of a training step.
        moved_bytes: bytes copied to the host in that step.
        link_speed: speed to the host in bytes a second; None if it is not known.
        fraction: `activation_offload_fraction` of the step.
        max_inflight: `fine_grained_offloading_max_inflight_offloads`. If it is a number, the GPU may wait on any link,
            and no fraction is suggested.
    """
    found = f"the GPU waited {_ms(waits.seconds_waited)} of a training step of {_ms(waits.seconds)} for copies of"
    moved = f"{moved_bytes / MIB:,.0f} MiB"
    remedies = (
        "lower policy.megatron_cfg.activation_offload_fraction, raise "
        "policy.megatron_cfg.fine_grained_offloading_max_inflight_offloads, or check what else uses the link"
    )
    if link_speed is None:
        return f"{found} {moved} of activations; {remedies}."
    link_s = moved_bytes / link_speed
    taken = f"{_ms(link_s)} at {link_speed / 1e9:.0f} GB/s"
    fits = suggested_fraction(fraction, link_s, waits.seconds_waited) if max_inflight is None else None
    if fits is None:
        return f"{found} activations, although an idle link copies {moved} in {taken}; {remedies}."
    return (
        f"{found} activations: copying {moved} over the link takes {taken}, longer than the passes that it overlaps "
        f"with; the copies would fit with policy.megatron_cfg.activation_offload_fraction {fits:.2f}."
    )


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.{0 if seconds >= 0.01 else 1}f} ms"
