"""Checks, before weights are loaded, that files have all weights of a model and which of theirs it does not take.

Megatron-Bridge 0.6.2 only warns of a weight that is not in the files, and leaves the parameter's memory as it is. At a
weight that it has no name for it fails without saying which. It ignores weights that no parameter takes, among them the
output layer of a model whose config ties it to the embedding, and fills an embedding with too few rows with zeros.
"""

import logging
import re
from collections.abc import Iterable
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from safetensors import safe_open

from nemo_offload_rl.mcore.weights.export import hf_config_of

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
        ValueError: a weight is missing, Megatron-Bridge has no name for it, the embedding has another number of rows
            than the vocabulary, or the output layer differs from the embedding that it is tied to.
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
    rows = {name: _hf_name(registry, name) for name in (_EMBEDDING, _OUTPUT)}
    for name in rows.values():
        if name in wanted:
            _check_rows(files, name, where, chunks[0].config.vocab_size)
    if is_tied and rows[_OUTPUT] in there:
        _check_is_tied(files, rows[_EMBEDDING], rows[_OUTPUT], where)
        wanted.add(rows[_OUTPUT])
    if knows_all and torch.distributed.get_rank() == 0:
        _warn_of_unused(there - wanted, _ignored(bridge), where, family)
    return chunks


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


def _check_is_tied(files: Any, embedding: str, output: str, where: str) -> None:
    """Refuses files in which the output layer is not the embedding, though the config ties both.

    transformers trains both of such a model, Megatron and vLLM only the embedding.
    """
    tensors = files.load_tensors([embedding, output])
    if not torch.equal(tensors[embedding], tensors[output]):
        raise ValueError(
            f"{where} has different weights {output!r} and {embedding!r}, but tie_word_embeddings true in its config, "
            "which makes them one; set policy.hf_config_overrides.tie_word_embeddings to false to use both, or delete "
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
