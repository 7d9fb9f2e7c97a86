"""Defines problems with answers and the conversations that they and pairs implement, the error and limits of data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True)
class Message:
    """Holds one turn of a conversation.

    Attributes:
        role: the role of the speaker, such as ``user``.
        content: the text.
    """

    role: str
    content: str


class Conversation(Protocol):
    """Defines messages and the assistant's answer to them; ``PromptFormat`` turns them into tokens."""

    @property
    def context(self) -> tuple[Message, ...]:
        """The messages before the answer, the oldest first."""

    @property
    def answer(self) -> str:
        """The text of the answer."""

    @property
    def where(self) -> str:
        """The file and line, or the row, that the conversation was read from; empty if it was generated."""


@dataclass(frozen=True)
class Problem:
    """Holds a prompt and its answer, which rewards compare responses with, and which SFT trains on.

    Attributes:
        prompt: text of the prompt.
        answer: text of the answer.
        where: the file and line, or the row, that the problem was read from; empty for a generated problem. Ignored
            when problems are compared.
    """

    prompt: str
    answer: str
    where: str = field(default="", compare=False)

    @property
    def context(self) -> tuple[Message, ...]:
        """The prompt as a user message."""
        return (Message("user", self.prompt),)


@dataclass(frozen=True)
class AnsweredContext:
    """Holds the messages before an answer, and the answer; see ``Conversation``.

    Attributes:
        context: the messages before the answer, the oldest first.
        answer: text of the answer.
        where: the file and line, or the row, that it was read from; empty if it was generated.
        trains_all_answers: whether SFT also trains the assistant's earlier messages.
    """

    context: tuple[Message, ...]
    answer: str
    where: str = field(default="", compare=False)
    trains_all_answers: bool = False


class DataError(ValueError):
    """Says that a dataset, a template or a tokenizer cannot be used; the message is for the user."""


# The most characters of a line of a JSONL file; a long context of a million tokens has some 4 million.
MAX_LINE_CHARS = 2**24

# The most bytes of a prompt template or a system prompt.
MAX_TEXT_FILE_BYTES = 2**20

# Seconds for which the rows of a dataset are checked before a run: enough for some 100,000 conversations.
CHECK_LIMIT_S = 10.0
