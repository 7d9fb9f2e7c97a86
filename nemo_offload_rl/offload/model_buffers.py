"""Params and grads as targets.

DistributedDataParallel of megatron-core keeps both in flat buffers; frozen parameters, parameters outside its buffers
and module buffers (rotary frequencies, router biases) have memory of their own and move along with the params.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from nemo_offload_rl.offload.housed import Housed
from nemo_offload_rl.offload.housing import Housing, Tenant, housed_bytes, tensors_by_storage
from nemo_offload_rl.offload.optimizer_state import release_main_grads
from nemo_offload_rl.offload.residency import Movable, Move, ResidencyError
from nemo_offload_rl.offload.site import Site, Subject
from nemo_offload_rl.offload.transfer import ChunkError, Mover
from nemo_offload_rl.offload.types import Cell, ShardFacts, Target

logger = logging.getLogger(__name__)


def estimate_param_bytes(facts: ShardFacts) -> int:
    """Bytes of a rank's parameters, frozen ones included."""
    return (facts.num_params + facts.num_frozen_params) * facts.param_size


def estimate_grad_bytes(facts: ShardFacts) -> int:
    """Bytes of a rank's gradient buffers."""
    return facts.num_params * facts.grad_size


def ddp_buffers(model: Sequence[torch.nn.Module]) -> Iterator[Any]:
    """The flat buffers of chunks that are wrapped in megatron-core's DistributedDataParallel."""
    for chunk in model:
        for kind in ("buffers", "expert_parallel_buffers"):
            found = getattr(chunk, kind, ())
            if not callable(found):  # a plain module's `buffers` is a method
                yield from found


def param_storages(model: Sequence[torch.nn.Module], device: torch.device) -> list[tuple[str, torch.UntypedStorage]]:
    """Every storage of a model's parameters and module buffers on a device, largest first, with a name in it."""
    found: dict[int, tuple[str, torch.UntypedStorage]] = {}
    for index, chunk in enumerate(model):
        for name, tensor in _named_tensors(chunk):
            storage = tensor.untyped_storage()
            if tensor.device == device and storage.nbytes():
                found.setdefault(storage.data_ptr(), (f"{index}.{name}", storage))
    return sorted(found.values(), key=lambda named: -named[1].nbytes())


def param_tenants(model: Sequence[torch.nn.Module], device: torch.device) -> list[Tenant]:
    """The same with every tensor that looks into them."""
    return _with_views(param_storages(model, device))


def _with_views(storages: Sequence[tuple[str, torch.UntypedStorage]]) -> list[Tenant]:
    views = tensors_by_storage(storage for _, storage in storages)
    return [Tenant(name, storage, views[storage.data_ptr()]) for name, storage in storages]


