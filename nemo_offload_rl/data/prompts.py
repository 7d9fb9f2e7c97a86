"""Turns conversations into token ids: prompt files, chat templates, special tokens, and a limit on the length."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Formatter
from typing import TYPE_CHECKING, Any

from nemo_offload_rl.data.errors import DataError
from nemo_offload_rl.data.limits import MAX_TEXT_FILE_BYTES
from nemo_offload_rl.data.problem import Conversation
from nemo_offload_rl.data.vocabulary import ClosedVocabulary
from nemo_offload_rl.storage.regular_file import UnreadableFileError, read_regular_file

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class TokenizedProblem:
    """Token ids of a prompt and of its answer.

    Attributes:
        prompt_ids: at most the format's limit; a longer prompt has lost its beginning.
        answer_ids: what SFT trains on; empty where only the prompt was asked for.
        fits: whether everything fitted into the limit. What does not is left out of the loss.
    """

    prompt_ids: list[int]
    answer_ids: list[int]
    fits: bool


@dataclass(frozen=True)
class PromptFormat:
    """Turns a conversation, such as a problem and its answer, into tokens.

    A tokenizer with a chat template gets the messages; one without gets the text of the one message.

    Attributes:
        tokenizer: the policy's.
        max_tokens: limit on the prompt, or on prompt and answer together.
        prompt_template: text in which ``{}`` stands for the first user message (a literal brace is doubled).
        system_prompt: the system's message, or the first paragraph of a plain text; None for none.
        chat_template_kwargs: further arguments of the chat template.
        add_bos: start with the tokenizer's begin-of-sequence token, where it has one.
        add_eos: end an answer with the end-of-sequence token.
        add_generation_prompt: count the header of the assistant's turn as prompt; otherwise it is part of the answer.
    """

    tokenizer: PreTrainedTokenizerFast
    max_tokens: int
    prompt_template: str = "{}"
    system_prompt: str | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    add_bos: bool = False
    add_eos: bool = True
    add_generation_prompt: bool = True

    def check_vocabulary(self, problems: Iterable[Conversation], *, with_answers: bool) -> None:
        """Refuse problems with a word that the tokenizer has no token for, where it cannot encode such a word.

        Args:
            problems: all of them are looked at, unless the tokenizer encodes every text.
            with_answers: whether answers will be tokenized, too.

        Raises:
            DataError: with the first such word and its place.
        """
        vocabulary = ClosedVocabulary.of(self.tokenizer)
        if vocabulary is None:
            return
        for problem in problems:
            texts = {"prompt": self._prompt_text(problem)}
            if with_answers:
                texts["answer"] = self._answer_text(problem)
            for kind, text in texts.items():
                if (word := vocabulary.unknown_word(text)) is not None:
                    raise DataError(
                        f"{problem.where or 'A problem'}: the {kind} {_shortened(text)!r} has {word!r}, which the "
                        "tokenizer has no token for: change the text (also that of data.default's files and of the "
                        "chat template, which the problem is put into), or take another policy.tokenizer.name."
                    )

    def prompts(self, problems: Sequence[Conversation]) -> list[TokenizedProblem]:
        """The tokens that generation starts from."""
        return [
            TokenizedProblem(ids[-self.max_tokens :], [], fits=len(ids) <= self.max_tokens)
            for ids in self._prompt_ids(problems)
        ]

    def examples(self, problems: Sequence[Conversation]) -> list[TokenizedProblem]:
        """Prompts and answers for supervised training.

        The two are tokenized apart, as a model that generates the answer sees them.

        Raises:
            DataError: the chat template does not render a conversation as its beginning followed by the answer.
        """
        return [
            self._fitted(prompt_ids, answer_ids)
            for prompt_ids, answer_ids in zip(self._prompt_ids(problems), self._answer_ids(problems), strict=True)
        ]

    def _fitted(self, prompt_ids: list[int], answer_ids: list[int]) -> TokenizedProblem:
        fits = len(prompt_ids) + len(answer_ids) <= self.max_tokens
        kept_prompt = prompt_ids[: self.max_tokens]
        return TokenizedProblem(kept_prompt, answer_ids[: self.max_tokens - len(kept_prompt)], fits)

    def _prompt_ids(self, problems: Sequence[Conversation]) -> list[list[int]]:
        bos = self.tokenizer.bos_token_id
        texts = [self._prompt_text(problem) for problem in problems]
        return [
            [bos, *ids] if self.add_bos and bos is not None and ids[:1] != [bos] else ids for ids in self._encode(texts)
        ]

    def _answer_ids(self, problems: Sequence[Conversation]) -> list[list[int]]:
        eos = self.tokenizer.eos_token_id
        texts = [self._answer_text(problem) for problem in problems]
        return [[*ids, eos] if self.add_eos and ids[-1:] != [eos] else ids for ids in self._encode(texts)]

    def _prompt_text(self, problem: Conversation) -> str:
        turns = self._turns(problem)
        if self.tokenizer.chat_template is not None:
            return self._render(turns, problem.where, add_generation_prompt=self.add_generation_prompt)
        if [turn["role"] for turn in turns] not in (["user"], ["system", "user"]):
            raise DataError(
                f"{_place(problem.where)}the prompt is a conversation of {len(turns)} messages, but the tokenizer has "
                "no chat template, so only a user's message, after a system's at most, can be written as text: set "
                "policy.tokenizer.chat_template, or take a policy.tokenizer.name that has one."
            )
        return "\n\n".join(turn["content"] for turn in turns)

    def _answer_text(self, problem: Conversation) -> str:
        if self.tokenizer.chat_template is None:
            return problem.answer.rstrip("\n")
        turns = [*self._turns(problem), {"role": "assistant", "content": problem.answer}]
        whole, prompt = self._render(turns, problem.where, add_generation_prompt=False), self._prompt_text(problem)
        if not whole.startswith(prompt):
            raise DataError(
                f"{_place(problem.where)}policy.tokenizer.chat_template: a conversation with its answer does not start "
                f"with the same conversation without it, so the answer cannot be told apart: {prompt!r} and {whole!r}. "
                "Set data.add_generation_prompt=false, or give a template that renders turns one after another."
            )
        # As in NeMo-RL, an answer ends with the end-of-sequence token, not with a newline that the template adds.
        return whole.removeprefix(prompt).rstrip("\n")

    def _turns(self, problem: Conversation) -> list[dict[str, str]]:
        turns = [{"role": message.role, "content": message.content} for message in problem.context]
        first = next((turn for turn in turns if turn["role"] == "user"), None)
        if first is not None:
            first["content"] = self.prompt_template.format(first["content"])
        if self.system_prompt is None:
            return turns
        if any(turn["role"] == "system" for turn in turns):
            raise DataError(
                f"{_place(problem.where)}the prompt has a system's message, and data.default.system_prompt_file gives "
                "another: take the message out of the data, or set data.default.system_prompt_file=null."
            )
        return [{"role": "system", "content": self.system_prompt}, *turns]

    def _render(self, turns: list[dict[str, str]], where: str, *, add_generation_prompt: bool) -> str:
        from jinja2 import TemplateError

        try:
            return self.tokenizer.apply_chat_template(
                turns, tokenize=False, add_generation_prompt=add_generation_prompt, **self.chat_template_kwargs
            )
        # What a template's own expressions raise, too: 1/0, an argument of the wrong type, a list without end.
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

    def _encode(self, texts: list[str]) -> list[list[int]]:
        return self.tokenizer(texts, add_special_tokens=False)["input_ids"]


def _place(where: str) -> str:
    return f"{where}: " if where else ""


def _shortened(text: str) -> str:
    return text if len(text) <= 100 else f"{text[:97]}..."


def read_prompt_file(path: str | None, key: str) -> str:
    """The template in a file, or the bare prompt where ``path`` is None.

    Raises:
        DataError: the file cannot be read, or it is not a template of one prompt.
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
    """The text of a file that the recipe's ``key`` names.

    Raises:
        DataError: the file cannot be read.
    """
    try:
        # A byte order mark is no part of the text.
        text = read_regular_file(Path(path), MAX_TEXT_FILE_BYTES).decode("utf-8-sig")
    except (UnreadableFileError, UnicodeDecodeError) as error:
        reason = error.reason if isinstance(error, UnreadableFileError) else error
        raise DataError(f"{key}: {path} cannot be read: {reason}") from error
    return text.replace("\r\n", "\n").replace("\r", "\n")
