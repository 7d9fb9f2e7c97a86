"""Makes samples from the rows of named datasets, as NeMo-RL does.

Users cannot correct these datasets, so empty answers, and pairs of equal answers, are accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from nemo_offload_rl.data.datasets import ProblemForm
from nemo_offload_rl.data.errors import DataError
from nemo_offload_rl.data.fields import RowForm, describe, field_of, text_of
from nemo_offload_rl.data.preferences import MESSAGE_KEYS, PreferencePair, answer_of, context_of, messages_of
from nemo_offload_rl.data.problem import AnsweredContext, Message, Problem
from nemo_offload_rl.named_datasets import Form


@dataclass(frozen=True)
class VerlForm:
    """Reads rows in verl's format, such as DAPO's: a prompt of messages, and the answer in ``reward_model``.

    Attributes:
        keys: columns of the prompt and of the reward.
    """

    keys: tuple[str, ...]

    @property
    def nested_keys(self) -> tuple[str, ...]:
        """The fields of a message, and of the answer."""
        return *MESSAGE_KEYS, "ground_truth"

    def sample(self, row: Mapping[str, Any], where: str) -> Problem:
        """Makes a problem from the first message and the known answer."""
        prompt, reward = self.keys
        messages = field_of(row, prompt, where)
        if not isinstance(messages, list) or not messages or not isinstance(messages[0], dict):
            raise DataError(f"{where}: the field {prompt!r} must be a list of messages, found {describe(messages)}.")
        judged = field_of(row, reward, where)
        if not isinstance(judged, dict):
            raise DataError(f"{where}: the field {reward!r} must be an object, found {describe(judged)}.")
        content = field_of(messages[0], "content", f"{where}: the field {prompt!r}")
        answer = field_of(judged, "ground_truth", f"{where}: the field {reward!r}")
        return Problem(
            text_of(content, f"{where}: the content of {prompt!r}", "a text"),
            text_of(answer, f"{where}: {reward}.ground_truth"),
            where,
        )


@dataclass(frozen=True)
class Gsm8kForm:
    """Reads problems whose answer follows the derivation, after ``####``.

    Attributes:
        keys: columns of the problem and of the derivation with the answer.
    """

    keys: tuple[str, ...]
    nested_keys: tuple[str, ...] = ()

    def sample(self, row: Mapping[str, Any], where: str) -> Problem:
        """Makes a problem with the answer, without its derivation."""
        problem, solution = (text_of(field_of(row, key, where), f"{where}: the field {key!r}") for key in self.keys)
        _, mark, answer = solution.partition("####")
        if not mark:
            raise DataError(f"{where}: the field {self.keys[1]!r} has no '####', after which the answer stands.")
        return Problem(problem, answer.partition("####")[0].strip(), where)


@dataclass(frozen=True)
class SquadForm:
    """Reads questions about a text: the text becomes the system message, the first of the answers is used.

    Attributes:
        keys: columns of the question, the text and the answers.
    """

    keys: tuple[str, ...]
    nested_keys: tuple[str, ...] = ("text",)

    def sample(self, row: Mapping[str, Any], where: str) -> AnsweredContext:
        """Makes a conversation from text, question and answer."""
        question, text = (
            text_of(field_of(row, key, where), f"{where}: the field {key!r}", "a text") for key in self.keys[:2]
        )
        place = f"{where}: the field {self.keys[2]!r}"
        answers = field_of(row, self.keys[2], where)
        texts = field_of(answers, "text", place) if isinstance(answers, dict) else None
        if not isinstance(texts, list) or not texts:
            raise DataError(f"{place} must be an object with a list 'text' of one answer or more.")
        answer = text_of(texts[0], f"{place}: text[0]", "a text")
        return AnsweredContext((Message("system", text), Message("user", question)), answer, where)


@dataclass(frozen=True)
class MessagesForm:
    """Reads conversations that end with the assistant's message.

    Attributes:
        keys: the column of the messages.
    """

    keys: tuple[str, ...]
    nested_keys: tuple[str, ...] = MESSAGE_KEYS

    def sample(self, row: Mapping[str, Any], where: str) -> AnsweredContext:
        """Makes a conversation in which SFT also trains the assistant's earlier messages."""
        [key] = self.keys
        place = f"{where}: the field {key!r}"
        context, answer = _split_last(field_of(row, key, where), place)
        return AnsweredContext(context, answer, where, trains_all_answers=True)


@dataclass(frozen=True)
class RankedResponsesForm:
    """Reads HelpSteer3's rows: messages, two responses, and a number whose sign says which of them is preferred.

    If the number is 0, both answers of the pair are the first response, as in NeMo-RL, and no preference is learnt.

    Attributes:
        keys: columns of the messages, of the responses and of the preference.
    """

    keys: tuple[str, ...]
    nested_keys: tuple[str, ...] = MESSAGE_KEYS

    def sample(self, row: Mapping[str, Any], where: str) -> PreferencePair:
        """Makes a pair from the preferred response and the other one."""
        context_key, *response_keys, preference_key = self.keys
        context = context_of(field_of(row, context_key, where), f"{where}: the field {context_key!r}")
        first, second = (
            answer_of(field_of(row, key, where), context, f"{where}: the field {key!r}", may_be_empty=True)
            for key in response_keys
        )
        preference = field_of(row, preference_key, where)
        if not isinstance(preference, int) or isinstance(preference, bool):
            raise DataError(f"{where}: the field {preference_key!r} must be an integer, found {describe(preference)}.")
        if preference > 0:
            return PreferencePair(context, second, first, where)
        return PreferencePair(context, first, second if preference < 0 else first, where)


@dataclass(frozen=True)
class TwoConversationsForm:
    """Reads rows of two conversations that differ in their last message, the assistant's.

    Attributes:
        keys: columns of the preferred conversation and of the other one.
    """

    keys: tuple[str, ...]
    nested_keys: tuple[str, ...] = MESSAGE_KEYS

    def sample(self, row: Mapping[str, Any], where: str) -> PreferencePair:
        """Makes a pair from the last messages of both conversations."""
        chosen_key, rejected_key = self.keys
        context, chosen = _split_last(field_of(row, chosen_key, where), f"{where}: the field {chosen_key!r}")
        place = f"{where}: the field {rejected_key!r}"
        rejected = answer_of(field_of(row, rejected_key, where), context, place, may_be_empty=True)
        return PreferencePair(context, chosen, rejected, where)


def _split_last(value: Any, place: str) -> tuple[tuple[Message, ...], str]:
    """Returns the messages before the last one, and the text of the last one, which is the assistant's."""
    if not isinstance(value, list):
        raise DataError(f"{place} must be a list of messages, found {describe(value)}.")
    messages = messages_of(value, place)
    context = context_of(value[:-1], f"{place}, without its last message,")
    return context, answer_of(value, messages[:-1], place, may_be_empty=True)


FORMS: Mapping[Form, Callable[[tuple[str, ...]], RowForm[Any]]] = MappingProxyType(
    {
        "columns": lambda keys: ProblemForm(*keys),
        "verl": VerlForm,
        "gsm8k": Gsm8kForm,
        "squad": SquadForm,
        "messages": MessagesForm,
        "ranked_responses": RankedResponsesForm,
        "two_conversations": TwoConversationsForm,
    }
)
