"""Writes a run's page, `report.html`, and keeps in `run.json` what it says beside the metrics."""

from __future__ import annotations

import base64
import json
import logging
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

from rich.table import Table

import nemo_offload_rl
from nemo_offload_rl.metrics.logger import METRICS_FILE, read_metrics
from nemo_offload_rl.metrics.moves import moves_table
from nemo_offload_rl.metrics.plot import TIMELINE_FILE, plot_step, plot_training
from nemo_offload_rl.metrics.report import memory_table, phase_table
from nemo_offload_rl.metrics.samples import JudgedAnswer, samples_table
from nemo_offload_rl.storage.disk import DiskFullError, translate_disk_full, write_whole

logger = logging.getLogger(__name__)

FACTS_FILE = "run.json"


def read_facts(run_dir: Path) -> dict[str, Any]:
    """Returns what `update_facts` has written; empty where there is nothing, or, with a warning, no JSON object."""
    path = run_dir / FACTS_FILE
    if not path.exists():
        return {}
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        facts = None
    if not isinstance(facts, dict):
        logger.warning("%s is left out, since it is not what a run writes, a JSON object.", path)
        return {}
    return facts


def update_facts(run_dir: Path, **facts: Any) -> None:
    """Writes facts of a run, and keeps its others; where the disk is full, the earlier ones stay, with a warning."""
    path = run_dir / FACTS_FILE
    text = json.dumps(read_facts(run_dir) | facts, indent=1, default=str)
    try:
        with translate_disk_full(path):
            write_whole(path, text)
    except DiskFullError as error:
        logger.warning("%s. The page of the run lacks what was to be added.", error)


