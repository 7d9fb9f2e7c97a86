"""Splits the cost of offloading by its causes: one worker takes steps in several ways, in turn.

- `plain`: offloading is suspended.
- `hooks`: the hooks see every tensor, but all stay on the GPU: a fraction of 0.
- `requests`: as `beside`, with 4 KiB in place of each copy's bytes.
- `beside`: all storages stay on the GPU but are still copied out, and as many bytes come back, in as many requests,
  into memory that is not read; no stream waits for them.
- `offloaded`: as in a run.

`paired_percent` says by how much a way's step is longer than the plain one beside it, as the median of all pairs, with
the bootstrap's interval of worker_train.py: the speed of these hosts varies by more than the effect.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

import torch
from worker_train import interval_95, median_of_ratios

from activation_cases.combinations import ATTENTION, Combination
from activation_cases.cost import NUM_MICRO_BATCHES
from activation_cases.measuring import in_turn
from activation_cases.parity import describe
from activation_cases.table import Row, Setting
from activation_cases.worker import STATE_STAYS, Feed, offloader, policy, running, suspended
from nemo_offload_rl.activation_offload.copies import CopyEngine, CopyHandle, Span
from nemo_offload_rl.activation_offload.groups import Chunk, Group, InflightOffloads
from nemo_offload_rl.activation_offload.manager import ActivationOffloader
from nemo_offload_rl.worker.worker import MegatronPolicyWorker

NUM_STEPS = 50
SHORT_BYTES = 4096

CASES: Mapping[str, tuple[Combination, int]] = {
    "dense/qkv_linear": (Combination("dense", ("qkv_linear",)), 4),
    "dense/attention": (Combination("dense", ATTENTION), 1),
    "moe/moe_act": (Combination("moe", ("moe_act",)), 1),
}
"""What is on, and rows of a micro-batch."""


def parts(setting: Setting) -> Mapping[str, Callable[[], None]]:
    """Returns one part for each worker."""
    return {name: functools.partial(_measure, setting, name, *case) for name, case in CASES.items()}


@contextlib.contextmanager
def training(combination: Combination, size: int) -> Iterator[tuple[MegatronPolicyWorker, Callable[[], object]]]:
    """Yields a worker of a case and a function that trains a step, always with the same data.

    Args:
        combination: what is on.
        size: rows of a micro-batch.
    """
    section = policy(
        combination.model, [*combination.overrides(), *STATE_STAYS, f"policy.train_micro_batch_size={size}"]
    )
    with running(section) as worker:
        feed = Feed(worker, section, str(NUM_MICRO_BATCHES[size]), size, full=True)
        yield worker, functools.partial(feed.train, feed.batch(0))


def _measure(setting: Setting, part: str, combination: Combination, size: int) -> None:
    with training(combination, size) as (worker, train):
        active = offloader(worker)
        assert active is not None, f"{part} offloads"
        train()  # the manager knows which groups make requests after one whole pass

        def step(way: Callable[[], contextlib.AbstractContextManager[object]]) -> None:
            with way():
                train()

        chosen = ways(active, worker.device)
        steps = {name: functools.partial(step, way) for name, way in chosen.items()}
        seconds = in_turn(steps, setting.num_steps(NUM_STEPS))
        for name, taken in seconds.items():
            setting.file.add("causes", part, name, _row(combination, size, seconds["plain"], taken))


def _row(combination: Combination, size: int, plain: list[float], taken: list[float]) -> Row:
    pairs = list(zip(plain, taken, strict=True))
    low, high = interval_95(pairs, median_of_ratios)
    return describe(combination) | {
        "micro_batch": size,
        "num_micro_batches": NUM_MICRO_BATCHES[size],
        "step_ms": round(median(taken) * 1e3, 3),
        "paired_percent": round((median_of_ratios(pairs) - 1) * 100, 3),
        "paired_low_95": round((low - 1) * 100, 3),
        "paired_high_95": round((high - 1) * 100, 3),
        "steps": len(taken),
    }


def ways(
    active: ActivationOffloader, device: torch.device
) -> Mapping[str, Callable[[], contextlib.AbstractContextManager[object]]]:
    """Returns the ways; a step runs inside the context of its way.

    Args:
        active: offloads, on one pipeline stage.
        device: holds the memory for copies that come back during a step.
    """
    return {
        "plain": functools.partial(suspended, active),
        "hooks": lambda: _nothing_leaves(active),
        "requests": lambda: _beside(active, device, at_most=SHORT_BYTES),
        "beside": lambda: _beside(active, device),
        "offloaded": contextlib.nullcontext,
    }


@contextlib.contextmanager
def _nothing_leaves(active: ActivationOffloader) -> Iterator[None]:
    options = dataclasses.replace(active.options, fraction=0.0)
    with instead(active, options=options, _profiles={}):
        yield


@contextlib.contextmanager
def _beside(active: ActivationOffloader, device: torch.device, *, at_most: int | None = None) -> Iterator[None]:
    copies = active.copies
    begin_backward, offload, ask_back = active.begin_backward, _short(copies.out, at_most), _short(copies.back, at_most)
    sent: list[int] = []  # bytes of each request out, which come back in the reverse order

    def out(spans: Sequence[Span], after: Iterable[CopyHandle]) -> CopyHandle:
        sent.append(sum(span.nbytes for span in spans))
        return offload(spans, after)

    def begin(chunk: Chunk, group: Group) -> None:
        if group.key in active._profiles[chunk.stage].asks:
            nbytes = sent.pop()
            on_gpu, on_host = _unread(device, nbytes)
            ask_back([Span(on_gpu.untyped_storage(), on_host, 0, nbytes)], [])
        begin_backward(chunk, group)

    with instead(active, _inflight=_Forgetful(copies), begin_backward=begin), instead(copies, out=out):
        yield


class _Forgetful(InflightOffloads):
    """Waits for nothing, and leaves all tensors on the GPU."""

    def release(self, max_held: int) -> None:
        while len(self._held) > max_held:
            self._held.popleft()


@functools.cache
def _unread(device: torch.device, nbytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    pinned = device.type == "cuda"
    host = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=pinned)
    return torch.empty(nbytes, dtype=torch.uint8, device=device), host


def _short(
    ask: Callable[[Sequence[Span], Iterable[CopyHandle]], CopyHandle], at_most: int | None
) -> Callable[[Sequence[Span], Iterable[CopyHandle]], CopyHandle]:
    if at_most is None:
        return ask
    return lambda spans, after: ask([span._replace(nbytes=min(span.nbytes, at_most)) for span in spans], after)


@contextlib.contextmanager
def instead(owner: ActivationOffloader | CopyEngine, **attributes: Any) -> Iterator[None]:
    """Replaces attributes of one object until the block ends."""
    before = {name: vars(owner)[name] for name in attributes if name in vars(owner)}
    vars(owner).update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            del vars(owner)[name]
        vars(owner).update(before)
