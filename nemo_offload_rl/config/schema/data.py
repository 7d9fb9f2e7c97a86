"""The section `data`: problems and their answers, or pairs of answers."""

from typing import Annotated, Literal, NotRequired, TypedDict

from pydantic import Field, with_config

from nemo_offload_rl.config.schema.value_types import STRICT, NonEmptyStr, NonNegativeFloat, NonNegativeInt, PositiveInt


@with_config(STRICT)
class ArithmeticDataset(TypedDict):
    """`data.train` or `data.validation` with `dataset_name: arithmetic`: additions made on the fly."""

    # Marks the built-in task `12+34=`; training and validation problems are disjoint. In DPO, the chosen answer is the
    # right sum, and the rejected one is off by one in one decimal place.
    dataset_name: Literal["arithmetic"]
    # Digits of each summand. 1 to 9; recommended 2, which has 10,000 problems.
    num_digits: Annotated[int, Field(ge=1, le=9)]
    # Problems, or pairs, of this set. 1 or more; one in sixteen of all 100 ** num_digits is set aside for validation.
    num_problems: PositiveInt
    # Seed of which problems are drawn. 0 or more.
    seed: NonNegativeInt
    # Of data.train: share (below 1) or number of its problems that are validation data instead, drawn by `seed`.
    # Absent: 0.
    split_validation_size: NotRequired[NonNegativeFloat]


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
    # Of data.train: share (below 1) or number of its rows that are validation data instead, drawn by `seed`. Absent: 0.
    split_validation_size: NotRequired[NonNegativeFloat]
    # Seed of this split, which needs it. Absent: nothing is split off.
    seed: NotRequired[NonNegativeInt]


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
    # Of data.train: share (below 1) or number of its rows that are validation data instead, drawn by `seed`. Absent: 0.
    split_validation_size: NotRequired[NonNegativeFloat]
    # Seed of this split, which needs it. Absent: nothing is split off.
    seed: NotRequired[NonNegativeInt]


Dataset = Annotated[ArithmeticDataset | ResponseDataset | HFDataset, Field(discriminator="dataset_name")]


@with_config(STRICT)
class BinaryPreferenceDataset(TypedDict):
    """`data.train` or `data.validation` of DPO with `dataset_name: BinaryPreferenceDataset`: rows of two answers."""

    # Marks a JSONL file, or a folder that `datasets` has saved, of rows with a prompt, a chosen and a rejected answer.
    dataset_name: Literal["BinaryPreferenceDataset"]
    # The file or folder, relative to the folder that the run is started in.
    data_path: NonEmptyStr
    # Split of a folder that has several. Null or absent: a file, or a folder without splits.
    split: NotRequired[NonEmptyStr | None]
    # Field of the prompt, a text or a list of messages. Recommended: prompt.
    prompt_key: NonEmptyStr
    # Field of the preferred answer: a text, or messages of which the last is the answer. Recommended: chosen.
    chosen_key: NonEmptyStr
    # Field of the other answer, in the same forms. Recommended: rejected.
    rejected_key: NonEmptyStr
    # Of data.train: share (below 1) or number of its rows that are validation data instead, drawn by `seed`. Absent: 0.
    split_validation_size: NotRequired[NonNegativeFloat]
    # Seed of this split, which needs it. Absent: nothing is split off.
    seed: NotRequired[NonNegativeInt]


@with_config(STRICT)
class PreferenceDataset(TypedDict):
    """`data.train` or `data.validation` of DPO with `dataset_name: PreferenceDataset`: rows of ranked completions."""

    # Marks a JSONL file, or a folder that `datasets` has saved, of rows with a `context` and two ranked `completions`.
    dataset_name: Literal["PreferenceDataset"]
    # The file or folder, relative to the folder that the run is started in.
    data_path: NonEmptyStr
    # Split of a folder that has several. Null or absent: a file, or a folder without splits.
    split: NotRequired[NonEmptyStr | None]
    # Of data.train: share (below 1) or number of its rows that are validation data instead, drawn by `seed`. Absent: 0.
    split_validation_size: NotRequired[NonNegativeFloat]
    # Seed of this split, which needs it. Absent: nothing is split off.
    seed: NotRequired[NonNegativeInt]


PairDataset = Annotated[
    ArithmeticDataset | BinaryPreferenceDataset | PreferenceDataset, Field(discriminator="dataset_name")
]


@with_config(STRICT)
class PromptFiles(TypedDict):
    """Section `data.default` of a DPO recipe: what every dataset of the recipe shares."""

    # A text file that the prompt is put into (of several messages, the user's first), in place of its `{}`. Null or
    # absent: the prompt alone.
    prompt_file: NotRequired[NonEmptyStr | None]
    # A text file with the system message. Null or absent: none.
    system_prompt_file: NotRequired[NonEmptyStr | None]


@with_config(STRICT)
class DataDefaults(PromptFiles):
    """Section `data.default`: what every dataset of the recipe shares."""

    # The key under `env` whose reward judges the answers; needed by GRPO. Absent: no reward (SFT).
    env_name: NotRequired[NonEmptyStr]


@with_config(STRICT)
class DataOrder(TypedDict):
    """What the section `data` of every recipe has."""

    # Most tokens of a prompt (GRPO) or of prompt and answer (SFT, DPO); what is longer is cut and left out of the loss,
    # in DPO the whole pair. Recommended: "${policy.max_total_sequence_length}".
    max_input_seq_length: PositiveInt
    # Draw the training data in a new order each epoch. Recommended: true.
    shuffle: bool


@with_config(STRICT)
class DataConfig(DataOrder):
    """Section `data`."""

    # Training data.
    train: Dataset
    # Validation data, after what is split off the training data. Null or absent: none further.
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


@with_config(STRICT)
class PreferenceDataConfig(DataOrder):
    """Section `data` of a DPO recipe."""

    # Put the beginning-of-sequence token first. Recommended: true where the tokenizer has one. Absent: true.
    add_bos: NotRequired[bool]
    # End answers with the end-of-sequence token. Recommended: true. Absent: true.
    add_eos: NotRequired[bool]
    # End prompts with the chat template's opening of an answer, which is trained with the answer otherwise.
    # Recommended: true with a chat template, else false. Absent: false, as in NeMo-RL.
    add_generation_prompt: NotRequired[bool]
    # Training pairs.
    train: PairDataset
    # Validation pairs, after what is split off the training pairs. Null or absent: none further.
    validation: NotRequired[PairDataset | None]
    # What both share. Absent: nothing.
    default: NotRequired[PromptFiles]
