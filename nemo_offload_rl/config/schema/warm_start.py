"""The section `warm_start`: an SFT run that precedes the run itself."""

from typing import Annotated, NotRequired, TypedDict

from pydantic import Field, with_config

from nemo_offload_rl.config.schema.value_types import STRICT, IfAbsent, NonEmptyStr


@with_config(STRICT)
class WarmStartConfig(TypedDict):
    """Section `warm_start`: an SFT run that comes first and provides the initial weights."""

    # The SFT recipe; its path is relative to the file that names it.
    recipe: NonEmptyStr
    # Overrides of that recipe, each written as on the command line. Absent: none.
    overrides: NotRequired[Annotated[list[Annotated[str, Field(min_length=1)]], IfAbsent([])]]
