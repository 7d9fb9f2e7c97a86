"""The sections `data`, problems and answers or pairs of answers, and `env`, the environments that judge answers."""

from typing import Annotated, Literal, NotRequired, TypedDict, TypeVar

from pydantic import Discriminator, Field, Tag, with_config

from nemo_offload_rl.config.schema.value_types import (
    BUILT_IN,
    IMPORTED,
    NONE,
    ONE,
    SEVERAL,
    STRICT,
    STRICT_WITH_FURTHER_FIELDS,
    IfAbsent,
    NonEmptyStr,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    how_many,
    imported_or_built_in,
)


@with_config(STRICT)
class PromptFiles(TypedDict):
    """Files that a dataset's prompts are put into; in `data.default` for the datasets that do not name any."""

    # A text file whose `{}` is replaced by the prompt (for several messages, by the first one of the user), relative to
    # the folder that the run is started in. Null: the prompt alone. Absent: that of data.default, or there the prompt
    # alone.
    prompt_file: NotRequired[NonEmptyStr | None]
    # A text file with the system message. Null: no system message. Absent: that of data.default, or there none.
    system_prompt_file: NotRequired[NonEmptyStr | None]


@with_config(STRICT)
class ArithmeticDataset(PromptFiles):
    """`data.train` or `data.validation` with `dataset_name: arithmetic`: additions generated on the fly."""

    # Selects the built-in task `12+34=`; training and validation problems are disjoint. In DPO, the chosen answer is
    # the correct sum, and the rejected one is off by one in one decimal place.
    dataset_name: Literal["arithmetic"]
    # Digits of each summand. 1 to 9; recommended 2, which has 10,000 problems.
    num_digits: Annotated[int, Field(ge=1, le=9)]
    # Number of problems, or pairs, in this set. 1 to 1,000,000; one in sixteen of all 100 ** num_digits is reserved for
    # validation.
    num_problems: Annotated[int, Field(ge=1, le=1_000_000)]
    # Seed by which problems are drawn. 0 or more.
    seed: NonNegativeInt
    # For data.train only: share (below 1) or number of its problems to split off as validation data, drawn with `seed`.
    split_validation_size: NotRequired[Annotated[NonNegativeFloat | None, IfAbsent(0)]]


@with_config(STRICT)
class ResponseDataset(PromptFiles):
    """`data.train` or `data.validation` with `dataset_name: ResponseDataset`: a JSONL file."""

    # Selects a JSONL file: one JSON object on each line.
    dataset_name: Literal["ResponseDataset"]
    # The file, relative to the folder that the run is started in.
    data_path: NonEmptyStr
    # Field of the prompt.
    input_key: NotRequired[Annotated[NonEmptyStr, IfAbsent("input")]]
    # Field of the answer.
    output_key: NotRequired[Annotated[NonEmptyStr, IfAbsent("output")]]
    # For data.train only: share (below 1) or number of its rows to split off as validation data, drawn with `seed`.
    split_validation_size: NotRequired[Annotated[NonNegativeFloat | None, IfAbsent(0)]]
    # Seed of this split.
    seed: NotRequired[Annotated[NonNegativeInt, IfAbsent(42)]]


@with_config(STRICT)
class SplitRows(PromptFiles):
    """Rows of files, of which some may be split off."""

    # For data.train only: share (below 1) or number of its rows to split off as validation data, drawn with `seed`.
    split_validation_size: NotRequired[Annotated[NonNegativeFloat | None, IfAbsent(0)]]
    # Seed of this split, required if there is one. Absent: no rows are split off.
    seed: NotRequired[NonNegativeInt]


