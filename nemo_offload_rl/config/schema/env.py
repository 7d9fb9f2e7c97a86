"""The section `env`: one environment a key, which judges answers."""

from typing import Literal, NotRequired, TypedDict

from pydantic import with_config

from nemo_offload_rl.config.schema.value_types import STRICT, NonEmptyStr


@with_config(STRICT)
class EnvConfig(TypedDict):
    """Section `env.NAME`; `data.default.env_name` names it."""

    # How an answer is judged: exact_match (the text), numeric_match (the last number in it) or python (a function).
    reward: Literal["exact_match", "numeric_match", "python"]
    # With `reward: python`, the function, as "package.module:function". Absent: the other rewards need none.
    reward_function: NotRequired[NonEmptyStr]
