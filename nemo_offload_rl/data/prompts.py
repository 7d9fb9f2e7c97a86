"""Turns conversations into token ids, with prompt files, system prompts, chat templates and a length limit."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from string import Formatter
from typing import TYPE_CHECKING, Any, overload

from nemo_offload_rl.data.preferences import PreferencePair
from nemo_offload_rl.data.problem import (
    CHECK_LIMIT_S,
    MAX_TEXT_FILE_BYTES,
    AnsweredContext,
    Conversation,
    DataError,
    Message,
)
from nemo_offload_rl.data.tokenizer import NONE_OUTSIDE, ClosedVocabulary, OutsideTokens
from nemo_offload_rl.storage.disk import UnreadableFileError, read_regular_file

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class TokenizedProblem:
    """Holds the token ids of a prompt and of its answer.

    Attributes:
        prompt_ids: tokens of the prompt, cut to the format's limit: ``prompts`` drops the beginning, ``examples`` the
            end.
        answer_ids: tokens that SFT trains on; empty if only the prompt was asked for.
        fits: whether everything is below the limit (or at most at it, if ``examples`` was asked for that); a problem
            that does not fit is left out of the loss.
        trained_in_prompt: positions in prompt_ids of the assistant's earlier messages, if SFT also trains these.
    """

    prompt_ids: list[int]
    answer_ids: list[int]
    fits: bool
    trained_in_prompt: tuple[range, ...] = ()


@dataclass(frozen=True)
class PromptFormat:
    """Turns a conversation, such as a problem and its answer, into tokens.

    The chat template renders the messages; without one, the prompt is the text of the user message, after a system
    message if there is one.

    Attributes:
        tokenizer: the policy's tokenizer.
        max_tokens: the most tokens of the prompt, or of prompt and answer together, which longer ones are cut to.
        chat_template_kwargs: further arguments of the chat template.
        add_bos: start with the tokenizer's begin-of-sequence token, where it has one.
        add_eos: end an answer with the end-of-sequence token.
        add_generation_prompt: make the header of the assistant's turn part of the prompt; otherwise of the answer.
        outside: tokens of the tokenizer that the model does not have, and which texts may not contain.
    """

    tokenizer: PreTrainedTokenizerFast
    max_tokens: int
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    add_bos: bool = False
    add_eos: bool = True
    add_generation_prompt: bool = True
    outside: OutsideTokens = NONE_OUTSIDE

    @property
    def pad_token_id(self) -> int:
        """The id that batches are padded with: the tokenizer's, or 0 where the model does not have that token."""
        own: int = self.tokenizer.pad_token_id
        return 0 if own in self.outside.by_id else own

    def check_rows(
        self, problems: Iterable[Conversation], *, with_answers: bool, limit_s: float = CHECK_LIMIT_S
    ) -> int:
        """Reads and renders problems, one after another, so that a run does not fail halfway.

        Args:
            problems: the problems.
            with_answers: whether answers will be tokenized, too.
            limit_s: the seconds after which it returns without having checked the other problems.

        Returns:
            The number of problems that were checked.

        Raises:
            DataError: a row cannot be read, the chat template cannot render it, it has a word that the tokenizer has
                no token for (if it cannot encode unknown words), or a token that the model does not have, or its prompt
                is empty and is to be answered by the model; names the first such row.
        """
        vocabulary = ClosedVocabulary.of(self.tokenizer)
        unknown_word = (lambda text: None) if vocabulary is None else vocabulary.unknown_word
        end, num_checked = time.monotonic() + limit_s, 0
        for problem in problems:
            if not with_answers:
                _refuse_empty(problem)
            texts = {"prompt": "".join(text for text, _ in self._prompt_pieces(problem))}
            if with_answers:
                texts["answer"] = self._rendered_answer(problem)
            for kind, text in texts.items():
                if (word := unknown_word(text)) is not None:
                    raise DataError(
                        f"{problem.where or 'A problem'}: the {kind} {_shortened(text)!r} has {word!r}, which the "
                        "tokenizer has no token for: change the text (also that of prompt files and of the "
                        "chat template, which the problem is put into), or take another policy.tokenizer.name."
                    )
            if self.outside.by_id:
                self._encode(list(texts.values()), problem.where)
            num_checked += 1
            if time.monotonic() >= end:
                break
        return num_checked

    def prompts(self, problems: Sequence[Conversation]) -> list[TokenizedProblem]:
        """Returns the tokens that generation starts from; a prompt of exactly ``max_tokens`` does not fit.

        Raises:
            DataError: a prompt is empty, or the chat template cannot render it.
        """
        for problem in problems:
            _refuse_empty(problem)
        asked = [
            replace(problem, trains_all_answers=False) if isinstance(problem, AnsweredContext) else problem
            for problem in problems
        ]
        return [
            TokenizedProblem(ids[-self.max_tokens :], [], fits=len(ids) < self.max_tokens)
            for ids, _ in self._prompt_ids(asked)
        ]

    def examples(self, problems: Sequence[Conversation], *, may_reach_limit: bool = False) -> list[TokenizedProblem]:
        """Returns the tokens of prompts and answers for supervised training.

        Prompt and answer are tokenized separately, as they are when a model generates the answer.

        Args:
            problems: the conversations with their answers.
            may_reach_limit: whether an example of exactly ``max_tokens`` fits. In NeMo-RL it does for preference pairs
                alone.

        Raises:
            DataError: the chat template does not render a conversation as its beginning followed by the answer.
        """
        return [
            self._fitted(*prompt, answer_ids, self.max_tokens if may_reach_limit else self.max_tokens - 1)
            for prompt, answer_ids in zip(self._prompt_ids(problems), self._answer_ids(problems), strict=True)
        ]

    def _fitted(
        self, prompt_ids: list[int], trained: tuple[range, ...], answer_ids: list[int], longest: int
    ) -> TokenizedProblem:
        if len(prompt_ids) + len(answer_ids) <= longest:
            return TokenizedProblem(prompt_ids, answer_ids, True, trained)
        kept_prompt = prompt_ids[: self.max_tokens]
        return TokenizedProblem(kept_prompt, answer_ids[: self.max_tokens - len(kept_prompt)], False)

    def _prompt_ids(self, problems: Sequence[Conversation]) -> Iterator[tuple[list[int], tuple[range, ...]]]:
        """Yields the tokens of each prompt, and the positions of its trained messages."""
        bos = self.tokenizer.bos_token_id
        prompts = [self._prompt_pieces(problem) for problem in problems]
        encoded = iter(self._encode([text for pieces in prompts for text, _ in pieces]))
        for pieces in prompts:
            prompt_ids: list[int] = []
            trained = []
            for _, is_trained in pieces:
                ids = next(encoded)
                if self.add_bos and bos is not None and not prompt_ids and ids[:1] != [bos]:
                    prompt_ids.append(bos)
                if is_trained:
                    trained.append(range(len(prompt_ids), len(prompt_ids) + len(ids)))
                prompt_ids.extend(ids)
            yield prompt_ids, tuple(trained)

    def _prompt_pieces(self, problem: Conversation) -> list[tuple[str, bool]]:
        """Returns the prompt's text in pieces, each with whether it is trained; one piece if none of it is trained.

        Pieces are tokenized separately.
        """
        whole = self._prompt_text(problem)
        pieces: list[tuple[str, bool]] = []
        done = ""
        if isinstance(problem, AnsweredContext) and problem.trains_all_answers:
            for number, message in enumerate(problem.context):
                if message.role == "assistant":
                    earlier = replace(problem, context=problem.context[:number], answer=message.content)
                    before = self._prompt_text(earlier)
                    after = before + self._rendered_answer(earlier)
                    new = (_rest(before, done, problem.where), False), (after.removeprefix(before), True)
                    pieces += [piece for piece in new if piece[0]]
                    done = after
        return [*pieces, (_rest(whole, done, problem.where), False)]

    def _answer_ids(self, problems: Sequence[Conversation]) -> list[list[int]]:
        return self._encode([self._answer_text(problem) for problem in problems])

    def _prompt_text(self, problem: Conversation) -> str:
        turns = _turns(problem)
        trains_all = isinstance(problem, AnsweredContext) and problem.trains_all_answers
        if trains_all and not turns:  # the assistant begins
            return ""
        if self.tokenizer.chat_template is not None:
            # As in NeMo-RL, an answer to a system message, or to another answer, is trained with its header.
            opens = self.add_generation_prompt and (not trains_all or turns[-1]["role"] in ("user", "tool"))
            return self._render(turns, problem.where, add_generation_prompt=opens)
        if [turn["role"] for turn in turns] not in (["user"], ["system", "user"]):
            raise DataError(
                f"{_place(problem.where)}the prompt is a conversation of {len(turns)} messages, but the tokenizer has "
                "no chat template, so only a user message, or a system and then a user message, can be written as "
                "text: set policy.tokenizer.chat_template, or take a policy.tokenizer.name that has one."
            )
        return "\n\n".join(turn["content"] for turn in turns)

    def _answer_text(self, problem: Conversation) -> str:
        text, eos = self._rendered_answer(problem), self.tokenizer.eos_token
        # As in NeMo-RL, the newline that ChatML templates put after the end-of-sequence token stays, and is trained.
        return text + eos if self.add_eos and not text.rstrip("\n").endswith(eos) else text

    def _rendered_answer(self, problem: Conversation) -> str:
        if self.tokenizer.chat_template is None:
            return problem.answer
        turns = [*_turns(problem), {"role": "assistant", "content": problem.answer}]
        whole = self._render(turns, problem.where, add_generation_prompt=False)
        return _rest(whole, self._prompt_text(problem), problem.where)

    def _render(self, turns: list[dict[str, str]], where: str, *, add_generation_prompt: bool) -> str:
        from jinja2 import TemplateError

        try:
            return self.tokenizer.apply_chat_template(
                turns, tokenize=False, add_generation_prompt=add_generation_prompt, **self.chat_template_kwargs
            )
        # A template's expressions raise other errors, too: 1/0, an argument of the wrong type, an endless list.
        except (
            TemplateError,
            ArithmeticError,
            AttributeError,
            LookupError,
            MemoryError,
            TypeError,
            ValueError,
        ) as error:
            raise DataError(
                f"{_place(where)}policy.tokenizer.chat_template, or that of the tokenizer, cannot be rendered with "
                f"chat_template_kwargs {self.chat_template_kwargs}: {type(error).__name__}: {_shortened(str(error))}"
            ) from error

    def _encode(self, texts: list[str], where: str = "") -> list[list[int]]:
        encoded: list[list[int]] = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        if self.outside.by_id:
            for text, ids in zip(texts, encoded, strict=True):
                self.outside.refuse(ids, f"{_place(where)}the text {_shortened(text)!r} has")
        return encoded


def _turns(problem: Conversation) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.content} for message in problem.context]


def _refuse_empty(problem: Conversation) -> None:
    if not problem.context or not problem.context[-1].content.strip():
        raise DataError(
            f"{_place(problem.where)}the prompt is empty, so there is nothing to answer: write it, or delete the row."
        )


def _rest(text: str, beginning: str, where: str) -> str:
    """Returns the part of a rendered conversation after `beginning`.

    Raises:
        DataError: the conversation does not start with `beginning`.
    """
    if not text.startswith(beginning):
        raise DataError(
            f"{_place(where)}policy.tokenizer.chat_template: a conversation with its answer does not start with the "
            f"same conversation without it, so the answer cannot be told apart: {beginning!r} and {text!r}. Set "
            "data.add_generation_prompt=false, or give a template that renders turns one after another."
        )
    return text.removeprefix(beginning)


def _place(where: str) -> str:
    return f"{where}: " if where else ""


def _shortened(text: str) -> str:
    return text if len(text) <= 100 else f"{text[:97]}..."


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
