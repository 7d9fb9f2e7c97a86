"""Prints the report of `nemo-offload-rl doctor`: checks of this machine, as a table or as JSON."""

import dataclasses
import json
import sys

from rich.console import Console
from rich.table import Table
from rich.text import Text

from nemo_offload_rl.placement.checks import Check, Verdict, judge
from nemo_offload_rl.placement.machine import MachineFacts, machine_facts

_STYLES = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.MISSING: "red"}
# Without a terminal rich uses 80 columns, too few for the remedies.
_WIDTH_WITHOUT_TERMINAL = 160


def run_doctor(as_json: bool, console: Console | None = None) -> None:
    """Examines this machine and prints the results.

    Args:
        as_json: Print facts and checks as one JSON object instead of a table.
        console: Where to print; None for the standard output.
    """
    if console is None:
        console = Console() if sys.stdout.isatty() else Console(width=_WIDTH_WITHOUT_TERMINAL)
    facts = machine_facts()
    checks = judge(facts)
    if as_json:
        console.file.write(facts_as_json(facts, checks) + "\n")
    else:
        console.print(checks_table(facts.host.hostname, checks))


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
