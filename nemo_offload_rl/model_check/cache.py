"""Caches the results of checks on disk, so that a model is checked once for each version of the code involved."""

import hashlib
import importlib.metadata
import json
import os
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import nemo_offload_rl
from nemo_offload_rl.model_check.result import CheckResult
from nemo_offload_rl.storage.disk import cache_folder

_LIBRARIES = ("torch", "transformers", "megatron-core", "megatron-bridge", "transformer-engine")
# Parts of this package that decide how a model and its twin are built and compared.
_SOURCES = ("hf_config.py", "mcore", "model_check")


def key_of(section: Mapping[str, Any], *, device: str) -> str:
    """Returns the key under which the result for a twin is cached.

    Args:
        section: the twin's policy section, with its Hugging Face config.
        device: the name of the GPU, or cpu.
    """
    parts = {"section": section, "device": device, "versions": _versions(), "source": _source_hash()}
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=repr).encode()).hexdigest()


def read(key: str) -> CheckResult | None:
    """Returns the result cached under a key; None if there is none that can be read."""
    try:
        return CheckResult.from_json(json.loads(_path(key).read_text(encoding="utf-8")))
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        RuntimeError,
    ):  # missing, damaged, or no home: the check runs again
        return None


def write(key: str, result: CheckResult) -> None:
    """Caches a result; does nothing if the folder is not writable."""
    try:
        path = _path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".partial", delete=False) as file:
            try:
                json.dump(result.to_json(), file, allow_nan=False)
                file.flush()
                os.fsync(file.fileno())
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise
    except (OSError, RuntimeError):  # training does not need a writable home
        return


def _path(key: str) -> Path:
    return cache_folder("model_check") / f"{key}.json"


@cache
def _versions() -> dict[str, str | None]:
    return {name: _version(name) for name in _LIBRARIES}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


@cache
def _source_hash() -> str:
    """Returns a hash of the source files that affect the result; the version does not change with every commit."""
    root = Path(nemo_offload_rl.__file__).parent
    digest = hashlib.sha256()
    for name in _SOURCES:
        path = root / name
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()
