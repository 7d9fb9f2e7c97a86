"""Finds words that a tokenizer without an unknown token cannot encode."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

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
