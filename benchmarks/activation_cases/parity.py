"""Measures table 1: whether loss, gradient norm and parameter checksums are bit-equal to the plain run.

`bit_equal` is true where all of them are, in every step and on every rank; it is null for combinations that validation
refuses, with the message in `refused`. Ways are `offloaded`, and `late copies` with --delay-copies. A row named plain
offloads nothing: it is a second plain run, a control of the kernels' determinism. Bytes are those of the last step on
rank 0.
"""

import functools
import os
from collections.abc import Callable, Mapping

import torch
from ports import free_port

from activation_cases.combinations import REFUSED, Combination, several_gpus, single_gpu
from activation_cases.processes import run_processes
from activation_cases.table import Setting, as_list
from activation_cases.trial import Trial, first_difference, run_trial
from activation_cases.worker import policy
from nemo_offload_rl.config.problems import RecipeError

NUM_STEPS = 10
LAYOUT_TIMEOUT_S = 240


def parts(setting: Setting) -> Mapping[str, Callable[[], None]]:
    """Returns what can be compared here; layouts over several GPUs only if the machine has as many."""
    plain_runs: dict[Combination, Trial] = {}
    found: dict[str, Callable[[], None]] = {}
    for name, combination in REFUSED.items():
        found[f"refused/{name}"] = functools.partial(_refused, setting, f"refused/{name}", combination)
    for combination in single_gpu():
        found[combination.name] = functools.partial(_single, setting, combination, plain_runs)
    for name, (num_gpus, combination) in several_gpus().items():
        if num_gpus <= torch.cuda.device_count():
            found[name] = functools.partial(_layout, setting, combination, num_gpus)
    return found


def _refused(setting: Setting, part: str, combination: Combination) -> None:
    try:
        policy(combination.model, combination.overrides())
    except RecipeError as error:
        messages = "; ".join(f"{problem.path}: {problem.message}" for problem in error.problems)
        setting.file.add("parity", part, _way(setting), describe(combination) | {"refused": messages})
        return
    raise RuntimeError(f"validation accepts {combination.name}")


def _single(setting: Setting, combination: Combination, plain_runs: dict[Combination, Trial]) -> None:
    num_steps, plain = setting.num_steps(NUM_STEPS), combination.plain()
    if plain not in plain_runs:
        plain_runs[plain] = run_trial(plain, num_steps)
    run = run_trial(combination, num_steps, setting.late_ms)
    _add(setting, combination, [run], [plain_runs[plain]])


def _layout(setting: Setting, combination: Combination, num_gpus: int) -> None:
    arguments = (num_gpus, [free_port(), free_port()], combination, setting.num_steps(NUM_STEPS), setting.late_ms)
    pairs = run_processes(_rank, num_gpus, *arguments, timeout_s=LAYOUT_TIMEOUT_S)
    _add(setting, combination, [run for run, _ in pairs], [plain for _, plain in pairs])


def _rank(
    rank: int, world_size: int, ports: list[int], combination: Combination, num_steps: int, late_ms: float
) -> tuple[Trial, Trial]:
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # overlapped communication of tensor and pipeline ranks needs this
    plain = run_trial(combination.plain(), num_steps, rank=rank, world_size=world_size, port=ports[0])
    return run_trial(combination, num_steps, late_ms, rank=rank, world_size=world_size, port=ports[1]), plain


def _add(setting: Setting, combination: Combination, runs: list[Trial], plain_runs: list[Trial]) -> None:
    if setting.late_ms and runs[0].moved.moved and not runs[0].num_late_copies:
        raise RuntimeError(f"{combination.name}: copies were to come late, but none was seen")
    differences = [first_difference(run, plain) for run, plain in zip(runs, plain_runs, strict=True)]
    found = [f"rank {rank}, {text}" for rank, text in enumerate(differences) if text is not None]
    first = runs[0]
    row = describe(combination) | first.moved.cells()
    row |= {
        "bit_equal": not found,
        "difference": found[0] if found else None,
        "steps": len(first.steps),
        "last_loss": first.steps[-1].loss,
        "num_micro_batches": ", ".join(map(str, first.num_micro_batches)),
        "num_graph_replays": first.num_replays,
        "num_late_copies": first.num_late_copies,
    }
    setting.file.add("parity", combination.name, _way(setting), row)


def _way(setting: Setting) -> str:
    return "late copies" if setting.late_ms else "offloaded"


def describe(combination: Combination) -> dict[str, float | int | str | bool | None]:
    """Returns a combination as fields of a row."""
    return {
        "model": combination.model,
        "modules": as_list(combination.modules),
        "fraction": combination.fraction,
        "graphs": as_list(combination.graphs),
        "delay": combination.delay,
        "micro_batches": f"{combination.micro_batches}{' packed' if combination.packed else ''}",
        "phases": combination.phases,
        "recompute": as_list(combination.recompute),
        "parallel": combination.parallel,
    }
