"""Applies prompt files (templates) and system prompts to the prompts of a dataset."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from string import Formatter
from typing import Any, overload

from nemo_offload_rl.data.errors import DataError
from nemo_offload_rl.data.limits import MAX_TEXT_FILE_BYTES
from nemo_offload_rl.data.preferences import PreferencePair
from nemo_offload_rl.data.problem import AnsweredContext, Conversation, Message
from nemo_offload_rl.storage.regular_file import UnreadableFileError, read_regular_file


@dataclass(frozen=True)
class PromptTexts:
    """Applies a template and a system prompt to samples.

    Attributes:
        template: text in which ``{}`` stands for the first user message (a literal brace is doubled).
        system: the system prompt, which becomes the system message or, without a chat template, the first paragraph of
            the text; None for none.
    """

    template: str = "{}"
    system: str | None = None

    def applied(self, sample: Any) -> Any:
        """Returns the problem, conversation or pair with template and system prompt applied to its messages.

        Raises:
            DataError: the data also has a system message.
        """
        if isinstance(sample, PreferencePair):
            return replace(sample, context=self._context(sample))
        trains_all = isinstance(sample, AnsweredContext) and sample.trains_all_answers
        return AnsweredContext(self._context(sample), sample.answer, sample.where, trains_all)

    def _context(self, sample: Conversation | PreferencePair) -> tuple[Message, ...]:
        messages = list(sample.context)
        first = next((number for number, message in enumerate(messages) if message.role == "user"), None)
        if first is not None:
            messages[first] = Message("user", self.template.format(messages[first].content))
        if self.system is None:
            return tuple(messages)
        if any(message.role == "system" for message in messages):
            place = f"{sample.where}: " if sample.where else ""
            raise DataError(
                f"{place}the prompt has a system message, and system_prompt_file gives another: take the message "
                "out of the data, or set system_prompt_file to null for this dataset."
            )
        return (Message("system", self.system), *messages)


class PromptedSamples[Sample](Sequence[Sample]):
    """Presents the samples of a dataset with its prompt files applied.

    Args:
        samples: problems, conversations or pairs.
        texts: the template and the system prompt.
    """

    def __init__(self, samples: Sequence[Sample], texts: PromptTexts) -> None:
        self._samples = samples
        self._texts = texts

    def __len__(self) -> int:
        return len(self._samples)

    @overload
    def __getitem__(self, index: int) -> Sample: ...

    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...

    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        if isinstance(index, slice):
            return [self._texts.applied(sample) for sample in self._samples[index]]
        sample: Sample = self._texts.applied(self._samples[index])
        return sample

    def __iter__(self) -> Iterator[Sample]:
        return map(self._texts.applied, self._samples)


def read_prompt_file(path: str | None, key: str) -> str:
    """Returns the template in a file, or ``{}``, the bare prompt, if ``path`` is None.

    Raises:
        DataError: the file cannot be read, or is not a template with one prompt.
    """
    if path is None:
        return "{}"
    template = read_text_file(path, key)
    try:
        fields = [field for _, *field in Formatter().parse(template) if field[0] is not None]
    except ValueError as error:
        raise DataError(f"{key}: {path} is not a prompt template ({error}): {_TEMPLATE_RULE}") from error
    for name, specification, conversion in fields:
        if name not in ("", "0") or specification or conversion:
            written = f"{name}{'!' + conversion if conversion else ''}{':' + specification if specification else ''}"
            raise DataError(f"{key}: {path} is not a prompt template (it has {{{written}}}): {_TEMPLATE_RULE}")
    if not fields:
        raise DataError(f"{key}: {path} has no {{}}, so every prompt would be the same: write {{}} where it goes.")
    if {name for name, _, _ in fields} == {"", "0"} or [name for name, _, _ in fields].count("") > 1:
        raise DataError(f"{key}: {path} is not a prompt template (it has {{}} more than once): write {{0}} for each.")
    return template


_TEMPLATE_RULE = "write {} where the prompt goes, and {{ or }} for a brace."


def read_text_file(path: str, key: str) -> str:
    """Returns the text of a file that the recipe's ``key`` names.

    Raises:
        DataError: the file cannot be read.
    """
    try:
        # utf-8-sig drops a byte order mark.
        text = read_regular_file(Path(path), MAX_TEXT_FILE_BYTES).decode("utf-8-sig")
    except (UnreadableFileError, UnicodeDecodeError) as error:
        reason = error.reason if isinstance(error, UnreadableFileError) else error
        raise DataError(f"{key}: {path} cannot be read: {reason}") from error
    return text.replace("\r\n", "\n").replace("\r", "\n")
