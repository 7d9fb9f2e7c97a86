"""Locates a Hugging Face checkpoint's weights in the parameters of vLLM's model, which fuses some of them."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from nemo_offload_rl.refit.plan import TensorSpec

# Weights that vLLM concatenates in one parameter, along their first dimension.
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_PARTS = {part: (fused, parts) for fused, parts in _FUSED.items() for part in parts}
_EXPERTS_MODULE = "routed_experts"
"""Module below a checkpoint's `experts` that has the experts' parameters in vLLM 0.25, but not in earlier versions."""
_EXPERT = re.compile(r"(?P<experts>.*\.experts)\.(?P<expert>\d+)\.(?P<part>gate_proj|up_proj|down_proj)\.weight")


def read_back(parameters: Mapping[str, torch.Tensor], specs: Sequence[TensorSpec]) -> dict[str, torch.Tensor]:
    """Returns views of the parameters that correspond to the checkpoint's tensors.

    Args:
        parameters: Parameters of vLLM's model on one GPU, by name.
        specs: The tensors of the checkpoint.

    Raises:
        ValueError: If a tensor is not where vLLM keeps unquantized weights, or has another shape there, so that it
            cannot be compared with what was sent.
    """
    rows = {spec.name: spec.shape[0] for spec in specs if spec.shape}
    return {spec.name: _find(parameters, spec, rows) for spec in specs}


def dropped_biases(parameters: Mapping[str, torch.Tensor], specs: Sequence[TensorSpec]) -> list[str]:
    """Returns the names of biases whose layer vLLM's model has, but without a bias.

    vLLM 0.25's models ignore such tensors without an error, where they refuse others that they do not know. Its Qwen3
    models have no bias in attention's output projection, also with `attention_bias`.

    Args:
        parameters: Parameters of vLLM's model on one GPU, by name.
        specs: The tensors of the checkpoint.
    """
    rows = {spec.name: spec.shape[0] for spec in specs if spec.shape}
    return [
        spec.name
        for spec in specs
        if spec.name.endswith(".bias")
        and _locate(parameters, f"{spec.name.removesuffix('bias')}weight", rows) is not None
        and _locate(parameters, spec.name, rows) is None
    ]


def _find(parameters: Mapping[str, torch.Tensor], spec: TensorSpec, rows: Mapping[str, int]) -> torch.Tensor:
    found = _locate(parameters, spec.name, rows)
    if found is not None and spec.shape and found.dim() == len(spec.shape):
        found = found[: spec.shape[0]]  # vLLM pads the vocabulary
    if found is None or tuple(found.shape) != spec.shape or found.dtype != spec.dtype:
        where = "no such parameter" if found is None else f"it as {found.dtype} {list(found.shape)}"
        raise ValueError(
            f"The policy sends {spec}, but vLLM's model has {where}, so their checksums cannot be compared; set "
            "policy.verify_refit to false."
        )
    return found


def _locate(parameters: Mapping[str, torch.Tensor], name: str, rows: Mapping[str, int]) -> torch.Tensor | None:
    if name in parameters:
        return parameters[name]
    if match := _EXPERT.fullmatch(name):
        return _expert(parameters, match["experts"], int(match["expert"]), match["part"])
    module, _, kind = name.rpartition(".")
    parent, _, part = module.rpartition(".")
    if part not in _PARTS:
        # With tied weights the output layer is the embedding itself.
        return parameters.get("model.embed_tokens.weight") if name == "lm_head.weight" else None
    fused, parts = _PARTS[part]
    whole = parameters.get(f"{parent}.{fused}.{kind}")
    names = [f"{parent}.{one}.{kind}" for one in parts]
    if whole is None or any(one not in rows for one in names):
        return None
    start = sum(rows[one] for one in names[: parts.index(part)])
    return whole[start : start + rows[name]]


def _expert(parameters: Mapping[str, torch.Tensor], experts: str, expert: int, part: str) -> torch.Tensor | None:
    name = f"{'w2' if part == 'down_proj' else 'w13'}_weight"
    modules = (f"{experts}.{_EXPERTS_MODULE}", experts)
    fused = next((parameters[f"{one}.{name}"] for one in modules if f"{one}.{name}" in parameters), None)
    if fused is None or expert >= fused.shape[0]:
        return None
    return fused[expert] if part == "down_proj" else fused[expert].chunk(2, dim=0)[part == "up_proj"]


def parameters_filled(loaded: Iterable[str], names: Collection[str]) -> set[str]:
    """Returns the parameters that a load has filled, by their names in the model.

    Args:
        loaded: Result of `load_weights` of vLLM's model. vLLM 0.25 omits the experts' own module from these names.
        names: Names of the model's parameters.
    """
    filled = set()
    for name in loaded:
        experts, _, kind = name.rpartition(".")
        of_module = f"{experts}.{_EXPERTS_MODULE}.{kind}"
        filled.add(of_module if name not in names and of_module in names else name)
    return filled


def outside_of_parameters(
    tensors: Sequence[torch.Tensor], restored: Sequence[torch.Tensor], blocks: Sequence[tuple[int, int]]
) -> list[torch.Tensor]:
    """Returns the tensors in these blocks of memory that nothing restores after the blocks were discarded.

    Args:
        tensors: All live tensors, including torch.compile's fake tensors, which have no memory of their own.
        restored: Tensors whose contents come back: parameters by a refit, buffers by vLLM.
        blocks: Address and bytes of each block.
    """
    safe = {tensor.untyped_storage().data_ptr() for tensor in restored}
    lost = []
    for tensor in tensors:
        if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            continue
        start = tensor.untyped_storage().data_ptr()
        if start not in safe and any(first <= start < first + size for first, size in blocks):
            lost.append(tensor)
    return lost


def find_experts_on_host(modules: Iterable[torch.nn.Module]) -> None:
    """Makes vLLM find out without its GPU which of a layer's experts are there, and where.

    With expert parallelism vLLM 0.25's `ExpertMapManager.map_global_to_local` reads that from a tensor of the GPU, once
    for each weight: 18,432 waits in a refit of 48 layers of 128 experts, which a CUDA graph cannot repeat.

    Args:
        modules: Modules of vLLM's model; those without experts, or with all of them, stay as they are.
    """
    for module in modules:
        manager: Any = getattr(module, "expert_map_manager", None)
        if manager is not None and manager.expert_map is not None:
            manager.map_global_to_local = manager.expert_map.tolist().__getitem__


# Classes of vLLM whose process_weights_after_loading does not change weights on a CUDA GPU.
_PLAIN_METHODS = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")
_PLAIN_EXPERTS = ("TRITON", "BATCHED_TRITON")  # other kernels reorder the experts' rows
_PLAIN_MODULE = "Attention"  # it only sets scales


def transformed_after_loading(modules: Iterable[tuple[str, torch.nn.Module]]) -> list[str]:
    """Lists the changes that vLLM makes to weights after it has loaded them, which a refit would not repeat.

    Args:
        modules: Modules of vLLM's model on a CUDA GPU, by name.

    Returns:
        One line for each module whose weights vLLM changes, or may change.
    """
    found = []
    named = list(modules)
    # vLLM 0.25's methods for experts are modules themselves; they are checked with the module that uses them.
    methods = {id(getattr(module, "quant_method", None)) for _, module in named}
    for name, module in named:
        if id(module) in methods:
            continue
        method: Any = getattr(module, "quant_method", None)
        method = getattr(method, "old_quant_method", method)  # expert parallelism wraps the method
        kind = type(method).__name__
        if kind == "UnquantizedFusedMoEMethod":
            if (kernel := method.unquantized_backend.name) not in _PLAIN_EXPERTS:
                found.append(f"{name} rearranges its experts for {kernel}")
        elif hasattr(method, "process_weights_after_loading") and kind not in _PLAIN_METHODS:
            found.append(f"{name} changes its weights ({kind})")
        names = [one.__name__ for one in type(module).__mro__]
        if hasattr(module, "process_weights_after_loading") and _PLAIN_MODULE not in names:
            found.append(f"{name} computes other tensors from its weights ({names[0]})")
    return found
