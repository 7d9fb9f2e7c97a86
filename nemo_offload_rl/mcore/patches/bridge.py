"""Changes Megatron-Bridge: its import without Transformer Engine, and the work and copies of its exports.

Gives one module of Megatron-Bridge a placeholder for Transformer Engine while it is imported without it. Without
Transformer Engine `import megatron.bridge` fails in one module, `peft/lora_layers.py`, which names Transformer Engine's
classes though nothing here uses LoRA. Every other probe for Transformer Engine still finds none.

Replaces work that Megatron-Bridge repeats for every layer of every export, and copies that block the host there.
Megatron-Bridge walks and strips the config of each attention layer for other pipeline stages, even if there is only
one, and picks rows of query, key and value by CPU index tensors, each of which is copied to the GPU while the host
waits. Without both, and with cached conversion tasks, the host's part of an export of 28 layers falls from 76 to 7 ms.
"""

import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
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


Split = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Query, key and value."""

_stripped: dict[int, tuple[weakref.ref[Any], Any]] = {}
"""By id of a config: a weak reference to it, and its stripped copy at a depth of 3."""


def make_exports_fast() -> None:
    """Install the replacements in this process; calling it again does nothing."""
    from megatron.bridge.models.conversion import param_mapping
    from megatron.bridge.models.conversion.model_bridge import HFWeightTuple

    replacements: dict[str, Callable[..., Any]] = {
        "remove_non_pickleables": strip_once,
        "split_qkv_weights": split_weights,
        "split_qkv_biases": split_biases,
    }
    for name, replacement in replacements.items():
        original = getattr(param_mapping, name)
        if not isinstance(original, functools.partial):
            setattr(param_mapping, name, functools.partial(replacement, original))
    finalize = vars(HFWeightTuple)["iter_finalized"]
    if not isinstance(finalize, functools.partialmethod):
        HFWeightTuple.iter_finalized = functools.partialmethod(finalize_without_copy, finalize)


def finalize_without_copy(
    weight: Any,
    original: Callable[..., Any],
    *,
    cpu: bool,
    export_hook: Any = None,
    clone_identity_output: bool = False,
) -> Any:
    """Do what `HFWeightTuple.iter_finalized` does, but do not copy a tied output layer, which is the embedding itself.

    The copy, 0.4 GiB with 151,936 tokens of 1,536 numbers, would be the largest that a recorded export keeps.
    """
    return original(weight, cpu=cpu, export_hook=export_hook)


def strip_once(original: Callable[..., Any], obj: Any, max_depth: int = 3, current_depth: int = 0) -> Any:
    """Do what `remove_non_pickleables` does, once for each config; an export reads only sizes, which do not change."""
    if current_depth or max_depth != 3:
        return original(obj, max_depth, current_depth)
    found = _stripped.get(id(obj))
    if found is None or found[0]() is not obj:
        number = id(obj)
        forget = weakref.ref(obj, lambda _: _stripped.pop(number, None))
        _stripped[number] = found = forget, original(obj, max_depth)
    return found[1]


def split_weights(
    original: Callable[..., Split], provider: Any, qkv: torch.Tensor, feature_dim: int | None = None
) -> Split:
    """Split [rows of query, key and value by group, hidden] without index tensors; bit for bit `split_qkv_weights`."""
    width = provider.hidden_size if feature_dim is None else feature_dim
    if _has_output_gate(provider) or qkv.dim() != 2 or qkv.shape[-1] != width:  # such as scales of fp8
        return original(provider, qkv, feature_dim)
    return _split(provider, qkv)


def split_biases(original: Callable[..., Split], config: Any, qkv: torch.Tensor) -> Split:
    """Split [rows of query, key and value by group] without index tensors; bit for bit `split_qkv_biases`."""
    return original(config, qkv) if _has_output_gate(config) else _split(config, qkv)


def _has_output_gate(config: Any) -> bool:
    return bool(getattr(config, "attention_output_gate", False))


def _split(config: Any, qkv: torch.Tensor) -> Split:
    """Split by group: each has the rows of its query heads, then of its key head, then of its value head."""
    groups = config.num_query_groups
    heads = config.num_attention_heads // groups
    head_size = config.kv_channels or config.hidden_size // config.num_attention_heads
    parts = qkv.view(groups, (heads + 2) * head_size, *qkv.shape[1:]).split(
        [heads * head_size, head_size, head_size], 1
    )
    query, key, value = (part.reshape(-1, *qkv.shape[1:]) for part in parts)
    return query, key, value
