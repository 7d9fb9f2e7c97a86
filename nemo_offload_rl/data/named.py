"""Reads named datasets from a user's folder, or otherwise from the Hugging Face hub or its cache."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nemo_offload_rl.data.datasets import (
    DAMAGED,
    PARQUET,
    HFRows,
    is_saved,
    load_hf_folder,
    load_jsonl,
    load_parquet,
    selected,
)
from nemo_offload_rl.data.errors import DataError
from nemo_offload_rl.data.fields import RowForm
from nemo_offload_rl.data.named_rows import FORMS
from nemo_offload_rl.data.split_files import no_files, only_files, require_files_and_folders, split_files
from nemo_offload_rl.hub import offline_if_hub_unreachable, why_unreachable
from nemo_offload_rl.named_datasets import NAMED_DATASETS, NamedDataset

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
