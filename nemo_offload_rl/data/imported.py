"""Makes datasets of classes that a recipe names by their import path, as NeMo-RL does."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_offload_rl.data.datasets import HFRows, with_columns
from nemo_offload_rl.data.fields import RowForm
from nemo_offload_rl.data.problem import DataError


@dataclass(frozen=True)
class _Preprocessed[Sample]:
    """Reads rows that the dataset's ``preprocessor`` has converted; see ``fields.RowForm``."""

    preprocessor: Callable[[Mapping[str, Any]], Any]
    form: RowForm[Sample]
    name: str
    keys: tuple[str, ...] = ()  # rows have those of the form only after the conversion
    nested_keys: tuple[str, ...] = ()

    def sample(self, row: Mapping[str, Any], where: str) -> Sample:
        try:
            converted = self.preprocessor(row)
        except Exception as error:  # a user's function may raise anything
            raise DataError(f"{where}: the preprocessor of {self.name} failed: {_cause(error)}") from error
        if not isinstance(converted, dict):
            raise DataError(f"{where}: the preprocessor of {self.name} must return a dict, found {converted!r}.")
        return self.form.sample(converted, where)


def load_imported[Sample](
    key: str, name: str, arguments: Mapping[str, Any], form: RowForm[Sample]
) -> tuple[HFRows[Sample], HFRows[Sample] | None]:
    """Imports a dataset class, which executes its module, calls it, and opens what it holds.

    As in NeMo-RL, the object has its rows as `dataset`, a ``datasets.Dataset``; it may have rows for validation as
    `val_dataset`, and a function `preprocessor` that converts a row when it is read.

    Args:
        key: the recipe's key with the name, for messages.
        name: package.module.Class, found on the Python path or in the folder that the run was started from.
        arguments: the recipe's section, all of which the class is called with.
        form: makes samples from the rows.

    Returns:
        The rows, and those for validation, None if it has none.

    Raises:
        DataError: the module or class cannot be imported or called, or is no dataset.
    """
    dataset = _made(key, name, arguments)
    preprocessor = getattr(dataset, "preprocessor", None)
    row_form = form if preprocessor is None else _Preprocessed(preprocessor, form, name)
    rows = _rows(key, name, dataset, "dataset", row_form)
    if getattr(dataset, "val_dataset", None) is None:
        return rows, None
    return rows, _rows(key, name, dataset, "val_dataset", row_form)


def _made(key: str, name: str, arguments: Mapping[str, Any]) -> Any:
    module_name, _, class_name = name.rpartition(".")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a user's module may raise anything
        raise DataError(
            f"{key} is {name}, but the module {module_name} cannot be imported: {_cause(error)}; install it, or add "
            "its folder to PYTHONPATH."
        ) from error
    if not hasattr(module, class_name):
        raise DataError(f"{key} is {name}, but the module {module_name} has no class {class_name}: correct the name.")
    found = getattr(module, class_name)
    if not isinstance(found, type):
        raise DataError(f"{key} is {name}, which must be a class that holds a dataset, but is {type(found).__name__}.")
    try:
        return found(**arguments)
    except Exception as error:
        raise DataError(
            f"{key}: {name} cannot be made with the keys of its section ({', '.join(arguments)}): {_cause(error)}"
        ) from error


def _rows[Sample](key: str, name: str, dataset: Any, attribute: str, form: RowForm[Sample]) -> HFRows[Sample]:
    from datasets import Dataset

    rows = getattr(dataset, attribute, None)
    if not isinstance(rows, Dataset):
        raise DataError(
            f"{key}: {name} must hold its rows as the attribute {attribute}, a datasets.Dataset; found "
            f"{'none' if rows is None else type(rows).__name__}."
        )
    return with_columns(rows, Path(name), form)


def _cause(error: Exception) -> str:
    """Returns the error's type and message, and the line that raised it if that is not the call itself."""
    lines = str(error).strip().splitlines()
    message = f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
    inside = [frame for frame in traceback.extract_tb(error.__traceback__)[1:] if "importlib" not in frame.filename]
    return f"{message} ({inside[-1].filename}, line {inside[-1].lineno})" if inside else message
