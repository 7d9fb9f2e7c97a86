"""Reads named datasets from a folder, the Hugging Face hub or its cache, and makes samples of their rows.

Makes samples from the rows of named datasets, as NeMo-RL does. Users cannot correct these datasets, so empty answers,
and pairs of equal answers, are accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from nemo_offload_rl.data.datasets import (
    DAMAGED,
    PARQUET,
    HFRows,
    ProblemForm,
    is_saved,
    load_hf_folder,
    load_jsonl,
    load_parquet,
    no_files,
    only_files,
    require_files_and_folders,
    selected,
    split_files,
)
from nemo_offload_rl.data.fields import RowForm, describe, field_of, text_of
from nemo_offload_rl.data.preferences import MESSAGE_KEYS, PreferencePair, answer_of, context_of, messages_of
from nemo_offload_rl.data.problem import AnsweredContext, DataError, Message, Problem
from nemo_offload_rl.hub import offline_if_hub_unreachable, why_unreachable
from nemo_offload_rl.named_datasets import NAMED_DATASETS, Form, NamedDataset


@dataclass(frozen=True)
class VerlForm:
    """Reads rows in verl's format, such as DAPO's: a prompt of messages, and the answer in ``reward_model``.

    Attributes:
        keys: columns of the prompt and of the reward.
    """

    keys: tuple[str, ...]

    @property
    def nested_keys(self) -> tuple[str, ...]:
        """The fields of a message, and of the answer."""
        return *MESSAGE_KEYS, "ground_truth"

    def sample(self, row: Mapping[str, Any], where: str) -> Problem:
        """Makes a problem from the first message and the known answer."""
        prompt, reward = self.keys
        messages = field_of(row, prompt, where)
        if not isinstance(messages, list) or not messages or not isinstance(messages[0], dict):
            raise DataError(f"{where}: the field {prompt!r} must be a list of messages, found {describe(messages)}.")
        judged = field_of(row, reward, where)
        if not isinstance(judged, dict):
            raise DataError(f"{where}: the field {reward!r} must be an object, found {describe(judged)}.")
        content = field_of(messages[0], "content", f"{where}: the field {prompt!r}")
        answer = field_of(judged, "ground_truth", f"{where}: the field {reward!r}")
        return Problem(
            text_of(content, f"{where}: the content of {prompt!r}", "a text"),
            text_of(answer, f"{where}: {reward}.ground_truth"),
            where,
        )


@dataclass(frozen=True)
class Gsm8kForm:
    """Reads problems whose answer follows the derivation, after ``####``.

    Attributes:
        keys: columns of the problem and of the derivation with the answer.
    """

    keys: tuple[str, ...]
    nested_keys: tuple[str, ...] = ()

    def sample(self, row: Mapping[str, Any], where: str) -> Problem:
        """Makes a problem with the answer, without its derivation."""
        problem, solution = (text_of(field_of(row, key, where), f"{where}: the field {key!r}") for key in self.keys)
        _, mark, answer = solution.partition("####")
        if not mark:
            raise DataError(f"{where}: the field {self.keys[1]!r} has no '####', after which the answer stands.")
        return Problem(problem, answer.partition("####")[0].strip(), where)


@dataclass(frozen=True)
class SquadForm:
    """Reads questions about a text: the text becomes the system message, the first of the answers is used.

    Attributes:
        keys: columns of the question, the text and the answers.
    """

    keys: tuple[str, ...]
    nested_keys: tuple[str, ...] = ("text",)

    def sample(self, row: Mapping[str, Any], where: str) -> AnsweredContext:
        """Makes a conversation from text, question and answer."""
        question, text = (
            text_of(field_of(row, key, where), f"{where}: the field {key!r}", "a text") for key in self.keys[:2]
        )
        place = f"{where}: the field {self.keys[2]!r}"
        answers = field_of(row, self.keys[2], where)
        texts = field_of(answers, "text", place) if isinstance(answers, dict) else None
        if not isinstance(texts, list) or not texts:
            raise DataError(f"{place} must be an object with a list 'text' of one answer or more.")
        answer = text_of(texts[0], f"{place}: text[0]", "a text")
        return AnsweredContext((Message("system", text), Message("user", question)), answer, where)


@dataclass(frozen=True)
class MessagesForm:
    """Reads conversations that end with the assistant's message.

    Attributes:
        keys: the column of the messages.
    """

    keys: tuple[str, ...]
    nested_keys: tuple[str, ...] = MESSAGE_KEYS

    def sample(self, row: Mapping[str, Any], where: str) -> AnsweredContext:
        """Makes a conversation in which SFT also trains the assistant's earlier messages."""
        [key] = self.keys
        if row.get("tools"):  # NeMo-RL renders them with the chat template
            raise DataError(f"{where} has the field 'tools', but tools are not supported: delete it.")
        place = f"{where}: the field {key!r}"
        context, answer = _split_last(field_of(row, key, where), place)
        return AnsweredContext(context, answer, where, trains_all_answers=True)


