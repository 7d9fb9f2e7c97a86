"""Checks that the files and folders a recipe names exist, before a run loads any library; `validate` does not."""

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from nemo_offload_rl.config.keys.schema_problems import value_at
from nemo_offload_rl.config.keys.tree import datasets_of
from nemo_offload_rl.config.problems import Problem, RecipeError, nearest, show_file
from nemo_offload_rl.config.schema.value_types import is_import_path
from nemo_offload_rl.config.validate import ValidatedRecipe

JOINED_CONTENTS = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""Template that null stands for: the messages' texts, one after the other."""


def is_default_template(value: str | None) -> bool:
    """Returns whether the tokenizer keeps its own template."""
    return value is not None and value.lower() == "default"


def is_template_file(value: str) -> bool:
    """Returns whether the value is the path of a file with the template."""
    return value.endswith(".jinja")


_READS = "ResponseDataset reads one JSONL file, HFDataset a folder"
PROMPT_FILES = ("prompt_file", "system_prompt_file")
_OF_EITHER = ("BinaryPreferenceDataset", "PreferenceDataset")  # a JSONL file or a folder


def check_named_files(recipe: ValidatedRecipe) -> None:
    """Refuses a recipe whose data or prompt files do not exist.

    Raises:
        RecipeError: lists every file and folder that is missing or of the wrong kind, including the warm start's.
    """
    problems = [
        Problem(key, one.recipe.origin(key), message)
        for one in (recipe, recipe.warm_start)
        if one is not None
        for key, message in _missing(one)
    ]
    if problems:
        raise RecipeError(show_file(recipe.recipe.path), problems)


def _missing(recipe: ValidatedRecipe) -> Iterator[tuple[str, str]]:
    if recipe.config["logger"]["wandb_enabled"] and find_spec("wandb") is None:
        yield "logger.wandb_enabled", "is true without the package wandb; run make setup EXTRAS=wandb, or unset it"
    data = recipe.config["data"]
    datasets = {**datasets_of(data, "train"), **datasets_of(data, "validation")}
    for section, dataset in datasets.items():
        if "data_path" not in dataset or is_import_path(dataset["dataset_name"]):
            continue
        key, path = f"{section}.data_path", Path(dataset["data_path"])
        either, wants_folder = dataset["dataset_name"] in _OF_EITHER, dataset["dataset_name"] == "HFDataset"
        if not os.path.exists(path):  # also false if the path cannot be accessed
            yield key, _absent(path, "file or folder" if either else "folder" if wants_folder else "file")
        elif not either and path.is_dir() is not wants_folder:
            found = "a folder" if path.is_dir() else "a file"
            yield key, f"{path} is {found}, but dataset_name is {dataset['dataset_name']}: {_READS}"
    kinds = {f"{section}.{name}": "file" for section in ("data.default", *datasets) for name in PROMPT_FILES}
    kinds |= {"data.dataset_root": "folder", "grpo.debug.replay_rollouts": "folder"}
    for key, kind in kinds.items():
        path = value_at(recipe.config, key)
        if isinstance(path, str) and not (os.path.isdir(path) if kind == "folder" else os.path.exists(path)):
            yield key, _absent(Path(path), kind)
    tokenizer = recipe.config["policy"]["tokenizer"]["name"]
    if tokenizer.startswith(("/", "./", "../", "~")) and not os.path.exists(tokenizer):
        yield "policy.tokenizer.name", _absent(Path(tokenizer), "folder")
    template = value_at(recipe.config, "policy.tokenizer.chat_template")
    if isinstance(template, str) and is_template_file(template) and not Path(template).is_file():
        yield "policy.tokenizer.chat_template", _absent(Path(template), "file")


def _absent(path: Path, kind: str) -> str:
    started_in = "" if path.is_absolute() else f" in {Path.cwd()}, where this was started"
    around = os.listdir(path.parent) if os.access(path.parent, os.R_OK | os.X_OK) and path.parent.is_dir() else []
    near = nearest(path.name, around)
    return f"there is no {kind} {path}{started_in}" + (f"; did you mean {path.parent / near}?" if near else "")