@with_config(STRICT)
class HFDataset(SplitRows):
    """`data.train` or `data.validation` with `dataset_name: HFDataset`: a folder written by `datasets`."""

    # Selects a folder that `datasets` has saved.
    dataset_name: Literal["HFDataset"]
    # The folder, relative to the folder that the run is started in.
    data_path: NonEmptyStr
    # Split to read from a folder that has several. Absent: the folder has no splits.
    split: NotRequired[NonEmptyStr]
    # Column of the prompt, such as input.
    input_key: NonEmptyStr
    # Column of the answer, such as output.
    output_key: NonEmptyStr


@with_config(STRICT)
class NamedProblems(PromptFiles):
    """`data.train` or `data.validation` with the name of a dataset of problems on the hub."""

    # Selects a dataset of problems and answers by its name in NeMo-RL.
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
    # Split of the dataset. Absent: the first one that [Recipes](recipes.md#named-datasets) lists for it.
    split: NotRequired[NonEmptyStr]
    # Column of the answer, for OpenMathInstruct-2 only: expected_answer or, for SFT, generated_solution. Absent:
    # expected_answer.
    output_key: NotRequired[NonEmptyStr]
    # How often all rows are read, for AIME2024 and AIME2025 only. 1 or more; recommended 16, since there are
    # few problems. Absent: 1.
    repeat: NotRequired[PositiveInt]
    # For data.train only: share (below 1) or number of its rows to split off as validation data, drawn with `seed`.
    # Absent: 0.05 for OpenMathInstruct-2, otherwise 0. No effect on the other datasets, which are not split, as in
    # NeMo-RL.
    split_validation_size: NotRequired[Annotated[NonNegativeFloat | None, IfAbsent(0)]]
    # Seed of this split. Absent: 42 for OpenMathInstruct-2.
    seed: NotRequired[NonNegativeInt]


@with_config(STRICT)
class NamedConversations(PromptFiles):
    """`data.train` or `data.validation` with the name of a dataset of conversations on the hub."""

    # Selects a dataset of conversations by its name in NeMo-RL.
    dataset_name: Literal[
        "squad",
        "tulu3_sft_mixture",
        "Nemotron-Cascade-2-SFT-Math",
    ]
    # Split of the dataset. Absent: the first one that [Recipes](recipes.md#named-datasets) lists for it.
    split: NotRequired[NonEmptyStr]
    # For data.train only: share (below 1) or number of its rows to split off as validation data, drawn with `seed`.
    # Absent: 0.05. No effect on squad, which is not split, as in NeMo-RL.
    split_validation_size: NotRequired[Annotated[NonNegativeFloat | None, IfAbsent(0)]]
    # Seed of this split and of `max_samples`. Absent: 42, but for squad.
    seed: NotRequired[NonNegativeInt]
    # The most rows, drawn with `seed` before any split; not for squad. Null, 0 or absent: all.
    max_samples: NotRequired[NonNegativeInt | None]


@with_config(STRICT_WITH_FURTHER_FIELDS)
class ImportedDataset(PromptFiles):
    """`data.train` or `data.validation` with a dataset class of your own, whose constructor takes all further keys."""

    # The class, as package.module.Class: imported and called on the driver. See
    # [Recipes](recipes.md#a-dataset-class-of-your-own).
    dataset_name: NonEmptyStr


_Kind = TypeVar("_Kind")
_OrImported = Annotated[
    Annotated[ImportedDataset, Tag(IMPORTED)] | Annotated[_Kind, Tag(BUILT_IN)], Discriminator(imported_or_built_in)
]
_OneOrSeveral = Annotated[
    Annotated[_Kind, Tag(ONE)] | Annotated[list[_Kind], Tag(SEVERAL)] | Annotated[None, Tag(NONE)],
    Discriminator(how_many),
]
_BY_NAME = Field(discriminator="dataset_name")

BuiltInDataset = Annotated[ArithmeticDataset | ResponseDataset | HFDataset | NamedProblems, _BY_NAME]
BuiltInSFTDataset = Annotated[
    ArithmeticDataset | ResponseDataset | HFDataset | NamedProblems | NamedConversations, _BY_NAME
]
Dataset = _OrImported[BuiltInDataset]
SFTDataset = _OrImported[BuiltInSFTDataset]


