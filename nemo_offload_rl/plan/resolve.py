"""Decides, from a recipe and the machine that it runs on, everything that depends on the machine, once.

The driver calls `resolve` before a run starts, and hands the result on; `nemo-offload-rl plan` prints it. It is pure:
facts about machine and model are arguments.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from nemo_offload_rl.config import check_rules
from nemo_offload_rl.config.megatron import split_devices
from nemo_offload_rl.config.schema import MasterConfig
from nemo_offload_rl.memory.units import show_gib
from nemo_offload_rl.plan.activations import AUTO
from nemo_offload_rl.plan.architecture import UnknownArchitectureError
from nemo_offload_rl.plan.decisions import Machine, Resolved, decide
from nemo_offload_rl.plan.fit import Fit, cheapest_fit
from nemo_offload_rl.plan.fit_options import from_overrides
from nemo_offload_rl.plan.planner import Planner
from nemo_offload_rl.plan.values import with_values

_KEY = "policy.activation_memory"


def resolve(config: MasterConfig, machine: Machine, hf_config: Mapping[str, Any], *, algorithm: str) -> Resolved:
    """Decides every setting of a recipe that depends on the machine, and plans the result.

    Args:
        config: a validated recipe's config; not modified.
        machine: the machine that it is to run on.
        hf_config: the model's Hugging Face config with every field, as its `to_dict()` gives it.
        algorithm: a key of `ALGORITHMS`, the section that marks the recipe.

    Raises:
        HostBudgetError: a rank needs more host memory than the recipe's limit.
        ValueError: the model cannot be split as the recipe says; Megatron or vLLM would not compute it as transformers
            does; the GPUs have no attention for the recipe; the host memory for activations is not known.
    """
    rates = machine.rates.of_a_rank(split_devices(config["cluster"], config["policy"]).policy_per_node)
    planner = Planner(hf_config, algorithm, machine.gpu_bytes, machine.hosts, rates)
    chosen: tuple[str, ...] = ()
    lines, problems = [], []
    if config["policy"]["activation_memory"] == AUTO:
        try:
            chosen, line = _chosen(config, planner)
        except ValueError as error:
            problems.append(error)
        else:
            lines.append(line)
        config = with_values(config, {**from_overrides(chosen), _KEY: None})
    resolved = decide(config, planner, has_gpus=machine.has_gpus)
    others = (problem for problem in resolved.problems if str(problem) not in map(str, problems))
    return dataclasses.replace(
        resolved,
        lines=(*lines, *resolved.lines),
        problems=(*problems, *others),
        peaks_gib={} if problems else resolved.peaks_gib,
        chosen=chosen,
    )


def _chosen(config: MasterConfig, planner: Planner) -> tuple[tuple[str, ...], str]:
    """Returns the overrides that `auto` stands for, and the line about them.

    Raises:
        ValueError: nothing makes the recipe fit, or it is refused for another reason.
    """

    def load(overrides: Sequence[str]) -> MasterConfig:
        changed = with_values(config, from_overrides(overrides))
        check_rules(planner.algorithm, changed)
        return changed

    try:
        if planner.gpu_bytes is not None:
            fit = cheapest_fit(load, planner)
            return fit.overrides, _line(fit, planner.gpu_bytes)
        unknown = "no GPU's memory is known here"
    except UnknownArchitectureError:
        unknown = "the model's sizes are not known before it is built"
    return (), f"{_KEY} is auto, but adds nothing, since {unknown}"


def _line(fit: Fit, gpu_bytes: int) -> str:
    size, overrides = show_gib(gpu_bytes), " ".join(fit.overrides)
    if not fit.fits:
        lacks = f"a GPU of {size} GiB lacks {show_gib(fit.missing_gpu_bytes)} GiB"
        if fit.missing_host_bytes:
            lacks = f"a host lacks {show_gib(fit.missing_host_bytes)} GiB of memory"
        raise ValueError(
            f"{_KEY} is auto, but {lacks} with what comes nearest ({overrides or 'the recipe as it is'}); lower the "
            "tokens of a micro-batch, divide the model over more GPUs, or set it to null to start anyway."
        )
    left = f"{fit.seconds:.3g} s a step, with {show_gib(fit.free_gpu_bytes)} of the GPU's {size} GiB left"
    if not fit.overrides:
        return f"{_KEY} adds nothing, since the recipe fits as it is: by prediction {left}"
    return f"{_KEY} adds what by prediction fits the fastest: {left}; these overrides pin it: {_KEY}=null {overrides}"
