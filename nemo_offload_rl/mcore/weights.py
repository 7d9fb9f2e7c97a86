"""Exports weights under Hugging Face names, and checks the names before weights are loaded.

Writes a policy as a Hugging Face folder. `AutoBridge.save_hf_pretrained` needs ModelOpt, which nothing else here does;
the weights come from `export_hf_weights`.

Checks, before weights are loaded, that files have all weights of a model and which of theirs it does not take.
Megatron-Bridge 0.6.2 only warns of a weight that is not in the files, and leaves the parameter's memory as it is. At a
weight that it has no name for it fails without saying which. It ignores weights that no parameter takes, among them the
output layer of a model whose config ties it to the embedding and, in most families, scales of quantised weights, and
fills an embedding with too few rows with zeros.
"""

import json
import logging
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.utils import unwrap_model
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from nemo_offload_rl.hf_config import GENERATION_CONFIG_FILE
from nemo_offload_rl.mcore.distributed import gather, raise_together
from nemo_offload_rl.mcore.patches.bridge import make_exports_fast
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
    _add_former_names(partial / "config.json")
    if len(paths) == 1:
        paths[0].rename(partial / "model.safetensors")
    else:
        index_file = {
            "metadata": {"total_size": total},
            "weight_map": {name: path.name for name, path in where.items()},
        }
        (partial / "model.safetensors.index.json").write_text(json.dumps(index_file, indent=2))


def _add_former_names(path: Path) -> None:
    """Adds to a config.json what transformers 4 and engines that are built on it read in the place of other keys.

    They ignore `rope_parameters`, and would compute with the family's default base of rotary embeddings, unnoticed.
    """
    fields = json.loads(path.read_text(encoding="utf-8"))
    rope = fields.get("rope_parameters")
    if isinstance(rope, dict) and "rope_theta" in rope:
        own = ("rope_theta", "partial_rotary_factor")
        scaling = {key: value for key, value in rope.items() if key not in own}
        fields |= {key: rope[key] for key in own if key in rope}
        fields["rope_scaling"] = None if scaling.get("rope_type") == "default" else scaling
    if "num_local_experts" in fields and fields["model_type"] == "qwen3_moe":
        fields["num_experts"] = fields["num_local_experts"]
    path.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")


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


class HfWeights:
    """Exports the weights of one model any number of times; builds Megatron-Bridge's conversion tasks only once.

    Args:
        bridge: the `AutoBridge` that the model was made with.
        model: this rank's chunks, whose parameters stay the same objects.
        vocab_size: number of real tokens; ranks hold padding beyond it if their number does not divide it.
    """

    def __init__(self, bridge: Any, model: list[Any], vocab_size: int) -> None:
        make_exports_fast()
        self._bridge = bridge
        self._model = model
        self._vocab_size = vocab_size
        self._with_row_per_token = _names_with_row_per_token(bridge)
        self._tasks: list[Any] | None = None

    def __call__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, whole tensor) one after the other; collective, the same order on every rank."""
        if self._tasks is None:
            # This gathers every rank's names as pickled objects, which takes half of an export's time.
            self._tasks = self._bridge._model_bridge.build_conversion_tasks(
                self._bridge.hf_pretrained, unwrap_model(self._model)
            )
        for name, tensor in self._bridge.export_hf_weights(
            self._model, show_progress=False, conversion_tasks=self._tasks, merge_adapter_weights=False
        ):
            yield name, tensor[: self._vocab_size] if name in self._with_row_per_token else tensor

    def tensors(self) -> list[Tensor]:
        """Return all tensors that an export reads, the same objects each time; none before the first export."""
        return [task.param_weight for task in self._tasks or () if task.param_weight is not None]

    def collectives(self) -> str:
        """Return the kinds of parallelism over which ranks exchange weights in an export; "" if there are none."""
        sizes = {
            "tensor": mpu.get_tensor_model_parallel_world_size(),
            "pipeline": mpu.get_pipeline_model_parallel_world_size(),
            "expert": mpu.get_expert_model_parallel_world_size(),
            "expert tensor": mpu.get_expert_tensor_parallel_world_size(),
        }
        return ", ".join(f"{kind} parallelism of {size}" for kind, size in sizes.items() if size > 1)

    def agree(self, yes: bool) -> bool:
        """Return whether all ranks say yes; collective if ranks exchange weights in an export."""
        if not self.collectives():
            return yes
        answer = torch.tensor(int(yes), device="cuda" if torch.cuda.is_available() else "cpu")
        torch.distributed.all_reduce(answer, op=torch.distributed.ReduceOp.MIN)
        return bool(answer.item())


def _names_with_row_per_token(bridge: Any) -> frozenset[str]:
    """Returns the Hugging Face names of the embedding and of the output layer's weight and bias."""
    registry = bridge._model_bridge.mapping_registry()
    names = ("embedding.word_embeddings.weight", "output_layer.weight", "output_layer.bias")
    mappings = [registry.megatron_to_hf_lookup(name) for name in names]
    return frozenset(mapping.hf_param for mapping in mappings if mapping and isinstance(mapping.hf_param, str))


