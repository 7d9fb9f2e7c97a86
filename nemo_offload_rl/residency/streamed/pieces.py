"""Steps pieces of parameters with an optimizer's own kernel, through a twin of the optimizer that holds only them."""

from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nemo_offload_rl.residency.streamed.window import MASTER, Chunk, HostArrays, Piece, Slot


@dataclass(frozen=True, eq=False)
class StreamedParameter:
    """Describes a parameter whose optimizer state is streamed.

    Attributes:
        parameter: the tensor in the optimizer's group.
        group: the index of that group.
        is_master: whether it is an fp32 copy of a model's parameter, and so state itself.
        model_shard: the tensor that a master is copied to after each update; None if it is not a master.
    """

    parameter: torch.Tensor
    group: int
    is_master: bool
    model_shard: torch.Tensor | None


@dataclass(frozen=True, eq=False)
class ParameterArrays(HostArrays):
    """Holds the state of parameters in host memory, in the layout's order."""

    parameters: Sequence[StreamedParameter]

    def host_tensor(self, field: int, index: int) -> torch.Tensor:
        """Returns the host memory of a parameter's field, in the parameter's shape and with its own storage."""
        where = self.layout.of_parameter(field, index)
        flat = self.segment.window(where.start, where.stop - where.start).view(self.layout.fields[field].dtype)
        return flat.view(self.parameters[index].parameter.shape)


@dataclass(frozen=True, eq=False)
class PlacedPiece:
    """Describes a piece of a parameter whose state is in a slot.

    Attributes:
        piece: which part of the parameter it is.
        source: the parameter that the piece is part of.
        parameter: 1-D tensor that the twin optimizer steps: a master in the slot, or a part of the model.
        state: the other fields in the slot, by key.
    """

    piece: Piece
    source: StreamedParameter
    parameter: torch.Tensor
    state: Mapping[str, torch.Tensor]

    def copy_to_model(self) -> None:
        """Copy the updated master to the model, as megatron-core does after a step."""
        if self.source.model_shard is not None:
            flat_part(self.source.model_shard, self.piece).copy_(self.parameter)


def flat_part(tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
    """Returns a view of the elements of a piece."""
    return tensor.detach().view(-1)[piece.start : piece.stop]


def placed_pieces(arrays: ParameterArrays, chunk: Chunk, slot: Slot) -> Iterator[PlacedPiece]:
    """Yields the pieces of a chunk that is in a slot."""
    for piece in chunk.pieces:
        source = arrays.parameters[piece.index]
        views = {
            field.key: slot.view(arrays.layout, number, piece.offset, piece.length)
            for number, field in enumerate(arrays.layout.fields)
        }
        parameter = views.pop(MASTER) if source.is_master else flat_part(source.parameter, piece)
        yield PlacedPiece(piece, source, parameter, views)


def twin_of(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Makes an optimizer of the same class and options without parameters, state or hooks."""
    twin: torch.optim.Optimizer = object.__new__(type(optimizer))
    own = {name: value for name, value in vars(optimizer).items() if name not in ("step", "load_state_dict")}
    vars(twin).update(own, state=defaultdict(dict), param_groups=[])
    for name in own:
        if name.endswith("_hooks"):
            vars(twin)[name] = OrderedDict()
    return twin


class PieceStepper:
    """Steps the pieces of an optimizer's parameters, chunk by chunk, as one step.

    Args:
        optimizer: provides the kernel, and the hyperparameters of each step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._twin = twin_of(optimizer)
        self._groups: dict[int, dict[str, Any]] = {}
        self._counted: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def step(self, pieces: Sequence[PlacedPiece]) -> None:
        """Update pieces and their state on the current stream; each piece only once in a step."""
        groups: dict[int, dict[str, Any]] = {}
        stepped = []
        for placed in pieces:
            number = placed.source.group
            if number not in groups:
                # A capturable FusedAdam counts in a tensor of the group, in place.
                own = {key: _own_copy(value) for key, value in self._optimizer.param_groups[number].items()}
                groups[number] = {**own, "params": []}
            groups[number]["params"].append(placed.parameter)
            self._give_gradient(placed)
            whole = self._optimizer.state[placed.source.parameter]
            own = {key: _own_copy(value) for key, value in whole.items() if key not in placed.state}
            self._twin.state[placed.parameter] = {**own, **placed.state}
            stepped.append((whole, own.keys(), self._twin.state[placed.parameter]))
        self._twin.param_groups = list(groups.values())
        type(self._optimizer).step(self._twin)
        self._twin.state.clear()
        self._groups |= groups
        self._counted += [(whole, {key: state[key] for key in keys}) for whole, keys, state in stepped]
        for placed in pieces:
            placed.copy_to_model()

    def finish(self) -> None:
        """Copy the counters to the optimizer; each piece has advanced its own copy by one from where the step began."""
        for number, group in self._groups.items():
            _count(self._optimizer.param_groups[number], {k: v for k, v in group.items() if k != "params"})
        for whole, counted in self._counted:
            _count(whole, counted)

    def _give_gradient(self, placed: PlacedPiece) -> None:
        source = placed.source.parameter
        if source.grad is not None:
            placed.parameter.grad = flat_part(source.grad, placed.piece)
        if getattr(source, "decoupled_grad", None) is not None:  # the precision-aware optimizer's
            placed.parameter.decoupled_grad = flat_part(source.decoupled_grad, placed.piece)  # type: ignore[attr-defined]


def _own_copy(value: Any) -> Any:
    """Returns a copy of a counter, since each piece counts its own steps."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def _count(whole: dict[str, Any], counted: Mapping[str, Any]) -> None:
    """Copies counters to an optimizer's group or state; tensors keep their addresses, which captured graphs use."""
    for key, value in counted.items():
        if isinstance(value, torch.Tensor) and isinstance(whole.get(key), torch.Tensor):
            whole[key].copy_(value)
        else:
            whole[key] = value
