"""Gives one module of Megatron-Bridge a placeholder for Transformer Engine while it is imported without it.

Without Transformer Engine `import megatron.bridge` fails in one module, `peft/lora_layers.py`, which names Transformer
Engine's classes though nothing here uses LoRA. Every other probe for Transformer Engine still finds none.
"""

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch

_NEEDS_PLACEHOLDER = "megatron.bridge.peft.lora_layers"


class _Absent(torch.nn.Module):
    """Stands for any class of Transformer Engine in annotations and isinstance checks: nothing is an instance of it."""


class _Placeholder(types.ModuleType):
    """Stands for a module of Transformer Engine while the one module that needs it is imported."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Placeholder(name) if name.islower() else _Absent


class _LoaderWithPlaceholder(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        engine = _Placeholder("transformer_engine")
        pytorch = _Placeholder("transformer_engine.pytorch")
        engine.__dict__["pytorch"] = pytorch
        sys.modules.update({"transformer_engine": engine, "transformer_engine.pytorch": pytorch})
        try:
            self._loader.exec_module(module)
        finally:
            del sys.modules["transformer_engine"], sys.modules["transformer_engine.pytorch"]


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _NEEDS_PLACEHOLDER:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        assert spec is not None and spec.loader is not None
        spec.loader = _LoaderWithPlaceholder(spec.loader)
        return spec


@contextlib.contextmanager
def placeholder_where_absent() -> Iterator[None]:
    """Import Megatron-Bridge inside, with or without Transformer Engine."""
    finder = _Finder()
    if importlib.util.find_spec("transformer_engine") is None:
        sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)
