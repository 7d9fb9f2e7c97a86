"""Writes a policy as a Hugging Face folder.

`AutoBridge.save_hf_pretrained` needs ModelOpt, which nothing else here does; the weights come from `export_hf_weights`.
"""

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from nemo_offload_rl.hf_config import GENERATION_CONFIG_FILE
from nemo_offload_rl.mcore.distributed import gather, raise_together
from nemo_offload_rl.storage.disk import as_by_umask, sync, system_error

SHARD_BYTES = 4 * 2**30
HF_CONFIG_DIR = "hf_config"


def hf_config_of(bridge: Any) -> Any:
    """Returns the `PretrainedConfig` behind a bridge made from a config or from a folder."""
    source = bridge.hf_pretrained
    return source.config if hasattr(source, "config") else source


def save_hf_config(config: Any, generation_config: Mapping[str, Any] | None, folder: Path) -> None:
    """Write config.json and, unless it is None, generation_config.json with the contents of the source's file."""
    config.save_pretrained(folder)
    if generation_config is not None:
        (folder / GENERATION_CONFIG_FILE).write_text(json.dumps(generation_config, indent=2) + "\n", encoding="utf-8")


def _shards(named: Iterable[tuple[str, torch.Tensor]], max_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
    shard: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in named:
        if shard and size + tensor.nbytes > max_bytes:
            yield shard
            shard, size = {}, 0
        # A copy: the exporter may yield views of buffers that it writes again.
        shard[name] = tensor.detach().to("cpu", copy=True).contiguous()
        size += tensor.nbytes
    if shard:
        yield shard


def write_hf_folder(
    named_weights: Iterable[tuple[str, torch.Tensor]],
    bridge: Any,
    generation_config: Mapping[str, Any] | None,
    folder: Path,
    *,
    write: bool,
) -> None:
    """Write safetensors shards and configs; a folder that exists is replaced only once the new one is complete.

    Args:
        named_weights: Hugging Face names and whole tensors; every rank iterates to the end, since it is collective.
        bridge: the `AutoBridge` the weights come from.
        generation_config: see `save_hf_config`.
        folder: the target folder; other files in it (a tokenizer) are kept.
        write: whether this rank writes.

    Raises:
        DiskFullError: on every rank, if the rank that writes has no space.
        OSError: on every rank, if its disk has failed.
    """
    error = None
    if write:
        try:
            _write(named_weights, bridge, generation_config, folder)
        except OSError as met:
            error = met
    for _ in named_weights:  # on ranks that do not write, and the rest after a failed write
        pass
    raise_together(gather(error), folder)


def _write(
    named_weights: Iterable[tuple[str, torch.Tensor]],
    bridge: Any,
    generation_config: Mapping[str, Any] | None,
    folder: Path,
) -> None:
    partial = folder.with_name(folder.name + ".partial")
    if partial.exists():
        shutil.rmtree(partial)
    try:
        partial.mkdir(parents=True)
        _fill(named_weights, hf_config_of(bridge), generation_config, partial)
        folder.mkdir(parents=True, exist_ok=True)
        for stale in (*folder.glob("model*.safetensors*"), folder / GENERATION_CONFIG_FILE):
            stale.unlink(missing_ok=True)
        for path in partial.iterdir():
            os.replace(path, folder / path.name)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _fill(
    named_weights: Iterable[tuple[str, torch.Tensor]],
    config: Any,
    generation_config: Mapping[str, Any] | None,
    partial: Path,
) -> None:
    tied = bool(getattr(config, "tie_word_embeddings", False))
    wanted = ((name, tensor) for name, tensor in named_weights if not (tied and name == "lm_head.weight"))
    paths, where, total = [], {}, 0
    dtype = None
    for index, shard in enumerate(_shards(wanted, SHARD_BYTES)):
        path = partial / f"model-{index + 1:05d}.safetensors"
        _save_shard(shard, path)
        paths.append(path)
        where.update(dict.fromkeys(shard, path))
        total += sum(tensor.nbytes for tensor in shard.values())
        dtype = next(iter(shard.values())).dtype
    config.dtype = dtype
    save_hf_config(config, generation_config, partial)
    if len(paths) == 1:
        paths[0].rename(partial / "model.safetensors")
    else:
        index_file = {
            "metadata": {"total_size": total},
            "weight_map": {name: path.name for name, path in where.items()},
        }
        (partial / "model.safetensors.index.json").write_text(json.dumps(index_file, indent=2))


def _save_shard(shard: dict[str, torch.Tensor], path: Path) -> None:
    try:
        save_file(shard, path, metadata={"format": "pt"})
    except SafetensorError as error:
        found = system_error(error, path)
        if found is None:
            raise
        raise found from error
    as_by_umask(path)  # safetensors creates files that only their owner can access
    sync(path)
