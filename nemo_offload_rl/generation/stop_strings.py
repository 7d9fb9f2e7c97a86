"""Finds stop strings in an answer while it is sampled, token by token."""

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from nemo_offload_rl.config.schema.policy import GRPOPolicyConfig

# Number of a prompt's last tokens that decide whether the answer's first token is spelled with a leading space.
_NUM_PROMPT_TOKENS = 8
# What stands for the bytes of an incomplete character in a decoded text.
_INCOMPLETE = "\ufffd"
# Error of `tokenizers` if a token changes the text before it, as a token that completes a character can.
_TEXT_HAS_CHANGED = "Invalid prefix"


def needs_tokenizer(policy: GRPOPolicyConfig) -> bool:
    """Returns whether the engine of a recipe's `policy` section needs a tokenizer: for stop strings or bad words."""
    generation = policy["generation"]
    return bool(generation["stop_strings"] or generation["bad_words"])


class AnswerText:
    """Decodes an answer token by token, and searches its text for stop strings.

    Args:
        tokenizer: Decodes the tokens; special tokens are decoded as they are written.
        stop_strings: The strings to search for, none of them empty.
        prompt_ids: The prompt, whose own text is not searched.
    """

    def __init__(self, tokenizer: Tokenizer, stop_strings: Sequence[str], prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._stop_strings = stop_strings
        self._num_kept = max(map(len, stop_strings), default=1) - 1
        self._tail = ""
        ids = list(prompt_ids[-_NUM_PROMPT_TOKENS:])
        if tokenizer.decode(ids, skip_special_tokens=False).endswith(_INCOMPLETE):
            ids = []  # DecodeStream would wait for the rest of the character, and give the prompt's text with it
        self._stream = DecodeStream(ids=ids, skip_special_tokens=False)

    def add(self, token: int) -> bool:
        """Adds a token and returns whether the text now has a stop string."""
        text = self._tail + self._spell(token)
        self._tail = text[len(text) - self._num_kept :] if self._num_kept < len(text) else text
        return any(stop in text for stop in self._stop_strings)

    def _spell(self, token: int) -> str:
        """Returns the text that the token adds, which is empty while a character is incomplete."""
        try:
            added = self._stream.step(self._tokenizer, token)
        except Exception as error:  # tokenizers, written in Rust, raises no narrower type
            if not str(error).startswith(_TEXT_HAS_CHANGED):
                raise
            self._stream = DecodeStream(skip_special_tokens=False)
            added = self._stream.step(self._tokenizer, token)
        return added or ""