logger = logging.getLogger(__name__)

_EMBEDDING, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
_DERIVED = (r"rotary_emb\.inv_freq$",)
"""Tensors of files, as patterns of their names, that a model computes from its config."""
_MOST_NAMED = 3


def check_weights(bridge: Any, where: str, chunks: list[Any]) -> list[Any]:
    """Check that all of a model's weights can be loaded, and warn of weights that it does not take; collective.

    Args:
        bridge: an `AutoBridge` with weights.
        where: where the weights are, for messages.
        chunks: this rank's model chunks.

    Returns:
        The chunks.

    Raises:
        ValueError: a weight is missing, Megatron-Bridge has no name for it or does not read its scales, the embedding
            has another number of rows than the vocabulary, or the output layer differs from the embedding that it is
            tied to.
    """
    loader = bridge._model_bridge
    names = loader._megatron_global_param_names_all_pp_ranks(chunks)
    is_tied = loader._share_embeddings_and_output_weights(chunks[0].config)
    if is_tied:
        names = [name for name in names if "output_layer" not in name]
    registry, files = loader.mapping_registry(), bridge.hf_pretrained.state.source
    there = set(files.get_all_keys())
    nameless: list[str] = []
    wanted: set[str] = set()
    knows_all = True
    for name in _of_all_experts(names):
        mapping = registry.megatron_to_hf_lookup(name)
        if mapping is None:
            nameless.append(name)
        elif mapping.allow_hf_name_mismatch:
            knows_all = False
        else:
            wanted |= {mapping.hf_param} if isinstance(mapping.hf_param, str) else set(mapping.hf_param.values())
    family = hf_config_of(bridge).model_type
    if nameless:
        raise ValueError(
            f"Megatron-Bridge has no names for {len(nameless)} weights of this model, such as {nameless[0]!r}, and "
            f"cannot load it; choose other config flags for the family {family}, or another family."
        )
    if missing := sorted(wanted - there):
        raise ValueError(
            f"{where} lacks {len(missing)} weights that a model of its config (model_type {family}) has, such as "
            f"{missing[0]!r}; use all files of one model."
        )
    scaled = sorted(name for name in wanted if not there.isdisjoint(_scales(name)))
    if scaled and not _reads_scales(loader):
        raise ValueError(
            f"{where} has {len(scaled)} quantised weights, such as {scaled[0]!r}, and Megatron-Bridge does not read "
            f"their scales for the family {family}, so that it would train other weights; use files of the model that "
            "are not quantised."
        )
    rows = {name: _hf_name(registry, name) for name in (_EMBEDDING, _OUTPUT)}
    for name in rows.values():
        if name in wanted:
            _check_rows(files, name, where, chunks[0].config.vocab_size)
    output, always_tied = rows[_OUTPUT], not rows[_OUTPUT]
    if always_tied and getattr(hf_config_of(bridge), "tie_word_embeddings", False):
        output = "lm_head.weight"  # Megatron-Bridge has no name for it in a family that it always ties
    if is_tied and {rows[_EMBEDDING], output} <= there:
        _check_is_tied(files, rows[_EMBEDDING], output, where, always_tied=always_tied)
        wanted.add(output)
    if knows_all and torch.distributed.get_rank() == 0:
        _warn_of_unused(there - wanted, _ignored(bridge), where, family)
    return chunks


