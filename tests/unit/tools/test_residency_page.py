"""Tests that the documentation's table of sizes is the planner's."""

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]


def test_the_table_of_sizes_is_up_to_date():
    command = [sys.executable, str(REPOSITORY / "tools" / "residency_page.py"), "check"]
    check = subprocess.run(command, capture_output=True, text=True, check=False)
    assert check.returncode == 0, check.stdout + check.stderr