@dataclass(frozen=True)
class RankedResponsesForm:
    """Reads HelpSteer3's rows: messages, two responses, and a number whose sign says which of them is preferred.

    If the number is 0, both answers of the pair are the first response, as in NeMo-RL, and no preference is learnt.

    Attributes:
        keys: columns of the messages, of the responses and of the preference.
    """

    keys: tuple[str, ...]
    nested_keys: tuple[str, ...] = MESSAGE_KEYS

    def sample(self, row: Mapping[str, Any], where: str) -> PreferencePair:
        """Makes a pair from the preferred response and the other one."""
        context_key, *response_keys, preference_key = self.keys
        context = context_of(field_of(row, context_key, where), f"{where}: the field {context_key!r}")
        first, second = (
            answer_of(field_of(row, key, where), context, f"{where}: the field {key!r}", may_be_empty=True)
            for key in response_keys
        )
        preference = field_of(row, preference_key, where)
        if not isinstance(preference, int) or isinstance(preference, bool):
            raise DataError(f"{where}: the field {preference_key!r} must be an integer, found {describe(preference)}.")
        if preference > 0:
            return PreferencePair(context, second, first, where)
        return PreferencePair(context, first, second if preference < 0 else first, where)


@dataclass(frozen=True)
class TwoConversationsForm:
    """Reads rows of two conversations that differ in their last message, the assistant's.

    Attributes:
        keys: columns of the preferred conversation and of the other one.
    """

    keys: tuple[str, ...]
    nested_keys: tuple[str, ...] = MESSAGE_KEYS

    def sample(self, row: Mapping[str, Any], where: str) -> PreferencePair:
        """Makes a pair from the last messages of both conversations."""
        chosen_key, rejected_key = self.keys
        context, chosen = _split_last(field_of(row, chosen_key, where), f"{where}: the field {chosen_key!r}")
        place = f"{where}: the field {rejected_key!r}"
        rejected = answer_of(field_of(row, rejected_key, where), context, place, may_be_empty=True)
        return PreferencePair(context, chosen, rejected, where)


def _split_last(value: Any, place: str) -> tuple[tuple[Message, ...], str]:
    """Returns the messages before the last one, and the text of the last one, which is the assistant's."""
    if not isinstance(value, list):
        raise DataError(f"{place} must be a list of messages, found {describe(value)}.")
    messages = messages_of(value, place)
    context = context_of(value[:-1], f"{place}, without its last message,")
    return context, answer_of(value, messages[:-1], place, may_be_empty=True)


FORMS: Mapping[Form, Callable[[tuple[str, ...]], RowForm[Any]]] = MappingProxyType(
    {
        "columns": lambda keys: ProblemForm(*keys),
        "verl": VerlForm,
        "gsm8k": Gsm8kForm,
        "squad": SquadForm,
        "messages": MessagesForm,
        "ranked_responses": RankedResponsesForm,
        "two_conversations": TwoConversationsForm,
    }
)


_ENDINGS = (*PARQUET, ".jsonl")
# Folders of a split's files, if the dataset has parts but its folder only has the files of one part.
_OWN_FOLDERS = (".", "data")


def load_named(
    name: str,
    *,
    split: str,
    output_key: str | None = None,
    repeat: int | None = None,
    max_samples: int | None = None,
    seed: int | None = None,
    root: Path | None = None,
) -> Sequence[Any]:
    """Opens a named dataset; reads rows when they are used, unless they are in JSONL files or several folders.

    Args:
        name: a key of ``NAMED_DATASETS``.
        split: the split to read.
        output_key: column of the answer; None for the dataset's own.
        repeat: how many times the dataset is repeated as a whole; None for once.
        max_samples: the most rows to keep, drawn as `shuffle` of ``datasets`` and so NeMo-RL does; None or 0 for all.
        seed: seed of this draw; an int where there is one.
        root: a folder that may have a folder or a JSONL file of that name, with the dataset's columns; None to use the
            hub only.

    Raises:
        DataError: the dataset is neither in `root` nor in the hub or its cache, has other columns, or `root` has it
            twice.
    """
    dataset = NAMED_DATASETS[name]
    columns = dataset.columns if output_key is None else (*dataset.columns[:-1], output_key)
    form = FORMS[dataset.form](columns)
    samples = _local_samples(name, dataset, split, form, root)
    if samples is None:
        samples = _hub_samples(name, dataset, split, form, root)
    if max_samples:
        return selected(samples, np.random.default_rng(seed).permutation(len(samples))[:max_samples])
    return samples if repeat is None else selected(samples, np.tile(np.arange(len(samples)), repeat))


