"""Loads tokenizers, and finds words that one cannot encode and tokens that a model does not have."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from nemo_offload_rl.data.problem import DataError
from nemo_offload_rl.hub import cache_only, needs_code, why_missing
from nemo_offload_rl.storage.disk import system_error

if TYPE_CHECKING:
    from tokenizers import Tokenizer
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


ARITHMETIC = "arithmetic"

logger = logging.getLogger(__name__)

# Words, numbers, blanks, lines and bytes, which kinds of tokenizers split differently.
_PROBE = "What is 12 + 345? It's\n\n  6.7 km, or 20% off:\t(naïve) 是\n"


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
        tokenizer = _as_in_its_file(tokenizer, name)
    if tokenizer.eos_token_id is None:
        raise DataError(
            f"policy.tokenizer.name: the tokenizer {name!r} has no end-of-sequence token; training needs one."
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    return tokenizer


def _as_in_its_file(tokenizer: PreTrainedTokenizerFast, name: str) -> PreTrainedTokenizerFast:
    """Returns the tokenizer that tokenizer.json describes, where transformers 5 has made another one of it.

    Its classes, such as LlamaTokenizer, replace what the file says of splitting and decoding. A byte-level tokenizer
    with this class in its tokenizer_config.json, as that of DeepSeek-R1-Distill-Llama, so loses all blanks
    (https://github.com/huggingface/transformers/issues/45488).
    """
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast
    from transformers.utils import cached_file

    made, its_class = getattr(tokenizer, "backend_tokenizer", None), type(tokenizer)
    if made is None or its_class is PreTrainedTokenizerFast or not its_class.__module__.startswith("transformers."):
        return tokenizer
    try:
        file = Tokenizer.from_file(cached_file(name, "tokenizer.json", local_files_only=True))
    except OSError:  # it has no such file
        return tokenizer
    file.no_padding()
    file.no_truncation()
    try:
        ids = tokenizer(_PROBE, add_special_tokens=False)["input_ids"]
        # Its tokenizer_config.json may say add_prefix_space.
        in_file = [file.encode(text, add_special_tokens=False).ids for text in (_PROBE, f" {_PROBE}")]
        is_same = ids in in_file and made.decode(ids) == file.decode(ids)
    except Exception:  # noqa: BLE001 - tokenizers raises plain ones for a word that a closed vocabulary lacks
        is_same = type(made.model) is type(file.model)
    if is_same:
        return tokenizer
    logger.warning(
        "policy.tokenizer.name: %s is read as its tokenizer.json says; transformers would read it as a %s, which "
        "makes other tokens of a text.",
        name,
        its_class.__name__,
    )
    loaded: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(name, local_files_only=True)
    return loaded


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
        _name_as_before(folder / "tokenizer_config.json")
    except Exception as error:  # the Rust library tokenizers raises plain Exceptions
        found = system_error(error, folder)
        if found is None:
            raise
        raise found from error


def _name_as_before(path: Path) -> None:
    """Gives the list of special tokens the name that transformers 4 reads, as 5 does: it takes none by the new name."""
    fields = json.loads(path.read_text(encoding="utf-8"))
    if isinstance(fields.get("extra_special_tokens"), list):
        fields["additional_special_tokens"] = fields.pop("extra_special_tokens")
        path.write_text(json.dumps(fields, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def arithmetic_tokenizer() -> PreTrainedTokenizerFast:
    """Makes a tokenizer with 14 tokens, one per character: ten digits, ``+``, ``=``, end of sequence and padding."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = [*"0123456789+=", "<eos>", "<pad>"]
    tokenizer = Tokenizer(models.WordLevel({token: index for index, token in enumerate(tokens)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
