"""Tokenizers that have no token for some words, and none that stands for an unknown one: encoding such a word fails."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class ClosedVocabulary:
    """Lists the words of a tokenizer that has no token for any other word.

    Attributes:
        backend: the `tokenizers.Tokenizer`.
        words: what it has a token for.
        added: matches the tokens that are found in a text before it is split into words; None where there are none.
    """

    backend: Any
    words: frozenset[str]
    added: re.Pattern[str] | None

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerFast) -> Self | None:
        """Returns the vocabulary of a tokenizer of whole words without an unknown token; None of others."""
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
        """Returns the first word that has no token; None where all have."""
        for part in [text] if self.added is None else self.added.split(text):
            normalizer, splitter = self.backend.normalizer, self.backend.pre_tokenizer
            normal = part if normalizer is None else normalizer.normalize_str(part)
            words = [normal] if splitter is None else [word for word, _ in splitter.pre_tokenize_str(normal)]
            for word in words:
                if word and word not in self.words:
                    return word
        return None