@with_config(STRICT)
class BinaryPreferenceDataset(SplitRows):
    """`data.train` or `data.validation` of DPO with `dataset_name: BinaryPreferenceDataset`: rows of two answers."""

    # Selects a JSONL file, or a folder that `datasets` has saved, whose rows have a prompt, a chosen and a rejected
    # answer.
    dataset_name: Literal["BinaryPreferenceDataset"]
    # The file or folder, relative to the folder that the run is started in.
    data_path: NonEmptyStr
    # Split to read from a folder that has several. Null or absent: a file, or a folder without splits.
    split: NotRequired[NonEmptyStr | None]
    # Field of the prompt, a text or a list of messages.
    prompt_key: NotRequired[Annotated[NonEmptyStr, IfAbsent("prompt")]]
    # Field of the preferred answer: a text, or messages of which the last is the answer.
    chosen_key: NotRequired[Annotated[NonEmptyStr, IfAbsent("chosen")]]
    # Field of the other answer, in the same formats.
    rejected_key: NotRequired[Annotated[NonEmptyStr, IfAbsent("rejected")]]


@with_config(STRICT)
class PreferenceDataset(SplitRows):
    """`data.train` or `data.validation` of DPO with `dataset_name: PreferenceDataset`: rows of ranked completions."""

    # Selects a JSONL file, or a folder that `datasets` has saved, whose rows have a `context` and two ranked
    # `completions`.
    dataset_name: Literal["PreferenceDataset"]
    # The file or folder, relative to the folder that the run is started in.
    data_path: NonEmptyStr
    # Split to read from a folder that has several. Null or absent: a file, or a folder without splits.
    split: NotRequired[NonEmptyStr | None]


@with_config(STRICT)
class NamedPairs(PromptFiles):
    """`data.train` or `data.validation` with the name of a dataset of pairs on the hub."""

    # Selects a dataset of pairs of answers by its name in NeMo-RL.
    dataset_name: Literal[
        "HelpSteer3",
        "Tulu3Preference",
    ]
    # Split of the dataset. Absent: the first one that [Recipes](recipes.md#named-datasets) lists for it.
    split: NotRequired[NonEmptyStr]
    # For data.train only: share (below 1) or number of its rows to split off as validation data, drawn with `seed`.
    # No effect on these datasets, which are not split, as in NeMo-RL.
    split_validation_size: NotRequired[Annotated[NonNegativeFloat | None, IfAbsent(0)]]
    # Seed of this split. Absent: none.
    seed: NotRequired[NonNegativeInt]


BuiltInPairDataset = Annotated[ArithmeticDataset | BinaryPreferenceDataset | PreferenceDataset | NamedPairs, _BY_NAME]
PairDataset = _OrImported[BuiltInPairDataset]


@with_config(STRICT)
class DataDefaults(PromptFiles):
    """Section `data.default` of a GRPO recipe: settings that apply to every dataset of the recipe."""

    # NeMo-RL's name for how a prompt is made from a row, of which there is one here: from the problem, prompt_file,
    # system_prompt_file and the chat template. Null or absent: the same.
    processor: NotRequired[Literal["math_hf_data_processor", "default"] | None]
    # The key under `env` whose reward judges the answers. Absent: an error that lists the keys under `env`.
    env_name: NotRequired[NonEmptyStr]


@with_config(STRICT)
class SFTDataDefaults(PromptFiles):
    """Section `data.default` of an SFT recipe: settings that apply to every dataset of the recipe."""

    # NeMo-RL's name for how a sample is made from a row, of which there is one here: from its messages, prompt_file,
    # system_prompt_file and the chat template. Null or absent: the same.
    processor: NotRequired[Literal["sft_processor"] | None]


