"""The section `sft`: supervised fine-tuning."""

from typing import NotRequired, TypedDict

from pydantic import with_config

from nemo_offload_rl.config.schema.value_types import (
    STRICT,
    FiniteFloat,
    NonEmptyStr,
    NonNegativeInt,
    Period,
    PositiveInt,
)


@with_config(STRICT)
class SFTConfig(TypedDict):
    """Section `sft`."""

    # Steps after which the run ends. 1 or more.
    max_num_steps: PositiveInt
    # Passes over the training data after which the run ends, unless max_num_steps ends it first. 1 or more.
    max_num_epochs: PositiveInt
    # Steps between validations; 0, or -1, for none. Recommended: 10.
    val_period: Period
    # Validate before the first step. Recommended: true.
    val_at_start: bool
    # Validate after the last step. Recommended: true.
    val_at_end: bool
    # Number of batches in a validation; 0 for the whole set. Recommended: 8.
    val_batches: NonNegativeInt
    # Samples in a validation batch, over all ranks. A multiple of data-parallel size x val_micro_batch_size.
    val_global_batch_size: PositiveInt
    # Samples of one validation forward pass on one rank. 1 or more.
    val_micro_batch_size: PositiveInt
    # Seed of data order and initial weights. 0 or more.
    seed: NonNegativeInt
    # Validation metric that ends the run early, such as answer_probability or val:answer_probability. Null or absent:
    # no early stop.
    stop_at_validation_metric: NotRequired[NonEmptyStr | None]
    # Value of that metric at which the run ends: reached from below, or from above if the metric is a loss. Null or
    # absent: no early stop.
    stop_at_validation_threshold: NotRequired[FiniteFloat | None]
    # At the end, write the trained model as a Hugging Face folder, `hf/` in the run folder. Recommended: true. Absent:
    # false.
    export_hf: NotRequired[bool]
