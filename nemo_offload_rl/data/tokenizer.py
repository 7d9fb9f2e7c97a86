"""Loads tokenizers from a folder or the hub, and builds one for the arithmetic task."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_offload_rl.data.errors import DataError
from nemo_offload_rl.data.vocabulary import ClosedVocabulary, OutsideTokens
from nemo_offload_rl.hub import cache_only, needs_code, why_missing
from nemo_offload_rl.storage.disk import system_error

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

ARITHMETIC = "arithmetic"


def load_tokenizer(
    name: str, chat_template: str | None = None, *, trust_remote_code: bool = False
) -> PreTrainedTokenizerFast:
    """Loads a tokenizer, and makes sure that it has an end-of-sequence and a padding token.

    Args:
        name: ``arithmetic``, a folder, or a name on the Hugging Face hub.
        chat_template: a Jinja template that replaces the tokenizer's own; None keeps its own, if it has one.
        trust_remote_code: whether code in the tokenizer's files may run.

    Raises:
        DataError: no tokenizer can be loaded from ``name``, or it has no end-of-sequence token.
    """
    if name == ARITHMETIC:
        tokenizer = arithmetic_tokenizer()
    else:
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(
                name, local_files_only=cache_only(name), trust_remote_code=trust_remote_code
            )
        except (OSError, ValueError) as error:
            if needs_code(error):
                raise DataError(
                    f"policy.tokenizer.name is {name!r}, which needs code of its own, which only runs with "
                    "policy.trust_remote_code: true; set it if you trust that code, or take another tokenizer."
                ) from error
            if (missing := why_missing(name)) is not None:
                raise DataError(
                    f"policy.tokenizer.name is {name!r}, {missing}; give a folder with a tokenizer."
                ) from error
            raise DataError(f"policy.tokenizer.name: no tokenizer could be loaded from {name!r}: {error}") from error
    if tokenizer.eos_token_id is None:
        raise DataError(
            f"policy.tokenizer.name: the tokenizer {name!r} has no end-of-sequence token; training needs one."
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    return tokenizer


def check_token_ids(tokenizer: PreTrainedTokenizerFast, token_ids: Sequence[int], key: str) -> None:
    """Checks that the tokenizer has all of the token ids.

    Args:
        tokenizer: the policy's tokenizer.
        token_ids: the ids.
        key: the recipe's key with the ids, for the message.

    Raises:
        DataError: the tokenizer lacks one of them.
    """
    known = set(tokenizer.get_vocab().values())
    unknown = [token for token in token_ids if token not in known]
    if unknown:
        raise DataError(
            f"{key} has {unknown[0]}, which is no token of policy.tokenizer.name; its {len(known)} tokens have ids "
            f"from {min(known)} to {max(known)}."
        )


def fast_tokenizer(tokenizer: PreTrainedTokenizerFast, key: str = "policy.generation.stop_strings") -> Tokenizer:
    """Returns the `tokenizers.Tokenizer` behind a tokenizer of transformers.

    Args:
        tokenizer: the policy's tokenizer.
        key: the recipe's key that needs it, for the message.

    Raises:
        DataError: the tokenizer is implemented in Python and has none.
    """
    backend: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", None)  # a tokenizer in Python has none
    if backend is None:
        raise DataError(
            f"{key} needs a fast tokenizer, but policy.tokenizer.name is a "
            f"{type(tokenizer).__name__}, which is implemented in Python; give one with a tokenizer.json, or "
            "delete the key."
        )
    return backend


def check_stop_strings(tokenizer: PreTrainedTokenizerFast, stop_strings: Sequence[str], key: str) -> None:
    """Checks that answers can contain the stop strings.

    Args:
        tokenizer: the policy's tokenizer.
        stop_strings: the strings that end an answer.
        key: the recipe's key with the strings, for the message.

    Raises:
        DataError: a stop string has a word without a token, or the tokenizer is not a fast tokenizer.
    """
    if not stop_strings:
        return
    fast_tokenizer(tokenizer, key)
    vocabulary = ClosedVocabulary.of(tokenizer)
    for text in stop_strings if vocabulary is not None else ():
        if vocabulary is not None and (word := vocabulary.unknown_word(text)) is not None:
            raise DataError(
                f"{key} has {text!r}, in which {word!r} is no token of policy.tokenizer.name; no answer would end with "
                "it."
            )


def check_bad_words(tokenizer: PreTrainedTokenizerFast, words: Sequence[str], key: str, outside: OutsideTokens) -> None:
    """Checks that the tokenizer can encode banned words, alone and behind a space, as both are banned.

    Args:
        tokenizer: the policy's tokenizer.
        words: the banned words.
        key: the recipe's key with the words, for the message.
        outside: the tokenizer's tokens that the model does not have.

    Raises:
        DataError: a word has no token or an unknown one, also to the model, or the tokenizer is not a fast tokenizer.
    """
    if not words:
        return
    backend, vocabulary = fast_tokenizer(tokenizer, key), ClosedVocabulary.of(tokenizer)
    for text in (space + word.lstrip() for word in words for space in ("", " ")):
        if vocabulary is not None and (unknown := vocabulary.unknown_word(text)) is not None:
            raise DataError(
                f"{key} has {text.lstrip()!r}, but in {text!r}, which it stands for, {unknown!r} is no token of "
                "policy.tokenizer.name; delete the word."
            )
        ids = backend.encode(text, add_special_tokens=False).ids
        if not ids:
            raise DataError(f"{key} has {text!r}, of which policy.tokenizer.name makes no token; delete it.")
        outside.refuse(ids, f"{key} has {text!r} with")


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Writes a tokenizer into a folder.

    Raises:
        OSError: it cannot be written.
    """
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:  # the Rust library tokenizers raises plain Exceptions
        found = system_error(error, folder)
        if found is None:
            raise
        raise found from error


def arithmetic_tokenizer() -> PreTrainedTokenizerFast:
    """Makes a tokenizer with 14 tokens, one per character: ten digits, ``+``, ``=``, end of sequence and padding."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = [*"0123456789+=", "<eos>", "<pad>"]
    tokenizer = Tokenizer(models.WordLevel({token: index for index, token in enumerate(tokens)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