def _scales(name: str) -> tuple[str, ...]:
    """Returns the names that files give to the scales of a quantised weight: in fp8, and of bitsandbytes."""
    return f"{name}_scale_inv", f"{name}_scale", f"{name}.absmax", f"{name.removesuffix('weight')}SCB"


def _reads_scales(loader: Any) -> bool:
    """Returns whether a family's class of Megatron-Bridge changes weights that it reads from files."""
    from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge

    return type(loader).maybe_modify_loaded_hf_weight is not MegatronModelBridge.maybe_modify_loaded_hf_weight


def _of_all_experts(names: list[str]) -> list[str]:
    """Returns names of parameters with those of the experts of other ranks; collective with expert parallelism."""
    group = mpu.get_expert_model_parallel_group()
    if group.size() == 1:
        return names
    gathered: list[list[str]] = [[] for _ in range(group.size())]
    torch.distributed.all_gather_object(gathered, names, group=group)
    return sorted({name for part in gathered for name in part})


def _hf_name(registry: Any, name: str) -> str:
    """Returns the Hugging Face name of one of Megatron's parameters; "" if it has none of its own."""
    mapping = registry.megatron_to_hf_lookup(name)
    return mapping.hf_param if mapping is not None and isinstance(mapping.hf_param, str) else ""


def _check_rows(files: Any, name: str, where: str, vocab_size: int) -> None:
    if hasattr(files, "key_to_filename_map"):  # a folder: only the header is read
        with safe_open(files.path / files.key_to_filename_map[name], "pt") as file:
            found = file.get_slice(name).get_shape()[0]
    else:
        found = files.load_tensors([name])[name].shape[0]
    if found != vocab_size:
        raise ValueError(
            f"{where} has {found} rows in {name!r}, but the model's config has vocab_size {vocab_size}; set vocab_size "
            "to the number of rows."
        )


def _check_is_tied(files: Any, embedding: str, output: str, where: str, *, always_tied: bool) -> None:
    """Refuses files in which the output layer is not the embedding, though the config ties both.

    transformers trains both of such a model, Megatron and vLLM only the embedding.
    """
    tensors = files.load_tensors([embedding, output])
    if not torch.equal(tensors[embedding], tensors[output]):
        untied = "set policy.hf_config_overrides.tie_word_embeddings to false to use both"
        raise ValueError(
            f"{where} has different weights {output!r} and {embedding!r}, but tie_word_embeddings true in its config, "
            f"which makes them one; {'choose a model of another family' if always_tied else untied}, or delete "
            f"{output!r} from the files."
        )


def _ignored(bridge: Any) -> list[str]:
    """Returns patterns of the weights in files that transformers leaves out for a model's architecture on purpose."""
    architecture = bridge._causal_lm_architecture
    own = getattr(architecture, "_keys_to_ignore_on_load_unexpected", None)  # absent if it is only a name
    return [*_DERIVED, *(own or ())]


def _warn_of_unused(names: Iterable[str], ignored: Iterable[str], where: str, family: str) -> None:
    unused = sorted(name for name in names if not any(re.search(pattern, name) for pattern in ignored))
    if unused:
        shown = ", ".join(map(repr, unused[:_MOST_NAMED])) + (" ..." if len(unused) > _MOST_NAMED else "")
        logger.warning(
            "%s has %d weights that a model of its config (model_type %s) does not have, and which are not used: %s",
            where,
            len(unused),
            family,
            shown,
        )
