"""Defines problems with their answers, and the conversation that a problem or an answer of a pair is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True)
class Message:
    """Holds one turn of a conversation.

    Attributes:
        role: the speaker's, such as ``user``.
        content: its text.
    """

    role: str
    content: str


class Conversation(Protocol):
    """Holds messages and the assistant's answer to them; a prompt format turns them into tokens."""

    @property
    def context(self) -> tuple[Message, ...]:
        """The messages before the answer, the oldest first."""

    @property
    def answer(self) -> str:
        """The text of the answer."""

    @property
    def where(self) -> str:
        """The file and line, or the row, that it was read from; empty for one that was made."""


@dataclass(frozen=True)
class Problem:
    """Holds a prompt, and the answer that a response is compared with or, in SFT, trained towards.

    Attributes:
        prompt: its text.
        answer: its text.
        where: the file and line, or the row, that it was read from; empty for one that was made. Of two problems that
            differ in nothing else, neither is another problem.
    """

    prompt: str
    answer: str
    where: str = field(default="", compare=False)

    @property
    def context(self) -> tuple[Message, ...]:
        """The prompt as a user's message."""
        return (Message("user", self.prompt),)


@dataclass(frozen=True)
class AnsweredContext:
    """Holds the messages before an answer, and the answer; see ``Conversation``.

    Attributes:
        context: the messages before the answer, the oldest first.
        answer: its text.
        where: the file and line, or the row, that it was read from; empty for one that was made.
        trains_all_answers: whether SFT trains the assistant's earlier messages, too.
    """

    context: tuple[Message, ...]
    answer: str
    where: str = field(default="", compare=False)
    trains_all_answers: bool = False
