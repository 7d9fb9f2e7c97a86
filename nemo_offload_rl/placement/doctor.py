"""Prints the report of `nemo-offload-rl doctor`: checks of this machine, or its measured rates, as a table or JSON."""

import dataclasses
import json
import sys

from rich.console import Console
from rich.table import Table
from rich.text import Text

from nemo_offload_rl.placement.checks import Check, Verdict, judge
from nemo_offload_rl.placement.machine import MachineFacts, machine_facts
from nemo_offload_rl.placement.rates import Curve, Rates, keep_rates

_STYLES = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.MISSING: "red"}
# Without a terminal rich uses 80 columns, too few for the remedies.
_WIDTH_WITHOUT_TERMINAL = 160


def run_doctor(as_json: bool, console: Console | None = None) -> None:
    """Examines this machine and prints the results.

    Args:
        as_json: Print facts and checks as one JSON object instead of a table.
        console: Where to print; None for the standard output.
    """
    console = _console() if console is None else console
    facts = machine_facts()
    checks = judge(facts)
    if as_json:
        console.file.write(facts_as_json(facts, checks) + "\n")
    else:
        console.print(checks_table(facts.host.hostname, checks))


def _console() -> Console:
    return Console() if sys.stdout.isatty() else Console(width=_WIDTH_WITHOUT_TERMINAL)


def run_calibration(as_json: bool, console: Console | None = None) -> None:
    """Measures the rates of this machine's current GPU, keeps them for the plan, and prints them.

    Args:
        as_json: Print the rates as JSON, as in the file.
        console: Where to print; None for the standard output.

    Raises:
        ValueError: There is no GPU, it cannot be measured, or the file cannot be written.
    """
    from nemo_offload_rl.placement.calibrate import calibrate_here

    rates, gpu = calibrate_here()
    path = keep_rates(rates, gpu)
    console = _console() if console is None else console
    if as_json:
        console.file.write(json.dumps(rates.as_fields(), indent=2) + "\n")
    else:
        console.print(rates_table(gpu, rates))
        console.print(f"kept in {path}, from which nemo-offload-rl plan and runs on this machine predict seconds")


def rates_table(title: str, rates: Rates) -> Table:
    """Returns a table with a row per rate."""
    table = Table(title=f"{title}: rates", title_justify="left")
    for heading in ("rate", "measured"):
        table.add_column(heading, overflow="fold")
    table.add_row("matrix products, TFLOP/s", _points(rates.matmul, 1e9, "GFLOP"))
    for one in rates.attention:
        for name, curve in (("forward", one.forward), ("backward", one.backward)):
            table.add_row(f"attention, heads of {one.head_dim}, {name}, TFLOP/s", _points(curve, 1, "tokens"))
    table.add_row("GPU memory, read and written, TB/s", f"{rates.memory_bytes_per_s / 1e12:.2f}")
    table.add_row("link, the slower direction, GB/s", f"{rates.link_bytes_per_s / 1e9:.1f}")
    table.add_row("a small operation on the host, us", f"{rates.launch_s * 1e6:.1f}")
    table.add_row("Adam on the CPU, G parameters/s", f"{rates.cpu_params_per_s / 1e9:.2f}")
    return table


def _points(curve: Curve, unit: float, name: str) -> str:
    return ", ".join(f"{rate / 1e12:.0f} ({size / unit:,.0f} {name})" for size, rate in curve.points)


def facts_as_json(facts: MachineFacts, checks: list[Check]) -> str:
    """Returns the fields of `MachineFacts`, and the checks under `checks`; sizes in bytes, speeds in GB/s."""
    fields = dataclasses.asdict(facts) | {"checks": [dataclasses.asdict(check) for check in checks]}
    return json.dumps(fields, indent=2, default=sorted)  # sorted: sets of CPUs


def checks_table(title: str, checks: list[Check]) -> Table:
    """Returns a table with a row per check."""
    table = Table(title=f"{title}: fitness for offloading", title_justify="left")
    for heading in ("property", "found", "verdict", "remedy"):
        table.add_column(heading, overflow="fold")
    for check in checks:
        verdict = Text(check.verdict, style=_STYLES[check.verdict])
        table.add_row(Text(check.subject), Text(check.found), verdict, Text(check.remedy))
    return table
