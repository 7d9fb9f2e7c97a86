"""Records GPU memory over one training step, with attention's activations on the GPU and with them offloaded.

The points are the ends of layers in forward and backward passes. At each one the host records a CUDA event and torch's
allocated memory; both follow the order of the stream, so they belong together. `NAME_memory.json` beside the result
file NAME has a row for each point: `ms` since the step began, `allocated_mib` at the point, and `peak_mib`, the peak
since the point before. The picture beside it shows `peak_mib`. Ranges of the offloader, which hold training
state, are not included.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from result_file import write_result

from activation_cases.combinations import ATTENTION, Combination
from activation_cases.measuring import NUM_WARMUPS
from activation_cases.memory_picture import by_way, draw
from activation_cases.table import Row, Setting, as_list
from activation_cases.worker import MIB, STATE_STAYS, Feed, offloader, policy, running, suspended
from nemo_offload_rl.worker.worker import MegatronPolicyWorker

PART, COMBINATION = "dense/attention", Combination("dense", ATTENTION)
MICRO_BATCH, NUM_MICRO_BATCHES = 4, 2


@dataclass(frozen=True)
class Point:
    """Describes a place in a step.

    Attributes:
        doing: forward, backward or optimizer.
        number: of the micro-batch, from 1 on; none of the optimizer.
        behind: the work that has just been queued.
    """

    doing: str
    number: int | None
    behind: str


@dataclass(frozen=True)
class Memory:
    """Holds bytes of torch's allocator: now, and the peak since the last query."""

    allocated: int
    peak: int


@dataclass(frozen=True)
class Sample:
    """Records memory at a point; `moment` is whatever the caller's clock returns."""

    point: Point
    moment: Any
    memory: Memory


def parts(setting: Setting) -> Mapping[str, Callable[[], None]]:
    """Returns one part: a worker that takes steps of both kinds."""
    return {PART: functools.partial(_measure, setting)}


def curve_file(result: Path) -> Path:
    """Returns the file for the points; the picture is beside it."""
    return result.with_name(f"{result.stem}_memory.json")


def _measure(setting: Setting) -> None:
    overrides = [*COMBINATION.overrides(), *STATE_STAYS, f"policy.train_micro_batch_size={MICRO_BATCH}"]
    section = policy(COMBINATION.model, overrides)
    with running(section) as worker:
        active = offloader(worker)
        assert active is not None, "attention is offloaded"
        feed = Feed(worker, section, str(NUM_MICRO_BATCHES), MICRO_BATCH, full=True)
        data = feed.batch(0)
        rows: list[Row] = []
        for way, guard in (("plain", functools.partial(suspended, active)), ("offloaded", contextlib.nullcontext)):
            with guard():
                for _ in range(NUM_WARMUPS):
                    feed.train(data)
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                samples = record(worker, lambda: feed.train(data), allocated_by_torch, _event)
                torch.cuda.synchronize()
            rows += [{"part": PART, "way": way, **row} for row in cells(samples, torch.cuda.Event.elapsed_time)]
    path = curve_file(setting.file.path)
    write_result(path, rows)
    draw(path, path.with_suffix(".png"))
    for way, points in by_way(rows).items():
        summary = {
            "model": COMBINATION.model,
            "modules": "none" if way == "plain" else as_list(COMBINATION.modules),
            "micro_batch": MICRO_BATCH,
            "num_micro_batches": NUM_MICRO_BATCHES,
            "step_ms": points[-1]["ms"],
            "allocated_peak_mib": max(row["peak_mib"] for row in points),
            "steps": 1,
        }
        setting.file.add("memory", PART, way, summary)


def allocated_by_torch() -> Memory:
    """Queries torch's allocator, and resets its peak."""
    found = torch.cuda.memory_stats_as_nested_dict()["allocated_bytes"]["all"]
    torch.cuda.reset_peak_memory_stats()
    return Memory(found["current"], found["peak"])


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def record(
    worker: MegatronPolicyWorker, step: Callable[[], object], memory: Callable[[], Memory], now: Callable[[], Any]
) -> list[Sample]:
    """Returns what `memory` and `now` report at the points of a step, in order.

    Args:
        worker: of one pipeline stage, without CUDA graphs.
        step: trains it once.
        memory: in use.
        now: an event on the current stream, or the time.
    """
    samples: list[Sample] = []

    def note(point: Point) -> None:
        samples.append(Sample(point, now(), memory()))

    [chunk] = worker.state.model
    [model] = [module for module in chunk.modules() if isinstance(module, GPTModel)]
    with points_of(model, note):
        note(Point("forward", 1, "nothing"))
        step()
        note(Point("optimizer", None, "optimizer"))
    return samples


@contextlib.contextmanager
def points_of(model: GPTModel, note: Callable[[Point], None]) -> Iterator[None]:
    """Calls `note` at every layer's end in forward and backward passes inside the block; touches no tensor.

    A layer's backward pass is queued when its input, the output of the module before it, has its gradient.
    """
    number = 0

    def begins(_module: torch.nn.Module, _arguments: Any) -> None:
        nonlocal number
        number += 1

    def embedded(_module: torch.nn.Module, arguments: Any, named: dict[str, Any]) -> None:
        passed(named["hidden_states"] if "hidden_states" in named else arguments[0], "embedding", follower="layer 1")

    def passed(output: torch.Tensor, what: str, follower: str) -> None:
        note(Point("forward", number, what))
        if output.requires_grad:
            point = Point("backward", number, follower)
            output.register_hook(lambda _gradient: note(point))

    def after(name: str, follower: str) -> Callable[..., None]:
        return lambda _module, _arguments, output: passed(output[0], name, follower)

    modules = [*model.decoder.layers, model.output_layer]
    names = [*(f"layer {index}" for index in range(1, len(modules))), "output layer", "loss"]
    hooks = [
        model.register_forward_pre_hook(begins),
        modules[0].register_forward_pre_hook(embedded, with_kwargs=True),
        *(
            module.register_forward_hook(after(name, follower))
            for module, (name, follower) in zip(modules, itertools.pairwise(names), strict=True)
        ),
        model.register_forward_hook(lambda *_: note(Point("forward", number, "log-probs"))),
    ]
    try:
        yield
    finally:
        for handle in hooks:
            handle.remove()


def cells(samples: Sequence[Sample], elapsed_ms: Callable[[Any, Any], float]) -> list[Row]:
    """Returns samples as rows of a file.

    Args:
        samples: of one step.
        elapsed_ms: from one moment to another.
    """
    begin = samples[0].moment
    return [
        {
            "doing": sample.point.doing,
            "number": sample.point.number,
            "behind": sample.point.behind,
            "ms": round(elapsed_ms(begin, sample.moment), 3),
            "allocated_mib": round(sample.memory.allocated / MIB, 1),
            "peak_mib": round(sample.memory.peak / MIB, 1),
        }
        for sample in samples
    ]