def _named_tensors(chunk: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from chunk.named_parameters()
    for name, module in chunk.named_modules():
        # Not named_buffers(): DistributedDataParallel has a list of that name.
        yield from ((f"{name}.{key}", tensor) for key, tensor in module._buffers.items() if tensor is not None)


def grad_tenants(model: Sequence[torch.nn.Module]) -> list[Tenant]:
    """The storages of a model's gradient buffers."""
    storages = {buffer.grad_data.data_ptr(): buffer.grad_data.untyped_storage() for buffer in ddp_buffers(model)}
    views = tensors_by_storage(storages.values())
    return [
        Tenant(f"gradient buffer {number}", storage, views[storage.data_ptr()])
        for number, storage in enumerate(storages.values())
    ]


class Params(Housed):
    """The parameters and module buffers: on the GPU, or in the arena.

    Args:
        model: whose they are.
        housing: of this target.
        mover: copies.
        verify: see `Housed`.

    Attributes:
        is_lent: whether other weights are in their place, and they themselves in their host memory.
    """

    def __init__(
        self, model: Sequence[torch.nn.Module], housing: Housing, mover: Mover, *, verify: bool = False
    ) -> None:
        super().__init__(housing, mover, verify=verify)
        self.is_lent = False
        self._model = model

    def start(self, cell: Cell) -> Move:
        """See `residency.Movable`."""
        if self.is_lent:
            raise ResidencyError(
                f"{self.housing.owner} cannot move to {cell} while the reference weights are swapped in; leave "
                "`swapped_in` before the next phase."
            )
        if cell is Cell.HOST:
            self.house_new()
        return super().start(cell)

    def strays(self) -> list[tuple[str, torch.UntypedStorage]]:
        """Parameters and buffers that have got memory of their own since they were housed, such as a changed dtype."""
        housed = {home.range.tensor.data_ptr() for home in self.housing.homes}
        storages = param_storages(self._model, self.housing.device)
        return [(name, storage) for name, storage in storages if storage.data_ptr() not in housed]

    def house_new(self) -> None:
        """Bring strays into a range.

        Raises:
            MemoryError: the host has no room.
            torch.OutOfMemoryError: the GPU has none.
        """
        strays = self.strays()
        if not strays:
            return
        # What something unknown looks into, such as a graph that is still alive, stays where it is.
        tenants = [tenant for tenant in _with_views(strays) if not tenant.num_unknown_views()]
        logger.info("%s: %d of %d tensors with new memory move along", self.housing.owner, len(tenants), len(strays))
        self.housing.add_or_replace(tenants)


def param_host_bytes(subject: Subject) -> int:
    """What the params will take of the arena."""
    if not _params_visit_host(subject):
        return 0
    return housed_bytes(Tenant(name, storage, []) for name, storage in param_storages(subject.model, subject.device))


def make_params(site: Site, made: Mapping[Target, Movable]) -> Params:
    """House the params."""
    housing = site.housing(Target.PARAMS, with_host_side=_params_visit_host(site))
    housing.add(param_tenants(site.model, site.device))
    return Params(site.model, housing, site.mover, verify=site.options.verify)


def _params_visit_host(subject: Subject) -> bool:
    # The policy's weights wait in their host memory while the reference policy's compute.
    return subject.visits_host(Target.PARAMS) or subject.options.keep_reference


class Grads:
    """The gradients: on the GPU, or dropped; they come back zeroed at the same addresses.

    Args:
        housing: of the gradient buffers, without a host side.
        mover: maps and unmaps.
        optimizer: whose own copies of gradients are dropped along with them.
    """

    cells = frozenset({Cell.GPU, Cell.DROPPED})
    waits_itself = False
    is_computed_when_read = False

    def __init__(self, housing: Housing, mover: Mover, optimizer: Any | None) -> None:
        self.housing = housing
        self._mover = mover
        self._optimizer = optimizer

    @property
    def nbytes(self) -> int:
        """What it takes of the GPU while it is there."""
        return self.housing.nbytes

    @property
    def mapped_bytes(self) -> int:
        """What its ranges take of the GPU now."""
        return self.housing.mapped_bytes

    def start(self, cell: Cell) -> Move:
        """See `residency.Movable`."""
        if cell is Cell.DROPPED:
            release_main_grads(self._optimizer)
            return self._mover.drop(self.housing.homes)
        transfer = self._mover.take(self.housing.homes)
        transfer.on_arrival = self._zero
        return transfer

    def _zero(self) -> None:
        for home in self.housing.homes:
            home.range.tensor.zero_()

    def first_name(self, error: Exception) -> str:
        """The buffer that an error of a move is about."""
        assert isinstance(error, ChunkError)
        return self.housing.name_at(error)

    def host_view(self, tensor: torch.Tensor) -> None:
        """Gradients are never on the host."""

    def close(self) -> None:
        """Give all memory back."""
        self.housing.close()


def grad_host_bytes(subject: Subject) -> int:
    """Gradients take nothing of the arena."""
    return 0


def make_grads(site: Site, made: Mapping[Target, Movable]) -> Grads | None:
    """House the gradient buffers; None for a model without, such as one that is not in DistributedDataParallel."""
    tenants = grad_tenants(site.model)
    if not tenants:
        return None
    housing = site.housing(Target.GRADS, with_host_side=False)
    housing.add(tenants)
    return Grads(housing, site.mover, site.optimizer)
