"""The section `policy.generation`: how answers are sampled."""

from typing import Annotated, Literal, TypedDict

from pydantic import Field, with_config

from nemo_offload_rl.config.schema.value_types import (
    STRICT,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

TopP = Annotated[float, Field(gt=0, le=1)]


@with_config(STRICT)
class GenerationConfig(TypedDict):
    """Section `policy.generation`."""

    # What samples. Only transformers: the Hugging Face model on the policy's own devices.
    backend: Literal["transformers"]
    # Most tokens of an answer; prompt and answer together stay within policy.max_total_sequence_length.
    # Recommended: "${policy.max_total_sequence_length}".
    max_new_tokens: PositiveInt
    # Divides the logits before sampling. Above 0; recommended 1.0, at which the log-probs are the model's own.
    temperature: PositiveFloat
    # Sample among the likeliest tokens that have this probability together. Above 0 to 1; recommended 1.0 for
    # training, as less cuts tokens off that the loss knows nothing of.
    top_p: TopP
    # Sample among this many likeliest tokens; null for all. Recommended: null for training.
    top_k: PositiveInt | None
    # Temperature of validation; 0 takes the likeliest token. Recommended: "${.temperature}", or 0.0.
    val_temperature: NonNegativeFloat
    # top_p of validation. Recommended: "${.top_p}".
    val_top_p: TopP
    # top_k of validation. Recommended: "${.top_k}".
    val_top_k: PositiveInt | None
    # Token ids that end an answer; null for the tokenizer's end of sequence. Recommended: null.
    stop_token_ids: list[NonNegativeInt] | None
