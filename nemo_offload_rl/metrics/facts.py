"""Keeps in `run.json` what a run's page says beside its metrics: recipe, version, how it ended, the newest answers."""

from __future__ import annotations

import json
import logging
import subprocess
from pathlib import Path
from typing import Any

import nemo_offload_rl
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