def _local_samples(
    name: str, dataset: NamedDataset, split: str, form: RowForm[Any], root: Path | None
) -> Sequence[Any] | None:
    if root is None:
        return None
    if not root.is_dir():
        raise DataError(f"data.dataset_root: {root} does not exist or is not a folder.")
    folder, file = root / name, root / f"{name}.jsonl"
    in_folder = _folder_samples(folder, dataset, split, form) if folder.is_dir() else None
    if not file.exists():
        if in_folder is None and folder.is_dir():
            raise no_files(folder, split, _ENDINGS)
        return in_folder
    if in_folder is not None:
        if split == dataset.splits[0]:
            raise DataError(
                f"data.dataset_root has the split {split!r} of {name} twice: in the folder {folder} and in {file}; "
                "keep one of them."
            )
        return in_folder
    if split != dataset.splits[0]:
        raise DataError(
            f"data.dataset_root: {file} stands for the split {dataset.splits[0]!r} of {name}, but the recipe asks for "
            f"{split!r}: write that to {folder / f'{split}.jsonl'}."
        )
    return load_jsonl(file, form)


def _folder_samples(folder: Path, dataset: NamedDataset, split: str, form: RowForm[Any]) -> Sequence[Any] | None:
    """Reads a split from the folders of the dataset's parts or, without such folders, from the dataset's own folder.

    Returns None if the folder does not have the split.
    """
    parts = [folder / subset for subset in dataset.subsets]
    missing = [part.name for part in parts if not part.is_dir()]
    if len(missing) == len(parts):
        return _part_samples(folder, dataset, split, form, _OWN_FOLDERS if parts else ())
    if missing:
        raise DataError(
            f"The folder {folder} lacks {', '.join(missing)} of the dataset's parts {', '.join(dataset.subsets)}; copy "
            "them there, too."
        )
    of_parts: list[Sequence[Any]] = []
    for part in parts:
        samples = _part_samples(part, dataset, split, form, ())
        if samples is None:
            raise no_files(part, split, _ENDINGS)
        of_parts.append(samples)
    return of_parts[0] if len(of_parts) == 1 else [sample for samples in of_parts for sample in samples]


def _part_samples(
    folder: Path, dataset: NamedDataset, split: str, form: RowForm[Any], in_folders: Sequence[str]
) -> Sequence[Any] | None:
    has_one_split = len(dataset.splits) == 1
    if is_saved(folder):
        named_by_split = not has_one_split or (folder / "dataset_dict.json").exists()
        return load_hf_folder(folder, split if named_by_split else None, form)
    require_files_and_folders(folder)
    files = split_files(folder, split, _ENDINGS, in_folders=in_folders)
    if not files and has_one_split:
        files = only_files(folder, _ENDINGS)
    if not files:
        return None
    if files[0].suffix in PARQUET:
        return load_parquet(files, folder, form)
    return [sample for file in files for sample in load_jsonl(file, form)]


def _hub_samples(name: str, dataset: NamedDataset, split: str, form: RowForm[Any], root: Path | None) -> HFRows[Any]:
    from datasets import concatenate_datasets, load_dataset
    from datasets.exceptions import DatasetsError
    from huggingface_hub.errors import HfHubHTTPError

    path = dataset.hub_path
    try:
        with offline_if_hub_unreachable(path):
            parts = [
                load_dataset(path, subset, split=split, trust_remote_code=False)
                for subset in dataset.subsets or (None,)
            ]
    except (DatasetsError, HfHubHTTPError, *DAMAGED) as error:
        in_root = "" if root is None else f", {root} has neither a folder {name} nor a file {name}.jsonl"
        reason = why_unreachable() or f"{type(error).__name__}: {str(error)[:200]}"
        loading = ", ".join(map(repr, (path, *dataset.subsets[:1])))
        raise DataError(
            f"The dataset {name} cannot be read: it is {path} of the hub, which is not in the cache of datasets "
            f"(HF_HOME){in_root}, and {reason}. Either call datasets.load_dataset({loading}) once where there is a "
            f"network, with the HF_HOME of this run, or set data.dataset_root to a folder that has {name}/ (parquet "
            f"files or what save_to_disk of datasets writes) or {name}/{split}.jsonl, with the columns "
            f"{', '.join(form.keys)}."
        ) from error
    rows = parts[0] if len(parts) == 1 else concatenate_datasets(parts)
    for key in form.keys:
        if key not in rows.column_names:
            names = ", ".join(rows.column_names)
            raise DataError(f"The dataset {path} of the hub has no column {key!r}; it has {names}.")
    return HFRows(rows.select_columns(list(form.keys)), f"{path} ({split})", form)
