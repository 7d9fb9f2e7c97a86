"""Checks the folder of a recipe's model, for a run and for `validate --deep`, before anything is built."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_offload_rl.config.problems import nearest

_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


class ModelFolderError(ValueError):
    """Says that the model is not at the place that the recipe names, or is incomplete there."""


def check_model_folder(config: Mapping[str, Any], *, needs_weights: bool = True) -> None:
    """Refuses a model that is not where the recipe says; names on a hub are left to transformers.

    Args:
        config: a validated recipe.
        needs_weights: whether the model's weights are needed in addition to its config.

    Raises:
        ModelFolderError: the folder does not exist, or has no config.json or no weights.
    """
    policy = config["policy"]
    name = policy["model_name"]
    is_label = bool(policy["hf_config"]) or "warm_start" in config
    if is_label:
        return
    path = Path(name)
    if path.is_dir():
        _check_contents(path, needs_weights=needs_weights)
    elif path.exists():
        raise ModelFolderError(
            f"policy.model_name is {name!r}, which is a file; give the model's folder, or a hub name."
        )
    elif _looks_like_a_path(name):
        raise ModelFolderError(
            f"policy.model_name is {name!r}, but there is no such folder{_remedy(path)}; give a folder in Hugging "
            "Face format, a hub name such as org/model, or policy.hf_config for random weights."
        )


def _looks_like_a_path(name: str) -> bool:
    """Returns whether a name cannot be a hub's, which is MODEL or ORGANISATION/MODEL."""
    return name.startswith((".", "/", "~")) or name.endswith("/") or name.count("/") > 1 or "\\" in name


def _remedy(path: Path) -> str:
    if str(path).startswith("~"):
        return " (~ is not the home folder in a recipe)"
    folder = path.parent
    if not folder.is_dir():
        return f" (nor {folder})"
    close = nearest(path.name, (entry.name for entry in folder.iterdir() if entry.is_dir()))
    return f" (did you mean {folder / close}?)" if close else ""


def _check_contents(folder: Path, *, needs_weights: bool) -> None:
    where = f"policy.model_name is {str(folder)!r}, a folder"
    config = folder / "config.json"
    if not config.is_file():
        raise ModelFolderError(f"{where} without a config.json; give one in Hugging Face format.")
    try:
        json.loads(config.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelFolderError(
            f"{where} whose config.json is not valid JSON ({error}); give one in Hugging Face format."
        ) from error
    if not needs_weights:
        return
    missing = [name for index in _INDEXES for name in _listed(folder / index) if not (folder / name).is_file()]
    if missing:
        raise ModelFolderError(f"{where} without {missing[0]}, which its index lists; copy the whole model.")
    if not any(found for pattern in _WEIGHTS for found in folder.glob(pattern)):
        raise ModelFolderError(
            f"{where} with a config.json and no weights (*.safetensors); give one with weights, or policy.hf_config "
            "for random ones."
        )


def _listed(index: Path) -> list[str]:
    """Returns the files that a weight index lists; an empty list if there is no index."""
    if not index.is_file():
        return []
    try:
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelFolderError(f"{index} is not a valid index of weights ({type(error).__name__}: {error}).") from error
