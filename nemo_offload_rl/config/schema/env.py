"""The section `env`: one environment a key, which judges answers."""

from typing import Literal, NotRequired, TypedDict

from pydantic import with_config

from nemo_offload_rl.config.schema.value_types import STRICT, NonEmptyStr, PositiveFloat, PositiveInt


@with_config(STRICT)
class EnvConfig(TypedDict):
    """Section `env.NAME`; `data.default.env_name` names it, and it has a reward or a math_verify_impl."""

    # How an answer is judged: exact_match (the text), numeric_match (the last number in it) or python (a function).
    # Absent: as math_verify_impl says.
    reward: NotRequired[Literal["exact_match", "numeric_match", "python"]]
    # With `reward: python`, the function, as "package.module:function". Absent: the other rewards need none.
    reward_function: NotRequired[NonEmptyStr]
    # How answers to mathematics are judged, in processes beside the run: hf_math_verify (by the package math-verify:
    # formulas and numbers that are equal) or dapo_math_verify (the text behind the last `Answer:`). Null or absent: as
    # reward says.
    math_verify_impl: NotRequired[Literal["hf_math_verify", "dapo_math_verify"] | None]
    # Processes of math_verify_impl, all on the machine of the driver. Recommended: as many as there are cores to spare.
    # Absent: 8.
    num_workers: NotRequired[PositiveInt]
    # Seconds that math_verify_impl has for one answer; beyond them the reward is 0, and `train/num_unjudged_answers`
    # counts it, as it does a formula that math-verify gives up after 5 s of its own. Above 0; recommended 10. Absent:
    # 10.
    time_limit_s: NotRequired[PositiveFloat]
