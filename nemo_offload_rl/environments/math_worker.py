"""Judges answers in a separate process, so that a hang, crash or lack of memory does not harm the driver.

Implements DAPO's math reward: it normalises the text after the last `Answer:` and compares it as text. The
normalisation is Minerva's (https://arxiv.org/abs/2206.14858, appendix D), as in DAPO and NeMo-RL.

The process says that it is ready, or `{"refused": TEXT}` if it cannot judge. It reads one job per line, a list of texts
in JSON, and writes a line for each: `{"reward": R}`, `{"error": TEXT}` if the answer could not be judged, or
`{"refused": TEXT}` if the run must end.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import re
import resource
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from nemo_offload_rl.environments.rewards import RewardError
from nemo_offload_rl.storage.output import lasting_output

# Number of characters at the end of a response that are searched; the longest answer of MATH-500 has 159.
TAIL_CHARS = 300
_NO_ANSWER = "[INVALID]"
_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)

# Replacements, applied in this order.
_REPLACED = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    (r"\$", ""),
    (r"\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (r",\text{and}", ","),
    (r"\text{and}", ","),
    (r"\text{m}", r"\text{}"),
)
# Texts that are removed afterwards, in this order: units, words around numbers, and TeX spacing.
_REMOVED = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", r"\ldots", "sue", "points"),
    *("feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students"),
    *("childrentickets", "multiples", r"\text{s}", r"\text{.}", "\\text{\ns}", r"\text{}^2", r"\text{}^3"),
    *("\\text{\n}", r"\text{}", r"\mathrm{th}", r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', r"\dots"),
)
# TeX rules, applied last: keep only the formula, unwrap commands, and add missing braces around arguments.
_TEX = (
    (re.compile(r".*?\$(.*?)\$.*"), r"$\1$"),
    (re.compile(r"\\text\{(.*?)\}"), r"\1"),
    (re.compile(r"\\textbf\{(.*?)\}"), r"\1"),
    (re.compile(r"\\overline\{(.*?)\}"), r"\1"),
    (re.compile(r"\\boxed\{(.*)\}"), r"\1"),
    (re.compile(r"frac([^{])(.)"), r"frac{\1}{\2}"),
    (re.compile(r"sqrt([^{])"), r"sqrt{\1}"),
)


def dapo_math_verify(response: str, answer: str) -> float:
    """Returns 1 if the response's last `Answer:` equals the known answer after normalisation of both, otherwise 0."""
    stated = _ANSWER.findall(response[-TAIL_CHARS:])
    return float(normalize_answer(stated[-1] if stated else _NO_ANSWER) == normalize_answer(answer))


def normalize_answer(answer: str) -> str:
    """Normalises an answer: removes units, spacing and formatting, so that equal answers mostly become equal texts."""
    text = answer.rpartition("=")[2]
    for before, after in _REPLACED:
        text = text.replace(before, after)
    for removed in _REMOVED:
        text = text.replace(removed, "")
    for pattern, replacement in _TEX:
        text = pattern.sub(replacement, text)
    text = text.replace("$", "")
    digits = text.replace(",", "")
    return (digits if digits.isdigit() else text).strip()


READY = b"ready\n"
_PR_SET_PDEATHSIG = 1
# Limit of the address space; sympy needs a few hundred MiB, but a power tower takes all memory that it can get.
_MAX_MEMORY_BYTES = 4 * 2**30
_GIVEN_UP = "math-verify gave up on a formula at its own time limit"

MathJudge = Callable[[str, str], float]


def load_hf_math_verify() -> MathJudge:
    """Imports math-verify and returns its judge, which compares the last formula or number of a response."""
    from math_verify.errors import TimeoutException
    from math_verify.metric import math_metric
    from math_verify.parser import ExprExtractionConfig, LatexExtractionConfig

    timeouts = _Timeouts()
    metric = math_metric(
        gold_extraction_target=(LatexExtractionConfig(),),
        pred_extraction_target=(ExprExtractionConfig(), LatexExtractionConfig()),
    )

    def judge(response: str, answer: str) -> float:
        num_before = timeouts.num
        try:
            reward = float(metric([rf"\boxed{{{answer}}}"], [response])[0])
        except TimeoutException as error:  # derives from BaseException
            raise TimeoutError(_GIVEN_UP) from error
        if reward == 0 and timeouts.num > num_before:
            raise TimeoutError(_GIVEN_UP)
        return reward

    return judge


class _Timeouts(logging.Handler):
    """Counts the formulas on which math-verify timed out, which it only reports in its log; hides that log."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.num = 0
        log = logging.getLogger("math_verify")
        log.propagate = False
        log.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Counts a log record if it reports a timeout."""
        self.num += str(record.msg).startswith("Timeout during")


LOADERS: Mapping[str, Callable[[], MathJudge]] = MappingProxyType(
    {"hf_math_verify": load_hf_math_verify, "dapo_math_verify": lambda: dapo_math_verify}
)


def serve(
    load: Callable[[], Callable[..., float]], *, max_memory_bytes: int | None = _MAX_MEMORY_BYTES, silent: bool = True
) -> None:
    """Judges jobs from standard input until its end.

    Args:
        load: makes the judge, which is called with the texts of a job.
        max_memory_bytes: limit of the process's address space; None for no limit of its own.
        silent: whether what a judge prints is discarded; otherwise it goes to standard error.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # dies with the driver, even if it hangs
    if max_memory_bytes is not None:
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = max_memory_bytes if hard == resource.RLIM_INFINITY else min(hard, max_memory_bytes)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    with (
        os.fdopen(os.dup(0), "rb") as jobs,
        os.fdopen(os.dup(1), "wb", buffering=0) as replies,
        open(os.devnull, "r+b") as nowhere,
        lasting_output(),
    ):
        os.dup2(nowhere.fileno(), 0)  # a judge may read standard input, too
        os.dup2(2, 1)
        try:
            judge = load()
        except RewardError as error:
            replies.write(_line(_refusal(error)))
            return
        if silent:
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
        replies.write(READY)
        for line in jobs:
            replies.write(_line(_reply(judge, json.loads(line))))
            sys.stdout.flush()


def _reply(judge: Callable[..., float], job: Sequence[str]) -> dict[str, float | str]:
    try:
        return {"reward": judge(*job)}
    except RewardError as error:
        return _refusal(error)
    except Exception as error:  # noqa: BLE001 - sympy raises anything; the driver counts the answer
        return {"error": f"{type(error).__name__}: {str(error)[:200]}"}


def _refusal(error: RewardError) -> dict[str, float | str]:
    return {"refused": str(error)}


def _line(reply: Mapping[str, float | str]) -> bytes:
    return json.dumps(reply).encode() + b"\n"
