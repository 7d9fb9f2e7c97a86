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
class SupervisedConfig(TypedDict):
    """What the sections of all algorithms that train on known answers have."""

    # Steps after which the run ends. 1 or more. Absent: 60, in DPO 150.
    max_num_steps: NotRequired[PositiveInt]
    # Passes over the training data after which the run ends, unless max_num_steps ends it first. 1 or more. Absent: 1.
    max_num_epochs: NotRequired[PositiveInt]
    # Steps between validations; 0, or -1, for none. Recommended: 10. Absent: 10, in DPO 25.
    val_period: NotRequired[Period]
    # Validate before the first step. Recommended: true. Absent: true.
    val_at_start: NotRequired[bool]
    # Validate after the last step. Recommended: true. Absent: false.
    val_at_end: NotRequired[bool]
    # Number of batches in a validation; 0 for the whole set. Recommended: 8. Absent: 8.
    val_batches: NotRequired[NonNegativeInt]
    # Samples in a validation batch, over all ranks. A multiple of data-parallel size x val_micro_batch_size. Absent:
    # 32, in DPO 8.
    val_global_batch_size: NotRequired[PositiveInt]
    # Samples of one validation forward pass on one rank. 1 or more. Absent: 1.
    val_micro_batch_size: NotRequired[PositiveInt]
    # Seed of data order and initial weights. 0 or more. Absent: 42.
    seed: NotRequired[NonNegativeInt]
    # Validation metric that ends the run early, such as answer_probability or val:answer_probability. Null or absent:
    # no early stop.
    stop_at_validation_metric: NotRequired[NonEmptyStr | None]
    # Value of that metric at which the run ends: reached from below, or from above if the metric is a loss. Null or
    # absent: no early stop.
    stop_at_validation_threshold: NotRequired[FiniteFloat | None]
    # At the end, write the trained model as a Hugging Face folder, `hf/` in the run folder. Recommended: true. Absent:
    # false.
    export_hf: NotRequired[bool]


@with_config(STRICT)
class SFTConfig(SupervisedConfig):
    """Section `sft`."""

    # Of a conversation, train the last message only; false trains all messages of the assistant. Recommended: false.
    # Absent: false.
    only_unmask_final: NotRequired[bool]
