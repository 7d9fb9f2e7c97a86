"""Value types that the sections of the schema share."""

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

# Values keep their YAML type ("1" is no int), and a key that the schema lacks is an error.
STRICT = ConfigDict(strict=True, extra="forbid")
# Strict too, but further keys are fields of another library's config: config.installed.declared_fields checks those of
# Megatron, config.model.hf_check those of Hugging Face.
STRICT_WITH_FURTHER_FIELDS = ConfigDict(strict=True, extra="allow")


@dataclass(frozen=True, eq=False)
class IfAbsent:
    """Holds the value that an optional key has in a recipe without it: the only place where this default stands.

    `config.keys.tree` fills it in before anybody reads the recipe. A section's own keys are filled in as well.
    """

    value: Any


PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
Period = Annotated[int, Field(ge=-1)]  # NeMo-RL's recipes write -1 as well as 0 for never
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
# A size in GiB; the upper bound is more than any machine has, so that the size in bytes stays a valid integer.
PositiveGib = Annotated[float, Field(gt=0, le=100_000, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
FiniteFloat = Annotated[float, Field(allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
# Decay factor of a running average; 1 would keep the initial value forever.
Decay = Annotated[float, Field(ge=0, lt=1)]
NonEmptyStr = Annotated[str, Field(min_length=1)]
Port = Annotated[int, Field(ge=1024, le=65535)]
Precision = Literal["bfloat16", "float32"]


def _words_or_count(least: int, *words: str) -> BeforeValidator:
    """Validates a value as a whole, since for a union pydantic would report a problem for each member."""

    def check(value: Any) -> Any:
        if value in words or (isinstance(value, int) and not isinstance(value, bool) and value >= least):
            return value
        raise PydanticCustomError("words_or_count", f"must be {', '.join(words)} or a number ({least} or more)")

    return BeforeValidator(check)


NumaSetting = Annotated[int | str, _words_or_count(0, "auto", "none")]
RowTokens = Annotated[int | Literal["auto"], _words_or_count(1, "auto")]

# Discriminator tags of a value that is one section, a list of sections, null, or a word that stands for a section. They
# appear in the locations (`loc`) of pydantic's errors.
ONE, SEVERAL, NONE, WORD = "(one)", "(several)", "(none)", "(word)"
# The same for a dataset, which is a class of the user's or one that this package has.
IMPORTED, BUILT_IN = "(imported)", "(built-in)"
TAGS = (ONE, SEVERAL, NONE, WORD, IMPORTED, BUILT_IN)


def how_many(value: Any) -> str:
    """Returns the tag of a value; anything else gets ONE, so pydantic checks it against the section's schema."""
    return NONE if value is None else SEVERAL if isinstance(value, list) else ONE


def is_import_path(name: str) -> bool:
    """Returns whether a `dataset_name` is the import path of a class, package.module.Class; imports nothing."""
    return re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", name) is not None


def imported_or_built_in(value: Any) -> str:
    """Returns the tag of a dataset's section; without an import path BUILT_IN, whose names pydantic checks."""
    name = value.get("dataset_name") if isinstance(value, dict) else None
    return IMPORTED if isinstance(name, str) and is_import_path(name) else BUILT_IN


def section_or_word(value: Any) -> str:
    """Returns the tag of a value; anything but a text gets ONE, so pydantic checks it against the section's schema."""
    return WORD if isinstance(value, str) else ONE


def _auto(value: Any) -> Any:
    if value == "auto":
        return value
    raise PydanticCustomError(
        "auto_section",
        "must be auto or a section (a mapping): write auto to give every key the value that it has when absent",
    )


Auto = Annotated[Literal["auto"], BeforeValidator(_auto)]
