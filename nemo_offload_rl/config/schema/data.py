"""The section `data`: problems and their answers, or pairs of answers."""

from typing import Annotated, Literal, NotRequired, TypedDict

from pydantic import Discriminator, Field, Tag, with_config

from nemo_offload_rl.config.schema.value_types import (
    NONE,
    ONE,
    SEVERAL,
    STRICT,
    NonEmptyStr,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    how_many,
)


@with_config(STRICT)
class PromptFiles(TypedDict):
    """What a dataset's prompts are put into: of one dataset, or in `data.default` for those that do not say."""

    # A text file that the prompt is put into (of several messages, the user's first), in place of its `{}`, found from
    # the folder that the run is started in. Null: the prompt alone. Absent: that of data.default, or there the
    # prompt alone.
    prompt_file: NotRequired[NonEmptyStr | None]
    # A text file with the system message. Null: none. Absent: that of data.default, or there none.
    system_prompt_file: NotRequired[NonEmptyStr | None]


@with_config(STRICT)
class ArithmeticDataset(PromptFiles):
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
    split_validation_size: NotRequired[NonNegativeFloat | None]


@with_config(STRICT)
class ResponseDataset(PromptFiles):
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
    split_validation_size: NotRequired[NonNegativeFloat | None]
    # Seed of this split, which needs it. Absent: nothing is split off.
    seed: NotRequired[NonNegativeInt]


@with_config(STRICT)
class HFDataset(PromptFiles):
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
    split_validation_size: NotRequired[NonNegativeFloat | None]
    # Seed of this split, which needs it. Absent: nothing is split off.
    seed: NotRequired[NonNegativeInt]


@with_config(STRICT)
class NamedProblems(PromptFiles):
    """`data.train` or `data.validation` with the name of a dataset of problems on the hub."""

    # Marks a dataset of problems and answers, by NeMo-RL's name for it.
    dataset_name: Literal[
        "OpenMathInstruct-2",
        "openmathinstruct2",
        "DAPOMath17K",
        "DAPOMathAIME2024",
        "AIME2024",
        "AIME2025",
        "DeepScaler",
        "gsm8k",
    ]
    # Split of the dataset. Absent: the first of those that [Recipes](recipes.md#named-datasets) lists for it.
    split: NotRequired[NonEmptyStr]
    # Column of the answer, of OpenMathInstruct-2: expected_answer or, for SFT, generated_solution. Absent:
    # expected_answer.
    output_key: NotRequired[NonEmptyStr]
    # How often all rows are read, of AIME2024 and AIME2025. 1 or more. Absent: 16.
    repeat: NotRequired[PositiveInt]
    # Of data.train: share (below 1) or number of its rows that are validation data instead, drawn by `seed`. Absent:
    # 0.05 of OpenMathInstruct-2, else 0. NeMo-RL splits nothing off the others, nor is it done here.
    split_validation_size: NotRequired[NonNegativeFloat | None]
    # Seed of this split, which needs it. Absent: 42 of OpenMathInstruct-2.
    seed: NotRequired[NonNegativeInt]


@with_config(STRICT)
class NamedConversations(PromptFiles):
    """`data.train` or `data.validation` with the name of a dataset of conversations on the hub."""

    # Marks a dataset of conversations, by NeMo-RL's name for it.
    dataset_name: Literal[
        "squad",
        "tulu3_sft_mixture",
    ]
    # Split of the dataset. Absent: the first of those that [Recipes](recipes.md#named-datasets) lists for it.
    split: NotRequired[NonEmptyStr]
    # Of data.train: share (below 1) or number of its rows that are validation data instead, drawn by `seed`. Absent:
    # 0.05 of tulu3_sft_mixture. NeMo-RL splits nothing off squad, nor is it done here.
    split_validation_size: NotRequired[NonNegativeFloat | None]
    # Seed of this split, which needs it. Absent: 42 of tulu3_sft_mixture.
    seed: NotRequired[NonNegativeInt]


Dataset = Annotated[
    ArithmeticDataset | ResponseDataset | HFDataset | NamedProblems, Field(discriminator="dataset_name")
]
SFTDataset = Annotated[
    ArithmeticDataset | ResponseDataset | HFDataset | NamedProblems | NamedConversations,
    Field(discriminator="dataset_name"),
]
ValidationData = Annotated[
    Annotated[Dataset, Tag(ONE)] | Annotated[list[Dataset], Tag(SEVERAL)] | Annotated[None, Tag(NONE)],
    Discriminator(how_many),
]
SFTValidationData = Annotated[
    Annotated[SFTDataset, Tag(ONE)] | Annotated[list[SFTDataset], Tag(SEVERAL)] | Annotated[None, Tag(NONE)],
    Discriminator(how_many),
]


