"""The section `env`: the environments that judge answers, one for each key."""

from typing import Annotated, Literal, NotRequired, TypedDict

from pydantic import with_config

from nemo_offload_rl.config.schema.value_types import STRICT, IfAbsent, NonEmptyStr, PositiveFloat, PositiveInt


@with_config(STRICT)
class EnvConfig(TypedDict):
    """Section `env.NAME`, which `data.default.env_name` refers to; it needs reward or math_verify_impl, not both."""

    # How an answer is judged: exact_match (the text), numeric_match (the last number in it) or python (a function).
    # Absent: math_verify_impl decides.
    reward: NotRequired[Literal["exact_match", "numeric_match", "python"]]
    # With `reward: python`, the function, as "package.module:function". Absent: the other rewards need none.
    reward_function: NotRequired[NonEmptyStr]
    # How answers to math problems are judged, in worker processes: hf_math_verify (the package math-verify compares
    # formulas and numbers for equality) or dapo_math_verify (compares the text after the last `Answer:`). Null: reward
    # decides. Absent: reward decides; in env.math and env.math_default without a reward, hf_math_verify.
    math_verify_impl: NotRequired[Annotated[Literal["hf_math_verify", "dapo_math_verify"] | None, IfAbsent(None)]]
    # Worker processes of math_verify_impl or of a Python function, all on the driver's machine. Recommended: as many as
    # there are spare cores; 1 for a function that keeps a state between calls. Absent: 8, with a function 1.
    num_workers: NotRequired[PositiveInt]
    # Seconds that math_verify_impl or a Python function may take for one answer; after that the reward is 0, and
    # `train/num_unjudged_answers` counts the answer, as it does a formula that math-verify gives up on after its own
    # limit of 5 s. Above 0; recommended 10, more for a function that asks a model. Absent: 10, with a function 60.
    time_limit_s: NotRequired[PositiveFloat]
