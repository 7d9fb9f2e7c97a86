"""What one module's forward pass saves, and what autograd keeps of it."""

import weakref
from typing import TYPE_CHECKING

import torch

from nemo_offload_rl.activation_offload.report import ModuleReport
from nemo_offload_rl.activation_offload.storage import SavedStorage

if TYPE_CHECKING:
    from nemo_offload_rl.activation_offload.groups import Chunk


class Group:
    """One module's forward pass in one layer.

    Args:
        name: the module.
        chunk: that it is part of.
        report: the module's, of this step.
    """

    __slots__ = ("chunk", "in_backward", "index", "key", "name", "nbytes", "report", "saved", "storages")

    def __init__(self, name: str, chunk: "weakref.ref[Chunk]", report: ModuleReport) -> None:
        self.name = name
        self.chunk = chunk
        self.report = report
        self.index = -1
        """Among its chunk's; -1 before its commit."""
        self.in_backward = False
        """Something that it saved has been unpacked."""
        self.key = (name, -1)
        """The module, and how many of its groups come before this one in the pass."""
        self.storages: list[weakref.ref[SavedStorage]] = []
        """The storages of what it saved, in the order in which its backward pass needs them."""
        self.saved: list[SavedTensor] = []
        """Until its commit is through."""
        self.nbytes = 0

    def settle(self) -> tuple[list["SavedTensor"], list[SavedStorage]]:
        """Its forward pass is queued.

        Returns:
            What it saved, and of the storages of that those that no group before it had saved.

        Raises:
            InPlaceError: some of it has changed since.
        """
        for one in self.saved:
            one.check()
        storages = list(dict.fromkeys([one.stored for one in reversed(self.saved)]))
        self.storages = [weakref.ref(stored) for stored in storages]
        fresh = [stored for stored in reversed(storages) if stored.stays is None]
        self.nbytes = sum([stored.nbytes for stored in fresh])
        return self.saved, fresh

    def on_host_only(self) -> list[SavedStorage]:
        """Storages of what it saved that are on the host alone."""
        storages = [ref() for ref in self.storages]
        return [stored for stored in storages if stored is not None and stored.storage is None]

    def has_left(self) -> bool:
        """Whether something that it saved was copied to the host, perhaps for another group."""
        return any(stored is not None and stored.has_left for stored in (ref() for ref in self.storages))


class InPlaceError(RuntimeError):
    """Something changed a tensor between its saving and its use, or its copy."""


ResidentTensor = tuple[torch.Tensor, int, str]
"""A tensor that stays on the GPU, its version when it was saved, and the module that saved it."""


def keep(tensor: torch.Tensor, module: str) -> ResidentTensor:
    """What autograd keeps of a tensor that stays."""
    return _without_history(tensor), tensor._version, module


def resident_tensor(kept: ResidentTensor) -> torch.Tensor:
    """The tensor, as it was saved: autograd asks for versions only where there are no hooks.

    Raises:
        InPlaceError: it has changed.
    """
    tensor, version, module = kept
    if tensor._version != version:
        raise InPlaceError(
            f"{_changed(tensor, version, module)}, and gradients would be wrong, as they would without offloading; let "
            "what changes it make a new tensor"
        )
    return tensor


def may_move(tensor: torch.Tensor) -> bool:
    """Whether a tensor is not marked to stay, and its bytes are its values (neither conjugated nor negated)."""
    return not (
        tensor.is_conj()
        or tensor.is_neg()
        or getattr(tensor, "_TE_do_not_offload", False)
        or getattr(tensor, "_do_not_offload", False)
    )


class SavedTensor:
    """What autograd keeps of a tensor that may leave: first itself, and then how to see it in its storage again.

    Args:
        tensor: that a module saved.
        group: of that module.
        stored: its storage.
        is_alias: only autograd knows the tensor; other tensors may share its storage.
    """

    __slots__ = ("_is_alias", "_seen_as", "_tensor", "_version", "group", "stored")

    def __init__(self, tensor: torch.Tensor, group: Group, stored: SavedStorage, *, is_alias: bool = False) -> None:
        self.group = group
        self.stored = stored
        self._is_alias = is_alias
        self._tensor: torch.Tensor | None = tensor
        self._version = tensor._version
        self._seen_as = _view_of(tensor) if is_alias else None  # the first one that leaves empties it

    def stay(self) -> None:
        """It is on the GPU until the backward pass."""
        if self._tensor is not None:
            self._tensor = _without_history(self._tensor)

    def leave(self) -> None:
        """Let go of the tensor; `stored` has its bytes."""
        tensor, self._tensor = self._tensor, None
        if tensor is not None:
            self._seen_as = self._seen_as or _view_of(tensor)
            if self._is_alias:  # autograd keeps a leaf that requires a gradient, to add that to it
                tensor.data = tensor.new_empty(0)

    def check(self) -> None:
        """Refuse to go on with a copy of something that has changed since.

        Raises:
            InPlaceError: it has; autograd itself would refuse its backward pass.
        """
        tensor = self._tensor
        if tensor is not None and tensor._version != self._version:
            raise InPlaceError(
                f"{_changed(tensor, self._version, self.group.name)} while it was copied to the host; take "
                f"{self.group.name} out of policy.megatron_cfg.offload_modules"
            )

    def unpacked(self) -> torch.Tensor:
        """The tensor, on the GPU.

        Raises:
            InPlaceError: it has never left, and has changed.
        """
        if self._tensor is not None:
            return resident_tensor((self._tensor, self._version, self.group.name))
        assert self._seen_as is not None
        offset, size, stride, dtype = self._seen_as
        storage = self.stored.fetch()
        return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, size, stride)


def _view_of(tensor: torch.Tensor) -> tuple[int, torch.Size, tuple[int, ...], torch.dtype]:
    """Where and how it is seen in its storage."""
    return int(tensor.storage_offset()), tensor.size(), tensor.stride(), tensor.dtype


def _without_history(tensor: torch.Tensor) -> torch.Tensor:
    """An output with its history, kept by the node that made it, would keep that node alive."""
    return tensor if tensor.is_leaf else tensor.detach()


def _changed(tensor: torch.Tensor, version: int, module: str) -> str:
    return (
        f"a tensor of shape {list(tensor.shape)} that {module} saved for the backward pass was changed in place "
        f"(version {tensor._version}, saved at {version})"
    )
