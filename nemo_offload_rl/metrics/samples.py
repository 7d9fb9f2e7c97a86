"""Makes tables of a validation's answers for the terminal, the log and TensorBoard."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

_COLUMNS = ("prompt", "answer", "known answer", "reward")
_MAX_CHARS = 1000
_LOG_WIDTH = 160
# In an answer they would change the terminal, and make the log a binary file for grep.
_CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")


@dataclass(frozen=True)
class JudgedAnswer:
    """Holds an answer of a validation.

    Attributes:
        prompt: text of the last message before the answer.
        answer: text of the answer.
        known_answer: the known answer that it was compared with.
        reward: the answer's reward.
    """

    prompt: str
    answer: str
    known_answer: str
    reward: float

    @property
    def cells(self) -> tuple[str, ...]:
        """The texts of a table row, without control characters; a long text is its beginning and its end."""
        texts = (self.prompt, self.answer, self.known_answer)
        return (*map(_shortened, texts), f"{self.reward:g}")


def best_and_worst(rewards: Sequence[float], num: int) -> list[int]:
    """Chooses answers to show: half of them with the highest rewards, the others with the lowest.

    Args:
        rewards: rewards of all answers.
        num: how many to choose; all if there are no more.

    Returns:
        Their indices, the highest reward first; of equal rewards the earlier answer comes first.
    """
    ranked = sorted(range(len(rewards)), key=lambda index: -rewards[index])
    if len(ranked) <= num:
        return ranked
    num_worst = num // 2
    return ranked[: num - num_worst] + ranked[len(ranked) - num_worst :]


def samples_table(step: int, answers: Sequence[JudgedAnswer]) -> Table:
    """Makes the table for the terminal and the log."""
    table = Table(title=f"Answers of the validation after step {step}", title_justify="left", show_lines=True)
    for name in _COLUMNS:
        table.add_column(name, justify="right" if name == "reward" else "left", overflow="fold")
    for answer in answers:
        table.add_row(*map(Text, answer.cells))
    return table


def as_plain_text(table: Table) -> str:
    """Returns a table as text without colours, wide enough for a log."""
    with io.StringIO() as written:
        Console(file=written, width=_LOG_WIDTH, color_system=None).print(table)
        return "\n".join(line.rstrip() for line in written.getvalue().splitlines())


def samples_markdown(answers: Sequence[JudgedAnswer]) -> str:
    """Makes the table for TensorBoard, in Markdown."""
    lines = [_COLUMNS, ("---",) * len(_COLUMNS), *([_markdown(cell) for cell in answer.cells] for answer in answers)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _markdown(text: str) -> str:
    escaped = html.escape(text, quote=False)
    for character in r"\`*_[]|$":
        escaped = escaped.replace(character, f"\\{character}")
    return "<br>".join(escaped.splitlines())


def _shortened(text: str) -> str:
    text = _CONTROL_CHARACTERS.sub("\ufffd", text)
    if len(text) <= _MAX_CHARS:
        return text
    half = _MAX_CHARS // 2
    return f"{text[:half]} [... {len(text) - 2 * half:,} characters ...] {text[-half:]}"
