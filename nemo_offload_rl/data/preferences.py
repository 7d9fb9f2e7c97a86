"""Makes pairs of a chosen and a rejected answer from the rows of a dataset."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from nemo_offload_rl.data.fields import describe, field_of, text_of
from nemo_offload_rl.data.problem import AnsweredContext, DataError, Message

ROWS_OF_A_PAIR = 2  # rows of a pair in a batch: the chosen answer, then the rejected one

MESSAGE_KEYS = ("role", "content")
_ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True)
class PreferencePair:
    """Holds two answers to the same messages, of which one is preferred.

    Attributes:
        context: the messages before the answers, the oldest first; a prompt that is a text becomes a user message.
        chosen: text of the preferred answer.
        rejected: text of the other one.
        where: the file and line, or the row, that the pair was read from; empty for a generated pair. Ignored when
            pairs are compared.
    """

    context: tuple[Message, ...]
    chosen: str
    rejected: str
    where: str = field(default="", compare=False)

    @property
    def answers(self) -> tuple[AnsweredContext, AnsweredContext]:
        """The conversation with the chosen answer, and the conversation with the rejected one."""
        return (
            AnsweredContext(self.context, self.chosen, self.where),
            AnsweredContext(self.context, self.rejected, self.where),
        )


@dataclass(frozen=True)
class BinaryForm:
    """Reads rows with a prompt, a chosen and a rejected answer, in the format of NeMo-RL's ``BinaryPreferenceDataset``.

    Attributes:
        prompt_key: field of the prompt, a text or messages.
        chosen_key: field of the preferred answer: a text, a list with the assistant's message, or that message after
            the prompt's messages.
        rejected_key: field of the other answer, in one of the same forms.
    """

    prompt_key: str
    chosen_key: str
    rejected_key: str

    @property
    def keys(self) -> tuple[str, ...]:
        """The fields that a row needs."""
        return self.prompt_key, self.chosen_key, self.rejected_key

    @property
    def nested_keys(self) -> tuple[str, ...]:
        """The fields of a message."""
        return MESSAGE_KEYS

    def sample(self, row: Mapping[str, Any], where: str) -> PreferencePair:
        """Makes a pair from a row.

        Raises:
            DataError: the row has another format; names its place.
        """
        context = context_of(field_of(row, self.prompt_key, where), f"{where}: the field {self.prompt_key!r}")
        chosen, rejected = (
            answer_of(field_of(row, key, where), context, f"{where}: the field {key!r}")
            for key in (self.chosen_key, self.rejected_key)
        )
        return _distinct(PreferencePair(context, chosen, rejected, where))


@dataclass(frozen=True)
class RankedForm:
    """Reads rows with ``context`` and two ranked ``completions``, in the format of NeMo-RL's ``PreferenceDataset``."""

    @property
    def keys(self) -> tuple[str, ...]:
        """The fields that a row needs."""
        return "context", "completions"

    @property
    def nested_keys(self) -> tuple[str, ...]:
        """The fields of a completion and of a message."""
        return "rank", "completion", *MESSAGE_KEYS

    def sample(self, row: Mapping[str, Any], where: str) -> PreferencePair:
        """Makes a pair from a row; the completion with the lower rank is the chosen one.

        Raises:
            DataError: the row has another format, or both completions have the same rank; names its place.
        """
        context = context_of(field_of(row, "context", where), f"{where}: the field 'context'")
        completions = field_of(row, "completions", where)
        if not isinstance(completions, list) or len(completions) != ROWS_OF_A_PAIR:
            found = f"a list of {len(completions)}" if isinstance(completions, list) else describe(completions)
            raise DataError(
                f"{where}: the field 'completions' must be a list of two, since a pair has one chosen and one rejected "
                f"answer, found {found}: write a line for each two that are to be compared."
            )
        ranks, answers = [], []
        for number, completion in enumerate(completions):
            place = f"{where}: completions[{number}]"
            if not isinstance(completion, dict):
                raise DataError(
                    f"{place} must be an object with 'rank' and 'completion', found {describe(completion)}."
                )
            rank = field_of(completion, "rank", place)
            if not isinstance(rank, int) or isinstance(rank, bool):
                raise DataError(f"{place}: the field 'rank' must be an integer, found {describe(rank)}.")
            ranks.append(rank)
            answers.append(
                answer_of(field_of(completion, "completion", place), context, f"{place}: the field 'completion'")
            )
        if ranks[0] == ranks[1]:
            raise DataError(
                f"{where}: both completions have the rank {ranks[0]}, but the lower rank tells which is chosen: give "
                "them different ranks, or delete the row."
            )
        chosen, rejected = answers if ranks[0] < ranks[1] else reversed(answers)
        return _distinct(PreferencePair(context, chosen, rejected, where))


