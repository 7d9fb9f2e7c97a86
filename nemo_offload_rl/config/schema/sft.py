"""The section `sft`: supervised fine-tuning."""

from typing import Annotated, NotRequired, TypedDict

from pydantic import with_config

from nemo_offload_rl.config.schema.value_types import (
    STRICT,
    FiniteFloat,
    IfAbsent,
    NonEmptyStr,
    NonNegativeInt,
    Period,
    PositiveInt,
)


@with_config(STRICT)
class SupervisedConfig(TypedDict):
    """What the sections of all algorithms that train on known answers have."""

    # Passes over the training data after which the run ends, unless max_num_steps ends it first. 1 or more.
    max_num_epochs: NotRequired[Annotated[PositiveInt, IfAbsent(1)]]
    # Validate before the first step. Recommended: true.
    val_at_start: NotRequired[Annotated[bool, IfAbsent(True)]]
    # Validate after the last step. Recommended: true.
    val_at_end: NotRequired[Annotated[bool, IfAbsent(False)]]
    # Number of batches in a validation; 0 for the whole set. Recommended: 8.
    val_batches: NotRequired[Annotated[NonNegativeInt, IfAbsent(8)]]
    # Samples of one validation forward pass on one rank. 1 or more.
    val_micro_batch_size: NotRequired[Annotated[PositiveInt, IfAbsent(1)]]
    # Seed of data order and initial weights. 0 or more.
    seed: NotRequired[Annotated[NonNegativeInt, IfAbsent(42)]]
    # Validation metric that ends the run early, such as answer_probability or val:answer_probability. Null: no early
    # stop.
    stop_at_validation_metric: NotRequired[Annotated[NonEmptyStr | None, IfAbsent(None)]]
    # Value of that metric at which the run ends: reached from below, or from above if the metric is a loss. Null: no
    # early stop.
    stop_at_validation_threshold: NotRequired[Annotated[FiniteFloat | None, IfAbsent(None)]]
    # At the end, write the trained model as a Hugging Face folder, `hf/` in the run folder. Recommended: true.
    export_hf: NotRequired[Annotated[bool, IfAbsent(False)]]


@with_config(STRICT)
class SFTConfig(SupervisedConfig):
    """Section `sft`."""

    # Steps after which the run ends. 1 or more.
    max_num_steps: NotRequired[Annotated[PositiveInt, IfAbsent(60)]]
    # Steps between validations; 0, or -1, for none. Recommended: 10.
    val_period: NotRequired[Annotated[Period, IfAbsent(10)]]
    # Samples in a validation batch, over all ranks. A multiple of data-parallel size x val_micro_batch_size.
    val_global_batch_size: NotRequired[Annotated[PositiveInt, IfAbsent(32)]]
    # Of a conversation, train the last message only; false trains all messages of the assistant. Recommended: false.
    only_unmask_final: NotRequired[Annotated[bool, IfAbsent(False)]]
