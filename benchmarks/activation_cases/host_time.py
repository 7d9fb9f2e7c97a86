"""Measures what the CPU spends inside the manager in a step, by kind of call.

Where the CPU is the bottleneck, each of these microseconds lengthens the step. A row is a kind of call: `calls` in a
step, `us`, the median of single calls, and `ms` in a step, the median of steps. The time of nested calls counts in the
outer call as well:

- `pack` and `unpack`, called by autograd for each tensor that is saved and used; the first `unpack` of a group includes
  its `begin_backward`, others the `wait` for what has come back;
- `commit`, the end of a group's forward pass, and `begin_backward`; they include the requests `out` and `back`, and
  `commit` waits, too;
- `wait`, of the GPU's stream for a request: the time of the call, not the time that the stream waits;
- `forward plain` and `forward offloaded`: all CPU time from the start of a micro-batch to its logits.
"""

import functools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from torch.autograd.graph import saved_tensors_hooks

from activation_cases.causes import CASES, instead, training
from activation_cases.combinations import Combination
from activation_cases.cost import NUM_MICRO_BATCHES
from activation_cases.measuring import NUM_WARMUPS, model_frozen
from activation_cases.parity import describe
from activation_cases.table import Setting
from activation_cases.worker import offloader, suspended
from nemo_offload_rl.activation_offload.manager import ActivationOffloader

NUM_STEPS = 20


def parts(setting: Setting) -> Mapping[str, Callable[[], None]]:
    """Returns one part for each worker whose causes are requested."""
    return {name: functools.partial(_measure, setting, name, *case) for name, case in CASES.items()}


def _measure(setting: Setting, part: str, combination: Combination, size: int) -> None:
    with training(combination, size) as (worker, train):
        active = offloader(worker)
        assert active is not None, f"{part} offloads"
        for kind, fields in seconds_inside(active, train, setting.num_steps(NUM_STEPS)).items():
            known = describe(combination) | {"micro_batch": size, "num_micro_batches": NUM_MICRO_BATCHES[size]}
            setting.file.add("host_time", part, kind, {**known, **fields})


def seconds_inside(
    active: ActivationOffloader, step: Callable[[], object], num_steps: int
) -> Mapping[str, Mapping[str, float | int]]:
    """Returns fields of a row for each kind of call.

    Args:
        active: is timed; it is as before afterwards.
        step: trains once, on one pipeline stage.
        num_steps: that many are taken with offloading, and as many plain ones between them.
    """
    for _ in range(NUM_WARMUPS):
        step()
    steps: list[Mapping[str, list[float]]] = []
    with model_frozen():
        for _ in range(num_steps):
            taken: dict[str, list[float]] = defaultdict(list)
            with suspended(active), instead(active, **_forward(active, taken["forward plain"])):
                step()
            calls = {name: _timed(getattr(active, name), taken[name]) for name in ("commit", "begin_backward")}
            hooks = saved_tensors_hooks(_timed(active.save, taken["pack"]), _timed(active.unpack, taken["unpack"]))
            copies = {name: _timed(getattr(active.copies, name), taken[name]) for name in ("out", "back", "wait")}
            whole = _forward(active, taken["forward offloaded"])
            with instead(active, _hooks=hooks, **calls, **whole), instead(active.copies, **copies):
                step()
            steps.append(taken)
    return {
        kind: {
            "calls": statistics.median_low([len(taken[kind]) for taken in steps]),
            "us": round(statistics.median([seconds for taken in steps for seconds in taken[kind]] or [0.0]) * 1e6, 2),
            "ms": round(statistics.median([sum(taken[kind]) for taken in steps]) * 1e3, 3),
            "steps": num_steps,
        }
        for kind in steps[0]
    }


def _timed(call: Callable[..., Any], taken: list[float]) -> Callable[..., Any]:
    def timed(*arguments: Any) -> Any:
        start = time.perf_counter()
        try:
            return call(*arguments)
        finally:
            taken.append(time.perf_counter() - start)

    return timed


def _forward(active: ActivationOffloader, taken: list[float]) -> dict[str, Callable[..., None]]:
    """Times a micro-batch's forward pass by the calls that the manager gets at both ends."""
    begin, end, starts = active.init_model_chunk_offload_handler, active.drain, [0.0]

    def begins(*arguments: Any, **named: Any) -> None:
        starts[-1] = time.perf_counter()
        begin(*arguments, **named)

    def ends() -> None:
        end()
        taken.append(time.perf_counter() - starts[-1])

    return {"init_model_chunk_offload_handler": begins, "drain": ends}