@with_config(STRICT)
class BinaryPreferenceDataset(PromptFiles):
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
    split_validation_size: NotRequired[NonNegativeFloat | None]
    # Seed of this split, which needs it. Absent: nothing is split off.
    seed: NotRequired[NonNegativeInt]


@with_config(STRICT)
class PreferenceDataset(PromptFiles):
    """`data.train` or `data.validation` of DPO with `dataset_name: PreferenceDataset`: rows of ranked completions."""

    # Marks a JSONL file, or a folder that `datasets` has saved, of rows with a `context` and two ranked `completions`.
    dataset_name: Literal["PreferenceDataset"]
    # The file or folder, relative to the folder that the run is started in.
    data_path: NonEmptyStr
    # Split of a folder that has several. Null or absent: a file, or a folder without splits.
    split: NotRequired[NonEmptyStr | None]
    # Of data.train: share (below 1) or number of its rows that are validation data instead, drawn by `seed`. Absent: 0.
    split_validation_size: NotRequired[NonNegativeFloat | None]
    # Seed of this split, which needs it. Absent: nothing is split off.
    seed: NotRequired[NonNegativeInt]


@with_config(STRICT)
class NamedPairs(PromptFiles):
    """`data.train` or `data.validation` with the name of a dataset of pairs on the hub."""

    # Marks a dataset of pairs of answers, by NeMo-RL's name for it.
    dataset_name: Literal[
        "HelpSteer3",
        "Tulu3Preference",
    ]
    # Split of the dataset. Absent: the first of those that [Recipes](recipes.md#named-datasets) lists for it.
    split: NotRequired[NonEmptyStr]
    # Of data.train: share (below 1) or number of its rows that are validation data instead, drawn by `seed`. Absent:
    # 0. NeMo-RL splits nothing off these datasets, nor is it done here.
    split_validation_size: NotRequired[NonNegativeFloat | None]
    # Seed of this split, which needs it. Absent: none.
    seed: NotRequired[NonNegativeInt]


PairDataset = Annotated[
    ArithmeticDataset | BinaryPreferenceDataset | PreferenceDataset | NamedPairs, Field(discriminator="dataset_name")
]
PairValidationData = Annotated[
    Annotated[PairDataset, Tag(ONE)] | Annotated[list[PairDataset], Tag(SEVERAL)] | Annotated[None, Tag(NONE)],
    Discriminator(how_many),
]


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
    # A folder for named datasets: of each that is here as NAME/ (what `datasets` has saved, parquet files, or
    # SPLIT.jsonl) or NAME.jsonl, the hub is not asked. Null or absent: none.
    dataset_root: NotRequired[NonEmptyStr | None]


@with_config(STRICT)
class DataConfig(DataOrder):
    """Section `data`."""

    # Training data.
    train: Dataset
    # Validation data, after what is split off the training data: one dataset, or a list of several, which are read as
    # one. Null or absent: none further.
    validation: NotRequired[ValidationData]
    # What both share. Absent: nothing.
    default: NotRequired[DataDefaults]


@with_config(STRICT)
class SFTDataConfig(DataOrder):
    """Section `data` of an SFT recipe."""

    # Put the beginning-of-sequence token first. Recommended: true where the tokenizer has one.
    add_bos: bool
    # End answers with the end-of-sequence token. Recommended: true.
    add_eos: bool
    # End prompts with the chat template's opening of an answer. Recommended: true with a chat template, else false.
    add_generation_prompt: bool
    # Training data.
    train: SFTDataset
    # Validation data, after what is split off the training data: one dataset, or a list of several, which are read as
    # one. Null or absent: none further.
    validation: NotRequired[SFTValidationData]
    # What both share. Absent: nothing.
    default: NotRequired[DataDefaults]


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
    # Validation pairs, after what is split off the training pairs: one dataset, or a list of several, which are read as
    # one. Null or absent: none further.
    validation: NotRequired[PairValidationData]
    # What both share. Absent: nothing.
    default: NotRequired[PromptFiles]
