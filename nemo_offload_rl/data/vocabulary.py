"""Finds words that a tokenizer cannot encode, and tokens of a tokenizer that a model does not have."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from nemo_offload_rl.data.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class ClosedVocabulary:
    """Lists the words that a tokenizer can encode, for a tokenizer that fails on any other word.

    Attributes:
        backend: the `tokenizers.Tokenizer`.
        words: the words that have a token.
        added: matches the added tokens, which are found before a text is split into words; None without any.
    """

    backend: Any
    words: frozenset[str]
    added: re.Pattern[str] | None

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerFast) -> Self | None:
        """Returns the vocabulary of a word-level tokenizer without an unknown token; None for other tokenizers."""
        from tokenizers.models import WordLevel

        backend = getattr(tokenizer, "backend_tokenizer", None)  # a tokenizer in Python has none
        model = getattr(backend, "model", None)
        if not isinstance(model, WordLevel):
            return None
        words = frozenset(tokenizer.get_vocab())
        if model.unk_token in words:
            return None
        added = sorted((re.escape(token) for token in tokenizer.get_added_vocab()), key=len, reverse=True)
        return cls(backend, words, re.compile("|".join(added)) if added else None)

    def unknown_word(self, text: str) -> str | None:
        """Returns the first word of a text that has no token; None if all words have one."""
        for part in [text] if self.added is None else self.added.split(text):
            normalizer, splitter = self.backend.normalizer, self.backend.pre_tokenizer
            normal = part if normalizer is None else normalizer.normalize_str(part)
            words = [normal] if splitter is None else [word for word, _ in splitter.pre_tokenize_str(normal)]
            for word in words:
                if word and word not in self.words:
                    return word
        return None


@dataclass(frozen=True)
class OutsideTokens:
    """Holds the tokens of a tokenizer that are outside the model's vocabulary, and so have no embedding.

    Tensor parallelism would embed them as zeros; without it, the lookup fails, on a GPU with a device assert.

    Attributes:
        by_id: the tokens, by their ids.
        vocab_size: number of tokens of the model, without padding.
    """

    by_id: Mapping[int, str]
    vocab_size: int

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerFast, vocab_size: int) -> Self:
        """Returns those of a tokenizer and a model with so many tokens."""
        return cls({token: name for name, token in tokenizer.get_vocab().items() if token >= vocab_size}, vocab_size)

    def refuse(self, token_ids: Iterable[int], what: str) -> None:
        """Refuses token ids that the model does not have.

        Args:
            token_ids: the ids that the run would use.
            what: the subject of the message.

        Raises:
            DataError: one of them is outside the model's vocabulary.
        """
        for token in token_ids if self.by_id else ():
            if token in self.by_id:
                raise DataError(
                    f"{what} the token {self.by_id[token]!r}, whose id {token} is outside the model's vocabulary (0 to "
                    f"{self.vocab_size - 1}): take the model's own tokenizer in policy.tokenizer.name, or a model that "
                    "has the token."
                )


NONE_OUTSIDE = OutsideTokens({}, 0)
