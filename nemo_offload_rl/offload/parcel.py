"""A storage that autograd saved, on its way to the host and back."""

from collections.abc import Sequence

import torch

from nemo_offload_rl.offload.activation_copies import Span, Ticket
from nemo_offload_rl.offload.activation_report import ModuleReport
from nemo_offload_rl.offload.activation_route import Route
from nemo_offload_rl.offload.first_error import first_error_stays
from nemo_offload_rl.offload.host_slab import Region


class Parcel:
    """A storage that autograd saved, wherever it is now.

    Attributes:
        version: of the tensor that was saved first, in autograd's count of changes in place.
        report: of the module that saved it first.
        route: that it takes.
        nbytes: of the storage.
        device: the GPU.
        storage: on the GPU; None while it is on the host alone.
        stays: on the GPU; None until a group has committed it.
    """

    __slots__ = (
        "__weakref__",
        "_left",
        "_region",
        "_returning",
        "_weak",
        "device",
        "nbytes",
        "report",
        "route",
        "stays",
        "storage",
        "version",
    )
    # Not by torch's name when it is called: an interpreter that ends may have cleared that module.
    _free_weak_ref = staticmethod(torch.UntypedStorage._free_weak_ref)

    def __init__(self, storage: torch.UntypedStorage, version: int, report: ModuleReport, route: Route) -> None:
        self.version = version
        self.report = report
        self.route = route
        self.nbytes = storage.nbytes()
        self.storage: torch.UntypedStorage | None = storage
        self.stays: bool | None = None
        self.device = storage.device
        self._weak = storage._weak_ref()  # as torch.multiprocessing's StorageWeakRef; given back in `__del__`
        self._region: Region | None = None
        self._left: Ticket | None = None
        self._returning: Ticket | None = None

    @property
    def has_left(self) -> bool:
        """Whether a copy out of it was asked for."""
        return self._left is not None

    def span(self, storage: torch.UntypedStorage, region: Region) -> Span:
        """`storage` on the GPU, as large as its own, and a region of its route."""
        return Span(storage, self.route.host.memory, region.offset, self.nbytes)

    def leave(self, region: Region, ticket: Ticket) -> None:
        """Its copy to the host was asked for."""
        self._region, self._left = region, ticket

    def on_host(self) -> tuple[Region, Ticket]:
        """Where it is there, and the copy that has taken it there."""
        assert self._region is not None and self._left is not None
        return self._region, self._left

    def come_back(self, storage: torch.UntypedStorage, ticket: Ticket) -> None:
        """Its copy to the GPU was asked for."""
        region, _ = self.on_host()
        self.storage, self._returning = storage, ticket
        self._region = None
        if torch.UntypedStorage._new_with_weak_ptr(self._weak) is None:
            self.report.freed_bytes += self.nbytes  # else somebody has kept what left, and may have changed it
        self.route.host.give_back(region, ticket)

    def fetch(self) -> torch.UntypedStorage:
        """Its storage on the GPU; the caller's stream has waited for it."""
        if self.storage is None:
            start_back([self])
        if self._returning is not None:
            self.route.copies.wait(self._returning)
            self._returning = None
        assert self.storage is not None
        return self.storage

    def __del__(self) -> None:
        self._free_weak_ref(self._weak)
        if self._returning is not None:  # prefetched and not needed
            self.route.copies.wait_to_free(self._returning)
        if self._region is not None:
            self.route.host.give_back(self._region, self._left)


def ask_out(route: Route, placed: Sequence[tuple[Parcel, Region]]) -> Ticket:
    """Ask for the copies to the host of parcels, each to its region, all at once: the host pays for each request."""
    spans: list[Span] = []
    after: list[Ticket] = []
    for parcel, region in placed:
        assert parcel.storage is not None
        spans.append(parcel.span(parcel.storage, region))
        after += region.after
    try:
        ticket = route.copies.out(spans, after)
    except BaseException:
        with first_error_stays():
            for _, region in placed:  # the next copy there comes after those of this request, on the same stream
                route.host.give_back(region, None)
            _end_copies(route)
        raise
    for parcel, region in placed:
        parcel.leave(region, ticket)
    return ticket


def _end_copies(route: Route) -> None:
    """Of a request that was refused some copies may be under way, in memory that is about to be used again."""
    if not route.copies.is_capturing():  # what a capture has asked for never runs where it fails
        route.copies.synchronize()


def start_back(parcels: Sequence[Parcel]) -> None:
    """Ask for the copies to the GPU of parcels that are on the host alone and take one route, all at once."""
    if not parcels:
        return
    spans: list[Span] = []
    after: list[Ticket] = []
    for parcel in parcels:
        region, left = parcel.on_host()
        spans.append(parcel.span(torch.UntypedStorage(parcel.nbytes, device=parcel.device), region))
        after.append(left)
    route = parcels[0].route
    try:
        returning = route.copies.back(spans, after)
    except BaseException:
        with first_error_stays():
            _end_copies(route)
        raise
    for parcel, span in zip(parcels, spans, strict=True):
        parcel.come_back(span.gpu, returning)
