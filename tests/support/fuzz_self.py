"""Provides cases with known outcomes, one for each outcome that `fuzz_run` distinguishes."""

import os
import random
import signal
from pathlib import Path


def prepare(folder: Path) -> None:
    """Does nothing; these cases need no files."""


def run_case(rng: random.Random, folder: Path) -> bool:
    case = int(folder.name.removeprefix("case_"))
    if case == 2:
        return bool(1 / 0)
    if case == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    if case == 4:
        return len(bytearray(2**31)) > 0
    while case == 5:
        pass
    return case == 0