def source_version() -> str:
    """Returns the package's version and, where it runs from a git checkout that git can read, the commit."""
    root = Path(nemo_offload_rl.__file__).parents[1]
    version = nemo_offload_rl.__version__
    if not (root / ".git").exists():
        return version
    command = ["git", "-C", str(root), "describe", "--always", "--exclude=*", "--dirty", "--abbrev=12"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return version
    return f"{version}, commit {found}"


PAGE_FILE = "report.html"

_STYLE = """
body { max-width: 68rem; margin: 2rem auto; padding: 0 1rem; font: 16px/1.5 system-ui, sans-serif; color: #222; }
h1, h2 { line-height: 1.2; } h2 { margin-top: 2.5rem; border-bottom: 1px solid #ccc; }
img { max-width: 100%; } .scroll { overflow-x: auto; }
table { border-collapse: collapse; margin: 1rem 0; font-size: 0.9rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: bold; padding: 0.3rem 0; }
th, td { padding: 0.25rem 0.7rem; border-bottom: 1px solid #ddd; text-align: left; vertical-align: top;
         white-space: pre-wrap; overflow-wrap: anywhere; min-width: 8rem; }
td:first-child { overflow-wrap: break-word; min-width: 0; }
th { border-bottom-color: #888; white-space: nowrap; }
.number { text-align: right; white-space: nowrap; min-width: 0; }
pre { background: #f5f5f5; padding: 1rem; overflow-x: auto; font-size: 0.85rem; } summary { cursor: pointer; }
"""


def draw_and_write_page(run_dir: Path) -> Path:
    """Draws a run's pictures again from its folder, and writes its page; returns the page's path."""
    facts = read_facts(run_dir)
    drawn = [path.stem for path in _curves(run_dir, facts)]
    name = facts["algorithm"] if "algorithm" in facts else next(iter(drawn), "curves")
    for draw in (partial(plot_training, run_dir, name), partial(plot_step, run_dir)):
        with suppress(ValueError):  # such as a last step that has not ended: the page has what there is
            draw()
    return write_page(run_dir)


def write_page(run_dir: Path) -> Path:
    """Writes the page from what a run's folder has: metrics, pictures and `run.json`; returns its path."""
    rows, facts = read_metrics(run_dir / METRICS_FILE), read_facts(run_dir)
    name = f"{facts['algorithm'].upper()} run" if "algorithm" in facts else "Run"
    title = escape(f"{name} {run_dir.resolve().name}")
    text = "\n".join([
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width">',
        f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>",
        *_parts(run_dir, rows, facts),
        "</body>\n</html>\n",
    ])  # fmt: skip
    path = run_dir / PAGE_FILE
    write_whole(path, text.encode("utf-8", "replace").decode())  # an answer may have half of a surrogate pair
    return path


def _parts(run_dir: Path, rows: Sequence[Mapping[str, float | None]], facts: Mapping[str, Any]) -> Iterator[str]:
    last = rows[-1]["step"] if rows else 0
    yield f"<p>{escape(_ending(last, facts))}</p>"
    about = {**facts, "folder": run_dir.resolve()}
    known = [what for what in ("folder", "recipe", "version", "started", "ended") if about.get(what)]
    yield f"<ul>{''.join(f'<li>{what}: {escape(str(about[what]))}</li>' for what in known)}</ul>"
    yield "<h2>Curves</h2>"
    yield from map(_picture, _curves(run_dir, facts))
    yield "<h2>Time</h2>"
    yield _of_rich(phase_table(rows))
    yield from map(_picture, run_dir.glob(TIMELINE_FILE))
    yield from (_of_rich(table) for table in (moves_table(rows),) if table is not None)
    memory = memory_table(rows, facts.get("planned_peak_gib", {}))
    if memory is not None:
        yield "<h2>Memory</h2>"
        yield _of_rich(memory)
    answers = facts.get("answers")
    if answers and answers["step"] <= last:  # not those of steps that a resumed run has yet to make again
        yield "<h2>Answers</h2>"
        yield _of_rich(samples_table(answers["step"], [JudgedAnswer(**answer) for answer in answers["judged"]]))
    if "settings" in facts:
        yield "<h2>Settings</h2>"
        settings = [
            (key, value if isinstance(value, str) else json.dumps(value), at) for key, value, at in facts["settings"]
        ]
        yield _table("Set by the command line and the recipe's own file", ("key", "value", "at"), settings)
        whole = escape(facts["config"])
        yield f"<details><summary>Every setting, as the run had it</summary>\n<pre>{whole}</pre></details>"


def _ending(last: float | None, facts: Mapping[str, Any]) -> str:
    if not facts:
        return f"{last} steps; the folder does not say how the run ended."
    if facts.get("ending") is None:
        return f"After step {last} the run goes on, or it was killed."
    return f"Ended after step {last}: {facts['ending']}."


def _curves(run_dir: Path, facts: Mapping[str, Any]) -> list[Path]:
    """Returns the pictures of the run's curves; of a run without facts, all pictures but the timeline."""
    name = facts.get("algorithm", "*")
    return [path for path in sorted(run_dir.glob(f"{name}.png")) if path.name != TIMELINE_FILE]


def _picture(path: Path) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<img alt="{escape(path.stem)}" src="data:image/png;base64,{data}">'


def _of_rich(table: Table) -> str:
    numeric = [column.justify == "right" for column in table.columns]
    cells = zip(*(map(str, column.cells) for column in table.columns), strict=True)
    return _table(str(table.title), [str(column.header) for column in table.columns], cells, numeric)


def _table(
    title: str, names: Sequence[str], rows: Iterable[Sequence[object]], numeric: Sequence[bool] | None = None
) -> str:
    kinds = [' class="number"' if number else "" for number in numeric or [False] * len(names)]

    def line(tag: str, cells: Sequence[object]) -> str:
        inside = (f"<{tag}{kind}>{escape(str(cell))}</{tag}>" for kind, cell in zip(kinds, cells, strict=True))
        return f"<tr>{''.join(inside)}</tr>"

    head = f"<caption>{escape(title)}</caption>\n<thead>{line('th', names)}</thead>"
    body = "\n".join(line("td", row) for row in rows)
    return f'<div class="scroll"><table>{head}\n<tbody>\n{body}\n</tbody></table></div>'
