"""Names and types of vLLM's engine arguments, read from the installed source without importing it.

Importing vLLM takes many seconds and needs a GPU's libraries; its arguments are one dataclass.
"""

import ast
import importlib.util
from collections.abc import Container, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from nemo_offload_rl.config.installed.annotations import Annotations, annotated, fields_of
from nemo_offload_rl.config.problems import KEYS_ALIKE, nearest, show

_FILE, _CLASS = "engine/arg_utils.py", "EngineArgs"
# vLLM's own types, such as its configs and literals with a name, are left to vLLM.
_ANNOTATIONS = Annotations(members=lambda name: None, accepts_unknown=True)


def source_folder() -> Path | None:
    """Returns the folder of the installed vLLM; None if there is none."""
    found = importlib.util.find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        return None
    return Path(found.submodule_search_locations[0])


@cache
def declared_arguments(folder: Path) -> Mapping[str, ast.expr]:
    """Returns the type of each argument by name; empty if this vLLM declares them elsewhere.

    Args:
        folder: vLLM's folder.
    """
    path = folder / _FILE
    if not path.is_file():
        return {}
    definition = fields_of(path.read_text(encoding="utf-8"), _CLASS)
    return {} if definition is None else {name: field.annotation for name, field in annotated(definition).items()}


def why_refused(name: str, value: Any, never: Container[str]) -> str | None:
    """Returns why vLLM would refuse an argument, with the remedy; None if it would not, or is not installed here.

    Args:
        name: the argument's name.
        value: its value in a recipe; null is left to vLLM.
        never: arguments that a recipe may not set, and that no message suggests.
    """
    folder = source_folder()
    declared = {} if folder is None else declared_arguments(folder)
    if not declared:
        return None
    if name not in declared:
        close = nearest(name, (other for other in declared if other not in never), cutoff=KEYS_ALIKE)
        return f"is not an argument of the installed vLLM{f'; did you mean {close}?' if close else '; delete it'}"
    if value is None or _ANNOTATIONS.accepts(declared[name], value):
        return None
    return f"is {show(value)}, but must be {_ANNOTATIONS.words(declared[name])} for the installed vLLM"
