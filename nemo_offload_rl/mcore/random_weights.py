"""Makes a model's random weights block by block, so that no rank holds a whole model that it has only a part of."""

import functools
import math
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

_BLOCKS_KEPT = 2
"""Blocks in memory at once: a bridge asks for a layer's weights one after the other, and layers in order."""


class RandomWeights(Mapping[str, torch.Tensor]):
    """Weights as transformers initialises them, under the names of files; each block is made when it is asked for.

    A block is a layer, or all that is outside of layers. Its values depend only on the seed, the block's name, the
    architecture and the kind of device: ranks that split the model differently start with equal weights.

    Args:
        config: of the model, with the dtype of its weights.
        seed: of the values.
        device: where blocks are made.
    """

    def __init__(self, config: PretrainedConfig, seed: int, device: torch.device) -> None:
        with torch.device("meta"):
            self._model: PreTrainedModel = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        self._blocks = dict(_blocks(self._model))
        self._seed, self._device = seed, device
        self._block_of = {name: block for block in self._blocks for name in self._as_in_files(block)}
        self._made = functools.lru_cache(maxsize=_BLOCKS_KEPT)(self._make)

    def __getitem__(self, name: str) -> torch.Tensor:
        """Returns a weight of that name; it may share its memory with others."""
        return self._made(self._block_of[name])[name]

    def __iter__(self) -> Iterator[str]:
        """Iterates over the names of all weights."""
        return iter(self._block_of)

    def __len__(self) -> int:
        """Returns the number of weights."""
        return len(self._block_of)

    def _as_in_files(self, block: str) -> dict[str, torch.Tensor]:
        own = {id(module) for module in self._blocks[block]}
        owner = {name: id(module) for name, module in self._model.named_modules()}
        state = self._model.state_dict(keep_vars=True)
        return as_in_files(self._model, {name: t for name, t in state.items() if owner[name.rpartition(".")[0]] in own})

    def _make(self, block: str) -> dict[str, torch.Tensor]:
        modules = self._blocks[block]
        own = {id(module) for module in modules}
        meta: list[tuple[dict[str, Any], dict[str, Any]]] = [
            (held, dict(held)) for module in modules for held in (module._parameters, module._buffers)
        ]
        made: dict[int, torch.Tensor] = {}  # by the meta tensor's id: a tied weight stays one
        devices = [] if self._device.type == "cpu" else [self._device]
        try:
            for held, tensors in meta:
                held.update({name: self._empty(tensor, made) for name, tensor in tensors.items() if tensor is not None})
            for module in self._model.modules():
                module._is_hf_initialized = id(module) not in own  # what initialize_weights leaves out
            with torch.random.fork_rng(devices=devices), self._device:
                torch.manual_seed(zlib.crc32(f"{self._seed} {block}".encode()))
                self._model.initialize_weights()
            weights = {name: tensor.detach() for name, tensor in self._as_in_files(block).items()}
        finally:
            for held, tensors in meta:
                held.update(tensors)
        if unset := [name for name, tensor in weights.items() if tensor.isnan().any()]:
            raise ValueError(
                f"transformers does not initialise {unset[0]!r} of a model of the family "
                f"{self._model.config.model_type}, so it cannot start with random weights (policy.hf_config); give a "
                "folder of weights in policy.model_name."
            )
        return weights

    def _empty(self, tensor: torch.Tensor, made: dict[int, torch.Tensor]) -> torch.Tensor:
        """Returns memory for a tensor; weights that nothing sets stay NaN, and are found by that."""
        if id(tensor) not in made:
            value = math.nan if isinstance(tensor, nn.Parameter) else 0
            empty = torch.full_like(tensor, value, device=self._device)
            made[id(tensor)] = nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty
        return made[id(tensor)]


def as_in_files(model: PreTrainedModel, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns tensors of a transformers model with the names and shapes of its files, which the bridge reads.

    In memory they differ, since transformers 5 fuses experts.
    """
    from transformers.core_model_loading import revert_weight_conversion

    return dict(revert_weight_conversion(model, tensors))


def _blocks(model: nn.Module) -> Iterator[tuple[str, list[nn.Module]]]:
    """Yields the modules of each layer with the layer's name, then all others with an empty one."""
    outside = dict(model.named_modules())
    for name, module in model.named_modules():
        if name in outside and isinstance(module, nn.ModuleList):
            for index, layer in enumerate(module):
                prefix = f"{name}.{index}"
                yield prefix, list(layer.modules())
                outside = {
                    path: other
                    for path, other in outside.items()
                    if path != prefix and not path.startswith(f"{prefix}.")
                }
    yield "", list(outside.values())
