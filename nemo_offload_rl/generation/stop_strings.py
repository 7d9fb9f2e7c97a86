"""Finds stop strings in answers while these are sampled, token by token."""

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

# The last tokens of a prompt, which settle how the first one of its answer is spelt: with a space before it or without.
_NUM_PROMPT_TOKENS = 8
# What `tokenizers` says where a token changes the text before it, as one that completes a character can.
_TEXT_HAS_CHANGED = "Invalid prefix"


def stop_strings_of(policy: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the stop strings of a recipe's `policy` section."""
    generation = policy["generation"]
    return tuple(generation["stop_strings"] or ()) if "stop_strings" in generation else ()


class AnswerText:
    """Decodes an answer token by token, and looks for stop strings in its text.

    Args:
        tokenizer: Spells the tokens, special ones as they are written.
        stop_strings: What to look for; each has at least one character.
        prompt_ids: The prompt, whose own text is not looked at.
    """

    def __init__(self, tokenizer: Tokenizer, stop_strings: Sequence[str], prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._stop_strings = stop_strings
        self._num_kept = max(map(len, stop_strings), default=1) - 1
        self._tail = ""
        self._stream = DecodeStream(ids=list(prompt_ids[-_NUM_PROMPT_TOKENS:]), skip_special_tokens=False)

    def add(self, token: int) -> bool:
        """Add a token and say whether the text now has a stop string."""
        text = self._tail + self._spell(token)
        self._tail = text[len(text) - self._num_kept :] if self._num_kept < len(text) else text
        return any(stop in text for stop in self._stop_strings)

    def _spell(self, token: int) -> str:
        """Returns what the token adds to the text: nothing while a character lacks bytes."""
        try:
            added = self._stream.step(self._tokenizer, token)
        except Exception as error:  # tokenizers, in Rust, raises nothing narrower
            if not str(error).startswith(_TEXT_HAS_CHANGED):
                raise
            self._stream = DecodeStream(skip_special_tokens=False)
            added = self._stream.step(self._tokenizer, token)
        return added or ""
