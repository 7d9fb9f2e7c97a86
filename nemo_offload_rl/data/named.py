"""Reads named datasets: from a folder of the user's, or else from the hub or its cache."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nemo_offload_rl.data.datasets import DAMAGED, HFRows, load_hf_folder, load_jsonl
from nemo_offload_rl.data.errors import DataError
from nemo_offload_rl.data.fields import RowForm
from nemo_offload_rl.data.named_rows import FORMS
from nemo_offload_rl.hub import asking_no_hub_in_vain, why_unreachable
from nemo_offload_rl.named_datasets import NAMED_DATASETS, NamedDataset


def load_named(
    name: str, *, split: str, output_key: str | None = None, repeat: int | None = None, root: Path | None = None
) -> Sequence[Any]:
    """Opens a named dataset; its rows are read as they are used, unless they are in a JSONL file.

    Args:
        name: a key of ``NAMED_DATASETS``.
        split: of the dataset.
        output_key: column of the answer; None for the dataset's own.
        repeat: how often the rows are read, all of them each time; None for once.
        root: a folder that may hold a folder or a JSONL file of that name, with the dataset's columns; None for none.

    Raises:
        DataError: it is neither there nor to be had from the hub or its cache, or has other columns.
    """
    dataset = NAMED_DATASETS[name]
    columns = dataset.columns if output_key is None else (*dataset.columns[:-1], output_key)
    form = FORMS[dataset.form](columns)
    samples = _local_samples(name, dataset, split, form, root)
    if samples is None:
        samples = _hub_samples(name, dataset, split, form, root)
    return samples if repeat is None else _repeated(samples, repeat)


def _local_samples(
    name: str, dataset: NamedDataset, split: str, form: RowForm[Any], root: Path | None
) -> Sequence[Any] | None:
    if root is None:
        return None
    if not root.is_dir():
        raise DataError(f"data.dataset_root: {root} does not exist or is not a folder.")
    folder, file = root / name, root / f"{name}.jsonl"
    if (folder / f"{split}.jsonl").exists():
        return load_jsonl(folder / f"{split}.jsonl", form)
    if folder.is_dir():
        named_by_split = len(dataset.splits) > 1 or (folder / "dataset_dict.json").exists()
        return load_hf_folder(folder, split if named_by_split else None, form)
    if not file.exists():
        return None
    if split != dataset.splits[0]:
        raise DataError(
            f"data.dataset_root: {file} stands for the split {dataset.splits[0]!r} of {name}, but the recipe asks for "
            f"{split!r}: write that to {folder / f'{split}.jsonl'}."
        )
    return load_jsonl(file, form)


def _hub_samples(name: str, dataset: NamedDataset, split: str, form: RowForm[Any], root: Path | None) -> HFRows[Any]:
    from datasets import concatenate_datasets, load_dataset
    from datasets.exceptions import DatasetsError
    from huggingface_hub.errors import HfHubHTTPError

    path = dataset.hub_path
    try:
        with asking_no_hub_in_vain(path):
            parts = [load_dataset(path, subset, split=split) for subset in dataset.subsets or (None,)]
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


def _repeated(samples: Sequence[Any], repeat: int) -> Sequence[Any]:
    if isinstance(samples, HFRows):
        return samples.select(np.tile(np.arange(len(samples)), repeat))
    return list(samples) * repeat
