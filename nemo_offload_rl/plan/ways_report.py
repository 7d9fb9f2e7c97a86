"""Prints the ways to keep optimizer state, and the recommended one for a GPU of a given size."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from nemo_offload_rl.memory.units import show_gib
from nemo_offload_rl.plan.optimizer_ways import (
    OVERLAPPED_FACTOR,
    CpuSpeed,
    Host,
    PlannedWay,
    fastest_that_fits,
    reason,
)


def new_table(title: str, first: str, *columns: str) -> RichTable:
    """Makes a table with a left-aligned first column of words and right-aligned columns of numbers."""
    table = RichTable(title=title, title_justify="left")
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def ways_tables(
    planned: Sequence[PlannedWay], gpu_bytes: int | None, host: Host, *, link: str, cpu_speed: CpuSpeed
) -> Iterator[RenderableType]:
    """Yields a table of the ways, and for a given GPU size the recommended way and the overrides that turn it on.

    Args:
        planned: memory and time of each way.
        gpu_bytes: memory of the GPU; None to recommend none.
        host: the GPU's host.
        link: the link's speed, and how it was obtained.
        cpu_speed: speed of the CPU optimizer's kernels.
    """
    yield ""
    title = f"Options for optimizer state of one rank: sizes in GiB, times in s at {link}"
    columns = ["GPU in training", "GPU in generation", "host memory", "transfers per step, s", "wait per step, s"]
    table = new_table(title, "option", *columns, *([] if gpu_bytes is None else ["fits"]))
    for one in planned:
        if one.refusal:
            continue
        sizes = map(show_gib, (one.training_bytes, one.generation_bytes, one.host_bytes))
        seconds = f"{one.transfer_s:.3f}", f"{one.wait_s:.3f}"
        table.add_row(one.way.name, *sizes, *seconds, *([] if gpu_bytes is None else [_verdict(one, gpu_bytes, host)]))
    yield table
    for one in planned:
        if one.refusal:
            yield Text(f"  not with this recipe: {one.way.name}: {one.refusal}", style="dim")
    yield Text(
        "  The GPU columns leave out activations, logits and the engine that generates; an option fits only with room\n"
        "  for the least that they take. Transfers are the seconds if nothing overlaps. For the CPU optimizer a step\n"
        f"  waits for its kernels times {OVERLAPPED_FACTOR:g}, or for its copies in both directions at once,\n"
        "  whichever takes longer;\n"
        f"  its kernels step {cpu_speed.params_per_s / 1e9:.3g} G parameters per s, {cpu_speed.source}.",
        style="dim",
    )
    if gpu_bytes is None:
        yield Text("  --gpu-memory GIB recommends an option for a GPU of that size", style="dim")
        return
    yield Text(reason(planned, gpu_bytes, host))
    chosen = fastest_that_fits(planned, gpu_bytes, host)
    if chosen is not None:
        yield Text("\n".join(f"    {line}" for line in chosen.way.overrides) or "    the recipe already sets this")


def ways_json(
    planned: Sequence[PlannedWay], gpu_bytes: int | None, host: Host, *, cpu_speed: CpuSpeed
) -> dict[str, Any]:
    """Returns the contents of `ways_tables` as plain values; sizes in bytes."""
    chosen = None if gpu_bytes is None else fastest_that_fits(planned, gpu_bytes, host)
    return {
        "ways": [dataclasses.asdict(one) for one in planned],
        "gpu_bytes": gpu_bytes,
        "cpu_optimizer_speed": dataclasses.asdict(cpu_speed),
        "chosen": None if chosen is None else chosen.way.name,
        "reason": None if gpu_bytes is None else reason(planned, gpu_bytes, host),
    }


def _verdict(one: PlannedWay, gpu_bytes: int, host: Host) -> str:
    if one.fits(gpu_bytes, host):
        return "yes"
    missing = one.missing_bytes(gpu_bytes)
    return f"lacks {show_gib(missing)}" if missing > 0 else f"host lacks {show_gib(one.missing_host_bytes(host))}"
