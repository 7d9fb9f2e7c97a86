"""Makes masters and moments in host memory, chunk by chunk through the window; the GPU never holds all of them."""

from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

import torch

from nemo_offload_rl.memory.pinned import PinnedArena
from nemo_offload_rl.residency.optimizer_state import make_state
from nemo_offload_rl.residency.streamed.pieces import (
    ParameterArrays,
    PlacedPiece,
    StreamedParameter,
    flat_part,
    placed_pieces,
    twin_of,
)
from nemo_offload_rl.residency.streamed.window import MASTER, Field, FlatLayout, Window
from nemo_offload_rl.residency.table import Target

_GROUPS = (
    ("shard_fp32_from_float16_groups", "shard_float16_groups"),  # DistributedOptimizer
    ("fp32_from_float16_groups", "float16_groups"),  # Float16OptimizerWithFloat16Params
)


def model_shards(part: Any) -> dict[int, torch.Tensor]:
    """Returns the model shard that each master is a copy of, by the master's id; empty for a plain torch optimizer.

    Args:
        part: one of megatron-core's optimizers.
    """
    for masters, shards in _GROUPS:
        if hasattr(part, masters):
            return {
                id(master): shard
                for group, shard_group in zip(getattr(part, masters), getattr(part, shards), strict=True)
                for master, shard in zip(group, shard_group, strict=True)
                if master is not None and shard is not None
            }
    return {}


def disable_master_copies(part: Any) -> Callable[[], None]:
    """Keep an optimizer of megatron-core from copying masters to the model, which the streamed step has done.

    Returns:
        A function that undoes this.
    """
    name = "_copy_main_params_to_model_params"
    if not hasattr(part, name):
        return lambda: None
    setattr(part, name, lambda: None)
    return lambda: vars(part).pop(name, None)


