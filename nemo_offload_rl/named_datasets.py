"""The datasets that recipes may name as in NeMo-RL: where each is on the hub, and the format of its rows.

To add a dataset, add a row here, and a form to ``data.named`` if no existing form fits its rows.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

Form = Literal["columns", "verl", "gsm8k", "squad", "messages", "ranked_responses", "two_conversations"]


@dataclass(frozen=True)
class NamedDataset:
    """Describes a dataset on the Hugging Face hub that recipes may name.

    Attributes:
        hub_path: the dataset's name on the hub.
        form: the conversion of a row to a problem with its answer, or to a pair of answers; a key of
            ``data.named.FORMS``.
        columns: the columns to read, the prompt's first.
        splits: the splits that a recipe may name; the first is the default.
        subsets: the dataset's subsets (configurations) to read, in order; empty for a dataset without subsets.
        output_keys: columns that a recipe's ``output_key`` may name instead of the answer's.
        repeat: the default of a recipe's ``repeat``, how often the rows are read; None if a recipe may not set it.
        validation_share: the default share of the training data to split off for validation; None for a dataset that
            NeMo-RL never splits.
        reads_max_samples: whether a recipe's ``max_samples`` draws some of the rows, before any split.
    """

    hub_path: str
    form: Form
    columns: tuple[str, ...]
    splits: tuple[str, ...] = ("train",)
    subsets: tuple[str, ...] = ()
    output_keys: tuple[str, ...] = ()
    repeat: int | None = None
    validation_share: float | None = None
    reads_max_samples: bool = False

    @property
    def if_absent(self) -> dict[str, Any]:
        """Values of the absent keys of a recipe's section, in training and in validation."""
        values: dict[str, Any] = {"split": self.splits[0]}
        if self.output_keys:
            values["output_key"] = self.output_keys[0]
        if self.repeat is not None:
            values["repeat"] = self.repeat
        if self.reads_max_samples:
            values["seed"] = 42
        return values

    @property
    def if_absent_in_training(self) -> dict[str, Any]:
        """Further values of absent keys that only ``data.train`` has."""
        if self.validation_share is None:
            return {}
        return {"split_validation_size": self.validation_share, "seed": 42}


_OPEN_MATH = NamedDataset(
    "nvidia/OpenMathInstruct-2",
    "columns",
    ("problem", "expected_answer"),
    splits=("train_1M", "train", "train_2M", "train_5M"),
    output_keys=("expected_answer", "generated_solution"),
    validation_share=0.05,
)
_DAPO_COLUMNS = ("prompt", "reward_model")

# Problems with an answer: the reference for the reward, or in SFT the training target.
PROBLEMS: Mapping[str, NamedDataset] = MappingProxyType(
    {
        "OpenMathInstruct-2": _OPEN_MATH,
        "openmathinstruct2": _OPEN_MATH,
        "DAPOMath17K": NamedDataset("BytedTsinghua-SIA/DAPO-Math-17k", "verl", _DAPO_COLUMNS),
        "DAPOMathAIME2024": NamedDataset("BytedTsinghua-SIA/AIME-2024", "verl", _DAPO_COLUMNS),
        "AIME2024": NamedDataset("HuggingFaceH4/aime_2024", "columns", ("problem", "answer"), repeat=1),
        "AIME2025": NamedDataset(
            "opencompass/AIME2025",
            "columns",
            ("question", "answer"),
            splits=("test",),
            subsets=("AIME2025-I", "AIME2025-II"),
            repeat=1,
        ),
        "DeepScaler": NamedDataset("agentica-org/DeepScaleR-Preview-Dataset", "columns", ("problem", "answer")),
        "gsm8k": NamedDataset(
            "openai/gsm8k", "gsm8k", ("question", "answer"), splits=("train", "test"), subsets=("main",)
        ),
    }
)

# Conversations; SFT trains on the assistant's turns.
CONVERSATIONS: Mapping[str, NamedDataset] = MappingProxyType(
    {
        "squad": NamedDataset(
            "rajpurkar/squad", "squad", ("question", "context", "answers"), splits=("train", "validation")
        ),
        "tulu3_sft_mixture": NamedDataset(
            "allenai/tulu-3-sft-mixture", "messages", ("messages",), validation_share=0.05, reads_max_samples=True
        ),
        "Nemotron-Cascade-2-SFT-Math": NamedDataset(
            "nvidia/Nemotron-Cascade-2-SFT-Data",
            "messages",
            ("messages",),
            subsets=("math",),
            validation_share=0.05,
            reads_max_samples=True,
        ),
    }
)

# Pairs of a preferred and a rejected answer, for DPO.
PAIRS: Mapping[str, NamedDataset] = MappingProxyType(
    {
        "HelpSteer3": NamedDataset(
            "nvidia/HelpSteer3",
            "ranked_responses",
            ("context", "response1", "response2", "overall_preference"),
            splits=("train", "validation"),
            subsets=("preference",),
        ),
        "Tulu3Preference": NamedDataset(
            "allenai/llama-3.1-tulu-3-8b-preference-mixture", "two_conversations", ("chosen", "rejected")
        ),
    }
)

NAMED_DATASETS: Mapping[str, NamedDataset] = MappingProxyType({**PROBLEMS, **CONVERSATIONS, **PAIRS})
