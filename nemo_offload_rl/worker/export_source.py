"""Checks the source of an export before torch is imported, so that a wrong folder is reported at once."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from nemo_offload_rl.config import resolve_absent_keys
from nemo_offload_rl.storage.disk import require_writable

_STEP = re.compile(r"step_\d+")


@dataclass(frozen=True)
class ExportSource:
    """Names the parts of a run's checkpoint that an export reads.

    Attributes:
        policy: the folder of the policy's state.
        tokenizer: the tokenizer's folder.
        recipe: the resolved recipe.
        hf_config: the model's Hugging Face config.
    """

    policy: Path
    tokenizer: Path
    recipe: dict[str, Any]
    hf_config: dict[str, Any]


def read_export_source(checkpoint: Path, folder: Path) -> ExportSource:
    """Find and read the parts of a checkpoint that an export needs besides the weights.

    Args:
        checkpoint: a `step_N` folder of a run.
        folder: where the export will go.

    Raises:
        ValueError: `checkpoint` is no such folder or lacks a part, or `folder` is a file or holds something else.
    """
    if not checkpoint.is_dir():
        kind = "is a file" if checkpoint.exists() else "does not exist"
        raise ValueError(f"{checkpoint} {kind}; give a checkpoint's folder, such as .../step_100.")
    policy, tokenizer = checkpoint / "policy", checkpoint / "tokenizer"
    parts = (checkpoint / "recipe.yaml", policy / "metadata.json", policy / "hf_config" / "config.json", tokenizer)
    missing = [str(part.relative_to(checkpoint)) for part in parts if not part.exists()]
    if missing:
        raise ValueError(
            f"{checkpoint} is not a checkpoint of a run: it has no {' and no '.join(missing)}; {_remedy(checkpoint)}"
        )
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; give an empty or new folder.")
    if folder.exists() and any(folder.iterdir()) and not (folder / "config.json").is_file():
        raise ValueError(f"{folder} is not empty and holds no model; give an empty or new folder.")
    require_writable(folder)
    recipe = _mapping(parts[0], yaml.safe_load, "policy")
    resolve_absent_keys(recipe)  # earlier versions wrote fewer keys
    return ExportSource(policy, tokenizer, recipe, _mapping(parts[2], json.loads, "model_type"))


def _remedy(checkpoint: Path) -> str:
    steps = sorted(
        (path for path in checkpoint.iterdir() if _STEP.fullmatch(path.name)), key=lambda path: int(path.name[5:])
    )
    if steps:
        return f"give one of the checkpoints in it, such as {steps[-1]}."
    if (checkpoint / "config.json").is_file():
        return "it is a Hugging Face folder already."
    return "give a checkpoint's folder, such as .../step_100."


def _mapping(path: Path, parse: Any, key: str) -> dict[str, Any]:
    try:
        content = parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path} cannot be read: {' '.join(str(error).split())}; take another checkpoint.") from error
    if not isinstance(content, Mapping) or key not in content:
        raise ValueError(f"{path} was not written by a run: it has no {key}; take another checkpoint.")
    return dict(content)
