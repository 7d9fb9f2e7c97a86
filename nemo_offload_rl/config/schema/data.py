"""The section `data`: problems and their answers."""

from typing import Annotated, Literal, NotRequired, TypedDict

from pydantic import Field, with_config

from nemo_offload_rl.config.schema.value_types import STRICT, NonEmptyStr, NonNegativeInt, PositiveInt


@with_config(STRICT)
class ArithmeticDataset(TypedDict):
    """`data.train` or `data.validation` with `dataset_name: arithmetic`: additions made on the fly."""

    # Marks the built-in task `12+34=`; training and validation problems are disjoint.
    dataset_name: Literal["arithmetic"]
    # Digits of each summand. 1 to 9; recommended 2, which has 10,000 problems.
    num_digits: Annotated[int, Field(ge=1, le=9)]
    # Problems of this set. 1 or more; one in sixteen of all 100 ** num_digits is set aside for validation.
    num_problems: PositiveInt
    # Seed of which problems are drawn. 0 or more.
    seed: NonNegativeInt


@with_config(STRICT)
class ResponseDataset(TypedDict):
    """`data.train` or `data.validation` with `dataset_name: ResponseDataset`: a JSONL file."""

    # Marks a file with one JSON object a line.
    dataset_name: Literal["ResponseDataset"]
    # The file, relative to the folder that the run is started in.
    data_path: NonEmptyStr
    # Field of the prompt, such as input.
    input_key: NonEmptyStr
    # Field of the answer, such as output.
    output_key: NonEmptyStr


@with_config(STRICT)
class HFDataset(TypedDict):
    """`data.train` or `data.validation` with `dataset_name: HFDataset`: a folder written by `datasets`."""

    # Marks a folder that `datasets` has saved.
    dataset_name: Literal["HFDataset"]
    # The folder, relative to the folder that the run is started in.
    data_path: NonEmptyStr
    # Split of a folder that has several. Absent: the folder has no splits.
    split: NotRequired[NonEmptyStr]
    # Column of the prompt, such as input.
    input_key: NonEmptyStr
    # Column of the answer, such as output.
    output_key: NonEmptyStr


Dataset = Annotated[ArithmeticDataset | ResponseDataset | HFDataset, Field(discriminator="dataset_name")]


@with_config(STRICT)
class DataDefaults(TypedDict):
    """Section `data.default`: what every dataset of the recipe shares."""

    # The key under `env` whose reward judges the answers; needed by GRPO. Absent: no reward (SFT).
    env_name: NotRequired[NonEmptyStr]
    # A text file that the prompt is put into, in place of its `{}`. Null or absent: the prompt alone.
    prompt_file: NotRequired[NonEmptyStr | None]
    # A text file with the system message. Null or absent: none.
    system_prompt_file: NotRequired[NonEmptyStr | None]


@with_config(STRICT)
class DataConfig(TypedDict):
    """Section `data`."""

    # Most tokens of a prompt (GRPO) or of prompt and answer (SFT); what is longer is cut and left out of the loss.
    # Recommended: "${policy.max_total_sequence_length}".
    max_input_seq_length: PositiveInt
    # Draw the training data in a new order each epoch. Recommended: true.
    shuffle: bool
    # Training data.
    train: Dataset
    # Validation data. Null or absent: none.
    validation: NotRequired[Dataset | None]
    # What both share. Absent: nothing.
    default: NotRequired[DataDefaults]


@with_config(STRICT)
class SFTDataConfig(DataConfig):
    """Section `data` of an SFT recipe."""

    # Put the beginning-of-sequence token first. Recommended: true where the tokenizer has one.
    add_bos: bool
    # End answers with the end-of-sequence token. Recommended: true.
    add_eos: bool
    # End prompts with the chat template's opening of an answer. Recommended: true with a chat template, else false.
    add_generation_prompt: bool