def context_of(value: Any, field_name: str) -> tuple[Message, ...]:
    """Returns the messages before an answer; a text becomes a user message.

    Raises:
        DataError: the value is neither a text nor messages, or the last message is not the user's or a tool's.
    """
    if not isinstance(value, list):
        return (Message("user", text_of(value, field_name, "a text or a list of messages")),)
    messages = messages_of(value, field_name)
    if not messages or messages[-1].role in ("assistant", "system", "developer"):
        found = f"ends with one of the role {messages[-1].role!r}" if messages else "is empty"
        raise DataError(f"{field_name} {found}: its last message must be the user's (or a tool's), which is answered.")
    if all(message.role != "user" for message in messages):
        raise DataError(f"{field_name} has no message of the role 'user': a prompt needs one.")
    return messages


def answer_of(value: Any, context: tuple[Message, ...], field_name: str, *, may_be_empty: bool = False) -> str:
    """Returns the text of an answer, given as a text, as a message, or after the messages of its prompt.

    Raises:
        DataError: the value is none of these, or the answer is empty and may not be.
    """
    answer = _last_turn(value, context, field_name) if isinstance(value, list) else value
    text = text_of(answer, field_name, "a text or a list of messages")
    if not text.strip() and not may_be_empty:
        raise DataError(
            f"{field_name} is an empty answer, which nothing can be learnt from: write it, or delete the row."
        )
    return text


def _last_turn(value: list[Any], context: tuple[Message, ...], field_name: str) -> str:
    messages = messages_of(value, field_name)
    if not messages or messages[-1].role != "assistant":
        found = f"ends with one of the role {messages[-1].role!r}" if messages else "is empty"
        raise DataError(f"{field_name} {found}: its last message must be the assistant's, which is the answer.")
    if len(messages) > 1 and messages[:-1] != context:
        pairs = zip_longest(messages[:-1], context)
        first = next(number for number, (found, expected) in enumerate(pairs, start=1) if found != expected)
        raise DataError(
            f"{field_name}: message {first} is not that of the prompt: write the answer alone, or after exactly the "
            "prompt's messages."
        )
    return messages[-1].content


def messages_of(value: list[Any], field_name: str) -> tuple[Message, ...]:
    """Returns the messages of a list.

    Raises:
        DataError: an item is not a valid message; names its number.
    """
    return tuple(_message(item, f"{field_name}, message {number},") for number, item in enumerate(value, start=1))


def _message(value: Any, place: str) -> Message:
    if not isinstance(value, dict):
        raise DataError(f"{place} must be an object with 'role' and 'content', found {describe(value)}.")
    further = [name for name, item in value.items() if name not in MESSAGE_KEYS and item is not None]
    if further:
        raise DataError(f"{place} has {further[0]!r}, but only 'role' and 'content' are supported: delete it.")
    role = field_of(value, "role", place)
    if role not in _ROLES:
        raise DataError(f"{place} has the role {describe(role)}: it must be {', '.join(_ROLES[:-1])} or {_ROLES[-1]}.")
    content = field_of(value, "content", place)
    return Message(role, text_of(content, f"{place} its content", "a text"))


def _distinct(pair: PreferencePair) -> PreferencePair:
    if pair.chosen == pair.rejected:
        raise DataError(
            f"{pair.where}: the chosen and the rejected answer are the same, so neither is preferred: delete the row."
        )
    return pair