def has_no_memory(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is a placeholder, which has one element's memory for all of its elements.

    One element is all that a 0-dim tensor has anyway; such a tensor is a placeholder if it is NaN.
    """
    has_one = tensor.untyped_storage().nbytes() == tensor.element_size() and tensor.stride() == (0,) * tensor.dim()
    return has_one and (tensor.dim() > 0 or bool(tensor.isnan()))


def placeholder(like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Makes a tensor with the memory of only one element, for state that is on the host; floats read as NaN.

    torch refuses to write to it. It has the device and shape of `like`, so that gradients can be assigned to it.
    """
    value = float("nan") if dtype.is_floating_point else -1
    return torch.full((1,), value, dtype=dtype, device=like.device).as_strided(like.shape, (0,) * like.dim())


def parameters_to_stream(
    part: Any, optimizer: torch.optim.Optimizer, model_storages: Container[int]
) -> list[StreamedParameter]:
    """Returns the parameters of an optimizer whose state can be streamed.

    Args:
        part: megatron-core's optimizer around `optimizer`, or `optimizer` itself.
        optimizer: a torch optimizer.
        model_storages: addresses of the storages of the model's parameters; a parameter outside of these is a master.

    Raises:
        ValueError: a parameter's state cannot be stepped in pieces.
    """
    shards = model_shards(part)
    found = []
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if not parameter.numel():
                continue
            is_master = parameter.untyped_storage().data_ptr() not in model_storages
            if is_master and id(parameter) not in shards:
                raise ValueError(
                    f"Optimizer state cannot be streamed: {_name(optimizer)} steps a tensor of shape "
                    f"{list(parameter.shape)} that is neither a parameter of the model nor a master that "
                    "megatron-core made, so the parameter that it updates is unknown; use an optimizer of "
                    "megatron-core, or keep its state on the GPU."
                )
            streamed = StreamedParameter(parameter, number, is_master, shards.get(id(parameter)))
            for tensor in (parameter, streamed.model_shard):
                if tensor is not None and not (has_no_memory(tensor) or tensor.is_contiguous()):
                    raise ValueError(
                        f"Optimizer state cannot be streamed: a parameter of shape {list(tensor.shape)} has strides "
                        f"{list(tensor.stride())}; make it contiguous, or keep optimizer state on the GPU."
                    )
            found.append(streamed)
    return found


def layouts(
    optimizer: torch.optim.Optimizer, parameters: Sequence[StreamedParameter], slot_bytes: int
) -> list[tuple[FlatLayout, list[StreamedParameter]]]:
    """Lays out the state of an optimizer's parameters, with one layout for all that have the same kinds of state.

    Raises:
        ValueError: an optimizer's state is not known before its first step, or cannot be stepped in pieces.
    """
    _require_unscaled(optimizer)
    by_fields: dict[tuple[Field, ...], list[StreamedParameter]] = {}
    for parameter in parameters:
        fields = tuple(_fields(optimizer, parameter))
        if not fields:  # the streamed step would leave the parameter out
            raise ValueError(
                f"Optimizer state cannot be streamed: {_name(optimizer)} has no state tensors for a parameter of shape "
                f"{list(parameter.parameter.shape)}, and only parameters with state are stepped; keep optimizer state "
                "on the GPU."
            )
        by_fields.setdefault(fields, []).append(parameter)
    return [
        (FlatLayout(fields, [member.parameter.numel() for member in members], slot_bytes), members)
        for fields, members in by_fields.items()
    ]


def init_host_state(
    optimizer: torch.optim.Optimizer,
    layout: FlatLayout,
    parameters: Sequence[StreamedParameter],
    arena: PinnedArena,
    window: Window,
    *,
    pin: bool,
) -> ParameterArrays:
    """Fill host memory with the present state of parameters, or with the state that the first step would make.

    Args:
        optimizer: owner of the state; it still has its own tensors afterwards.
        layout: the layout of these parameters.
        parameters: in the layout's order.
        arena: provides the host memory.
        window: the window, mapped.
        pin: whether to page-lock the memory; see `PinnedArena.allocate`.

    Raises:
        MemoryError: the host has no room.
    """
    arrays = ParameterArrays(layout, arena.allocate(Target.OPTIMIZER_STATE, layout.nbytes, pin=pin), parameters)
    twin = twin_of(optimizer)
    try:
        for chunk in layout.chunks:
            slot = window.take()
            for placed in placed_pieces(arrays, chunk, slot):
                _fill(optimizer, twin, placed)
            window.store(arrays, chunk, slot)
        window.wait()
    except BaseException:
        window.wait()
        arena.release(arrays.segment)
        raise
    return arrays


def state_or_sample(optimizer: torch.optim.Optimizer, source: StreamedParameter) -> dict[str, Any]:
    """Returns a parameter's state; if it has none yet, the state that the first step would make for one element.

    Raises:
        ValueError: the state that this optimizer would make is not known.
    """
    if state := optimizer.state[source.parameter] if source.parameter in optimizer.state else {}:
        return dict(state)
    return _sample_state(optimizer, source)


def _fields(optimizer: torch.optim.Optimizer, source: StreamedParameter) -> Iterator[Field]:
    if source.is_master:
        yield Field(MASTER, source.parameter.dtype)
    # The moments of a 0-dim parameter look like its counters; those of one element do not.
    state = state_or_sample(optimizer, source) if source.parameter.dim() else _sample_state(optimizer, source)
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.dim():
            yield Field(key, value.dtype)


def _sample_state(optimizer: torch.optim.Optimizer, source: StreamedParameter) -> dict[str, Any]:
    sample = torch.empty(1, dtype=source.parameter.dtype, device=source.parameter.device)
    return _made_state(twin_of(optimizer), optimizer.param_groups[source.group], sample)


def _made_state(twin: torch.optim.Optimizer, group: dict[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
    if not make_state(twin, group, parameter):
        raise ValueError(
            f"Optimizer state cannot be streamed: the state tensors of {_name(twin)} are not known before its first "
            "step; use Adam (policy.megatron_cfg.optimizer.optimizer=adam), or keep optimizer state on the GPU."
        )
    state: dict[str, Any] = twin.state.pop(parameter)
    return state


def _fill(optimizer: torch.optim.Optimizer, twin: torch.optim.Optimizer, placed: PlacedPiece) -> None:
    source = placed.source
    if source.is_master:
        assert source.model_shard is not None
        origin = source.model_shard if has_no_memory(source.parameter) else source.parameter
        placed.parameter.copy_(flat_part(origin, placed.piece))
    state = optimizer.state[source.parameter] if source.parameter in optimizer.state else {}
    if state:
        values = {key: flat_part(state[key], placed.piece) for key in placed.state}
    else:
        values = _made_state(twin, optimizer.param_groups[source.group], placed.parameter)
    for key, view in placed.state.items():
        view.copy_(values[key])


def _require_unscaled(optimizer: Any) -> None:
    """Raises if moments are scaled: Transformer Engine scales by the whole tensor's maximum, which no piece knows."""
    kinds = getattr(optimizer, "name_to_dtype_map", {})
    scaled = [f"{name} in {dtype}" for name, dtype in kinds.items() if dtype is not torch.float32]
    if scaled:
        raise ValueError(
            f"Optimizer state cannot be streamed: {_name(optimizer)} stores {', '.join(scaled)}, with one scale for "
            "the whole tensor; store it in float32 (policy.megatron_cfg.optimizer.exp_avg_dtype, exp_avg_sq_dtype, "
            "main_params_dtype), or keep optimizer state on the GPU."
        )


def _name(optimizer: Any) -> str:
    return type(optimizer).__name__
