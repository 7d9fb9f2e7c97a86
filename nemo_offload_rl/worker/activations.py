"""Activation offloading on one rank: its host memory, its guard around a training step, and what it says of it."""

import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from nemo_offload_rl.mcore import activation_offload
from nemo_offload_rl.mcore.build import TrainingState
from nemo_offload_rl.mcore.model_config import hf_config
from nemo_offload_rl.mcore.parallel import mpu
from nemo_offload_rl.offload.activation_report import ModuleReport, StepReport
from nemo_offload_rl.offload.activations import ActivationOffloader
from nemo_offload_rl.offload.attach import Engine
from nemo_offload_rl.plan.activation_facts import activation_facts
from nemo_offload_rl.plan.activations import slab_bytes
from nemo_offload_rl.plan.architecture import UnknownArchitectureError
from nemo_offload_rl.plan.plan import OffloadPlan
from nemo_offload_rl.plan.units import GIB, MIB

logger = logging.getLogger(__name__)

_FREED_SHARE = 0.9
"""Less of what was moved than this came free: worth a warning."""


class NoEffectError(ValueError):
    """A module that the recipe offloads did nothing, and the recipe is strict."""


def activation_bytes(policy: Mapping[str, Any], plan: OffloadPlan, *, world_size: int) -> int:
    """Host memory for this rank's activations; 0 where they stay on the GPU.

    Args:
        policy: the recipe's section, adapted to this machine.
        plan: made from it.
        world_size: ranks of the whole cluster.

    Raises:
        ValueError: it cannot be computed for this architecture, and the recipe does not say it either.
    """
    if plan.activations is None:
        return 0
    try:
        facts = activation_facts(hf_config(policy).to_dict(), policy, world_size=world_size)
    except UnknownArchitectureError as error:
        if plan.activations.host_memory_limit_bytes is None:
            raise ValueError(
                f"The host memory for this model's activations cannot be computed ({error}); give it in "
                "policy.activation_offload.host_memory_limit_gib."
            ) from error
        return plan.activations.host_memory_limit_bytes
    return slab_bytes(facts[mpu.get_pipeline_model_parallel_rank()], plan.activations)


class Activations:
    """Offloads activations in training steps; without an offloader, does nothing.

    Args:
        state: the model, on its device.
        plan: what the recipe asks for.
        engine: whose pinned arena gives the memory.
        nbytes: of it.

    Raises:
        ValueError: megatron-core is of a version that this was not tested with.
    """

    def __init__(self, state: TrainingState, plan: OffloadPlan, engine: Engine, nbytes: int) -> None:
        self.offloader: ActivationOffloader | None = None
        self._was_told = False
        if plan.activations is None:
            return
        self._strict = plan.activations.strict
        activation_offload.require_tested_version()
        device = next(state.model[0].parameters()).device
        self._arena = engine.site.arena
        self._segment = self._arena.allocate("activations", nbytes) if nbytes else None
        if self._segment is not None and not self._segment.pinned:
            logger.warning(
                "the %.2f GiB of host memory for activations could not be page-locked; every copy makes the GPU wait",
                nbytes / GIB,
            )
        options = activation_offload.activation_options(state.config)
        memory = torch.empty(0, dtype=torch.uint8) if self._segment is None else self._segment.tensor
        graphs = state.config.cuda_graph_impl != "none"
        self.offloader = activation_offload.install(state.model, options, memory, device, graphs=graphs)

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """The schedule of one training step runs inside.

        Raises:
            NoEffectError: in the first step, where the recipe is strict.
        """
        if self.offloader is None:
            yield
            return
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self.offloader.reset)  # a schedule that ends does it itself
            yield
            on_failure.pop_all()
        if not self._was_told and self.offloader.report.num_micro_batches:
            self._was_told = True
            self._tell(self.offloader.report)

    def metrics(self) -> dict[str, float]:
        """Of the last training step on this rank."""
        if self.offloader is None:
            return {}
        report = self.offloader.report
        total = report.total()
        return {
            "activations/moved_gib": total.moved_bytes / GIB,
            "activations/freed_gib": total.freed_bytes / GIB,
            "activations/late_gib": total.late_bytes / GIB,
            "activations/refused_gib": total.refused_bytes / GIB,
            "activations/host_peak_gib": report.host_peak_bytes / GIB,
            "activations/host_captured_gib": report.captured_host_bytes / GIB,
            "activations/host_gib": report.host_bytes / GIB,
        }

    def close(self) -> None:
        """Give the host memory back."""
        if self.offloader is None:
            return
        offloader, self.offloader = self.offloader, None
        activation_offload.uninstall(offloader)
        offloader.close()
        if self._segment is not None:
            self._arena.release(self._segment)

    def _tell(self, report: StepReport) -> None:
        assert self.offloader is not None
        logger.info("activations offloaded in the first step:\n%s", table(report))
        without = {}
        for module in self.offloader.options.modules:
            found = report.modules.get(module)
            reason = why_no_effect(module, found)
            if reason is not None:
                without[module] = reason
            elif found is not None and found.freed_bytes < _FREED_SHARE * found.moved_bytes:
                logger.warning("%s", _stays_alive(module, found))
        if not without:
            return
        words = "; ".join(f"{module}: {reason}" for module, reason in without.items())
        message = f"policy.megatron_cfg.offload_modules has modules that did nothing in the first step: {words}."
        if self._strict:
            raise NoEffectError(f"{message} Take them out, or set policy.activation_offload.strict to false.")
        logger.warning("%s Take them out.", message)


def why_no_effect(module: str, report: ModuleReport | None) -> str | None:
    """Why a module's activations all stayed on the GPU; None if some left, or belong to another module's."""
    if report is None:
        if module.endswith("_norm"):
            return "Transformer Engine computes this norm inside the linear behind it, so it saves nothing of its own"
        return "no layer of this pipeline stage offloads it"
    if report.moved_bytes or report.duplicate_bytes:
        return None
    if report.refused_bytes:
        return (
            f"{report.refused_bytes / MIB:.0f} MiB did not fit the host memory; raise "
            "policy.activation_offload.host_memory_limit_gib"
        )
    if report.kept_bytes:
        return (
            f"all of its {report.kept_bytes / MIB:.0f} MiB stay by policy.megatron_cfg.activation_offload_fraction, "
            "delta_offload_bytes_across_pp_ranks, or since they are the last layer's"
        )
    if report.small_bytes:
        return (
            f"all of its {report.small_bytes / MIB:.1f} MiB are in storages below "
            "policy.megatron_cfg.min_offloaded_tensor_size elements"
        )
    return "it saved nothing for the backward pass"


def table(report: StepReport) -> str:
    """What each module moved, in MiB, a line each."""
    lines = [f"{'module':16s} {'moved':>10s} {'freed':>10s} {'duplicate':>10s} {'kept':>10s} {'no room':>10s}"]
    for name, m in report.modules.items():
        values = (m.moved_bytes, m.freed_bytes, m.duplicate_bytes, m.kept_bytes, m.refused_bytes)
        lines.append(f"{name:16s} " + " ".join(f"{value / MIB:10.1f}" for value in values))
    return "\n".join(lines)


def _stays_alive(module: str, report: ModuleReport) -> str:
    hint = " (the attention's output is attn_proj's input: offload attn_proj as well)" if module == "core_attn" else ""
    return (
        f"of the {report.moved_bytes / MIB:.0f} MiB that {module} moved in the first step only "
        f"{report.freed_bytes / MIB:.0f} MiB came free on the GPU; something else keeps the rest{hint}."
    )
