"""Trains a step, moves everything out and back a few times in one way, and trains another step."""

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil
import torch
from offload_ways.memory_saver import WAYS as SAVER_WAYS
from offload_ways.real_optimizer import model_and_optimizer
from offload_ways.trips import checksum, driver_free, release_unused, settle
from result_file import TableValue

from adapter_ways.cases import Case
from adapter_ways.ways import WAYS, Way
from nemo_offload_rl.memory.link import LinkSpeed, measure_link
from nemo_offload_rl.memory.pinned import PinnedArena
from nemo_offload_rl.residency.optimizer_state import state_tensors
from nemo_offload_rl.residency.params_and_grads import ddp_buffers

_SEQUENCE = (2, 64)
_SMALLEST_VOCAB = 512
_ENOUGH_S = 5.0
Made = list[float | int]


@dataclass(frozen=True)
class Cycle:
    """Records one cycle: seconds until done, seconds until the call returned, bytes returned to the driver."""

    out_s: float
    out_waited_s: float
    back_s: float
    back_waited_s: float
    released_bytes: int
    host_bytes: int
    """Resident host memory of this process while all is away."""


def measure(case: Case, way: str, *, cycles: int) -> tuple[dict[str, TableValue], Made]:
    """Measures one way in this process.

    Returns:
        The row, and the last step's loss, gradient norm and checksums, which are compared between ways.

    Raises:
        ImportError: the way's package is not installed.
        torch.OutOfMemoryError: it does not fit on this GPU.
    """
    with PinnedArena() as arena:
        device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        link = measure_link(device, arena)
    with contextlib.ExitStack() as stack:
        with _region(way):
            model, optimizer = stack.enter_context(model_and_optimizer(case.hf_config, case.overrides))
        chosen = stack.enter_context(contextlib.closing(WAYS[way](model, optimizer)))
        return _measured(case, way, chosen, device, link, cycles)


def _region(way: str) -> contextlib.AbstractContextManager[None]:
    """Lets torch_memory_saver own what is allocated while a model is built, if it is the way."""
    if way not in SAVER_WAYS:
        return contextlib.nullcontext()
    from torch_memory_saver import torch_memory_saver

    return torch_memory_saver.region(enable_cpu_backup=True)


def _measured(
    case: Case, name: str, way: Way, device: torch.device, link: LinkSpeed | None, cycles: int
) -> tuple[dict[str, TableValue], Made]:
    _step(way, device, seed=0)
    moved, grads = _tensors(way, device), sum(buffer.grad_data.nbytes for buffer in ddp_buffers(way.model))
    nbytes = sum(tensor.nbytes for tensor in moved)
    before, places = checksum(moved), [tensor.data_ptr() for tensor in moved]
    release_unused(device)
    host_before = psutil.Process(os.getpid()).memory_info().rss
    trips = _cycles(way, device, cycles)
    moved = _tensors(way, device)  # some ways replace the tensors in the optimizer's state
    row: dict[str, TableValue] = {"case": case.name, "way": name, "gb": nbytes / 1e9, "tensors": len(moved)}
    row |= {"first_out_s": trips[0].out_s, "first_back_s": trips[0].back_s}
    for field in ("out_s", "out_waited_s", "back_s", "back_waited_s"):
        row[field] = statistics.median(getattr(trip, field) for trip in trips[1:])
    row["cycles"] = len(trips) - 1
    row |= link_fields(trips[1:], nbytes, nbytes + grads, link if way.moves else None)
    pinned = None if link is None else way.pinned_bytes
    row["pinned_over_moved"] = None if pinned is None else pinned / nbytes
    row["host_over_moved"] = max(0, trips[-1].host_bytes - host_before) / nbytes
    row["addresses_kept"] = places == [tensor.data_ptr() for tensor in moved]
    row["state_bit_equal"] = torch.equal(before, checksum(moved))
    way.arrive()
    made = _step(way, device, seed=1)
    rounded = {key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}
    return rounded, made


def link_fields(trips: Sequence[Cycle], nbytes: int, freed_bytes: int, link: LinkSpeed | None) -> dict[str, TableValue]:
    """Returns the medians' shares of the link, and how many bytes stay on the GPU.

    Args:
        trips: the cycles after the first.
        nbytes: the bytes that are there to move.
        freed_bytes: these and what is there to drop.
        link: the link's speed; None, as all these fields are then, without a GPU and where nothing moves.
    """
    if link is None:
        return {"share_of_link_out": None, "share_of_link_back": None, "left_gb": None}
    out_s = statistics.median(trip.out_s for trip in trips)
    back_s = statistics.median(trip.back_s for trip in trips)
    return {
        "share_of_link_out": nbytes / out_s / link.d2h_bytes_per_s,
        "share_of_link_back": nbytes / back_s / link.h2d_bytes_per_s,
        "left_gb": max(0, freed_bytes - trips[-1].released_bytes) / 1e9,
    }


def _tensors(way: Way, device: torch.device) -> list[torch.Tensor]:
    """Returns parameter buffers, masters and moments: all that a trainer may move, the same for every way."""
    state = [tensor for _, tensor in state_tensors(way.optimizer, device)]
    params = [buffer.param_data for buffer in ddp_buffers(way.model) if buffer.param_data is not None]
    known = {tensor.untyped_storage().data_ptr() for tensor in params}
    return [*params, *(tensor for tensor in state if tensor.untyped_storage().data_ptr() not in known)]


def _cycles(way: Way, device: torch.device, at_most: int) -> list[Cycle]:
    """Runs the first cycle, then as many as take `_ENOUGH_S`: some ways need ten seconds for one."""
    trips = [_cycle(way, device), _cycle(way, device)]
    while len(trips) <= at_most and sum(trip.out_s + trip.back_s for trip in trips[1:]) < _ENOUGH_S:
        trips.append(_cycle(way, device))
    return trips


def _cycle(way: Way, device: torch.device) -> Cycle:
    def timed(call: Callable[[], None], finish: Callable[[], None]) -> tuple[float, float]:
        settle(device)
        start = time.perf_counter()
        call()
        returned = time.perf_counter() - start
        finish()
        settle(device)
        return time.perf_counter() - start, returned

    free = driver_free(device)
    out_s, out_waited_s = timed(way.leave, lambda: None)
    released, host = driver_free(device) - free, psutil.Process(os.getpid()).memory_info().rss
    back_s, back_waited_s = timed(way.come_back, way.arrive)
    return Cycle(out_s, out_waited_s, back_s, back_waited_s, released, host)


def _step(way: Way, device: torch.device, *, seed: int) -> Made:
    """Trains on random tokens; returns loss, gradient norm, and a checksum of parameters and optimizer state."""
    from megatron.core.distributed import finalize_model_grads

    (model,) = way.model
    tokens = torch.randint(_SMALLEST_VOCAB, _SEQUENCE, generator=torch.Generator().manual_seed(seed)).to(device)
    model.zero_grad_buffer()
    way.optimizer.zero_grad()
    positions = torch.arange(tokens.shape[1], device=device).expand_as(tokens)
    loss = model(tokens, positions, None, labels=tokens.roll(-1, 1)).float().mean()
    loss.backward()
    finalize_model_grads([model])
    _, norm, _ = way.optimizer.step()
    made: Made = [float(loss.detach()), float(norm)]
    del loss
    return made + checksum(_tensors(way, device)).tolist()