@with_config(STRICT)
class PreferenceDataDefaults(PromptFiles):
    """Section `data.default` of a DPO recipe: settings that apply to every dataset of the recipe."""

    # NeMo-RL's name for how a pair is made from a row, of which there is one here: from the prompt with each of its two
    # answers, prompt_file, system_prompt_file and the chat template. Null or absent: the same.
    processor: NotRequired[Literal["preference_preprocessor"] | None]


@with_config(STRICT)
class DataOrder(TypedDict):
    """Keys that the section `data` of every recipe has."""

    # Tokens that a prompt (GRPO), or prompt and answer (SFT), must stay below, and that prompt and answer may reach in
    # DPO, as in NeMo-RL; longer ones are cut and left out of the loss, in DPO the whole pair. Recommended:
    # "${policy.max_total_sequence_length}".
    max_input_seq_length: PositiveInt
    # Read the training data in a new random order in each epoch. Recommended: true.
    shuffle: bool
    # A folder with local copies of named datasets; a dataset that it has as NAME/ (saved by `datasets`, parquet files,
    # or SPLIT.jsonl) or as NAME.jsonl is not read from the hub. Null: none.
    dataset_root: NotRequired[Annotated[NonEmptyStr | None, IfAbsent(None)]]


@with_config(STRICT)
class DataConfig(DataOrder):
    """Section `data` of a GRPO recipe."""

    # Training data.
    train: Dataset
    # Validation data, in addition to what is split off the training data: one dataset, or a list of several, which are
    # read as one. Null: no additional data.
    validation: NotRequired[Annotated[_OneOrSeveral[Dataset], IfAbsent(None)]]
    # Settings that training and validation data share. Null or absent: none.
    default: NotRequired[Annotated[DataDefaults | None, IfAbsent({})]]


@with_config(STRICT)
class SFTDataConfig(DataOrder):
    """Section `data` of an SFT recipe."""

    # Begin each sample with the beginning-of-sequence token. Recommended: true where the tokenizer has one.
    add_bos: NotRequired[Annotated[bool, IfAbsent(True)]]
    # End answers with the end-of-sequence token. Recommended: true.
    add_eos: NotRequired[Annotated[bool, IfAbsent(True)]]
    # End prompts with the chat template's generation prompt. Recommended: true with a chat template, otherwise false.
    add_generation_prompt: NotRequired[Annotated[bool, IfAbsent(False)]]
    # Training data.
    train: SFTDataset
    # Validation data, in addition to what is split off the training data: one dataset, or a list of several, which are
    # read as one. Null: no additional data.
    validation: NotRequired[Annotated[_OneOrSeveral[SFTDataset], IfAbsent(None)]]
    # Settings that training and validation data share. Null or absent: none.
    default: NotRequired[Annotated[SFTDataDefaults | None, IfAbsent({})]]


@with_config(STRICT)
class PreferenceDataConfig(DataOrder):
    """Section `data` of a DPO recipe."""

    # Begin each sample with the beginning-of-sequence token. Recommended: true where the tokenizer has one.
    add_bos: NotRequired[Annotated[bool, IfAbsent(True)]]
    # End answers with the end-of-sequence token. Recommended: true.
    add_eos: NotRequired[Annotated[bool, IfAbsent(True)]]
    # End prompts with the chat template's generation prompt, which is otherwise trained as a part of the answer.
    # Recommended: true with a chat template, otherwise false.
    add_generation_prompt: NotRequired[Annotated[bool, IfAbsent(False)]]
    # Training pairs.
    train: PairDataset
    # Validation pairs, in addition to what is split off the training pairs: one dataset, or a list of several, which
    # are read as one. Null: no additional pairs.
    validation: NotRequired[Annotated[_OneOrSeveral[PairDataset], IfAbsent(None)]]
    # Settings that training and validation data share. Null or absent: none.
    default: NotRequired[Annotated[PreferenceDataDefaults | None, IfAbsent({})]]


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
