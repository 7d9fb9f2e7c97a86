"""Runs activation offloading on one rank: its host memory, its guard around a training step, and its messages."""

import contextlib
import logging
from collections.abc import Iterator

import torch

from nemo_offload_rl.activation_offload.manager import ActivationOffloader
from nemo_offload_rl.activation_offload.report import StepReport, gpu_waited, stays_alive, table, why_no_effect
from nemo_offload_rl.mcore.build import TrainingState
from nemo_offload_rl.mcore.patches import activation_offload
from nemo_offload_rl.memory.errors import preserve_first_error
from nemo_offload_rl.memory.streams import Waits
from nemo_offload_rl.memory.units import GIB
from nemo_offload_rl.plan.plan import OffloadPlan
from nemo_offload_rl.residency.attach import Offloader

logger = logging.getLogger(__name__)

_FREED_SHARE = 0.9
"""A module that freed less than this share of its moved bytes gets a warning."""
_WAITED_SHARE = 0.02
"""A step in which the GPU waited for copies for more than this share of the time gets a warning."""


class NoEffectError(ValueError):
    """Reports that a module of a strict recipe offloaded nothing."""


class Activations:
    """Offloads activations in training steps; does nothing if the plan has no activation offloading.

    Args:
        state: the model, on its device.
        plan: the recipe's offload plan.
        offloader: the residency offloader, whose pinned arena allocates the host memory.
        nbytes: size of that memory.

    Raises:
        ValueError: megatron-core is of a version that this was not tested with.
    """

    def __init__(self, state: TrainingState, plan: OffloadPlan, offloader: Offloader, nbytes: int) -> None:
        self.offloader: ActivationOffloader | None = None
        self._num_steps = 0  # training steps that have offloaded
        if plan.activations is None or state.optimizer is None:  # a policy without an optimizer never trains
            return
        self._strict = plan.activations.strict
        activation_offload.require_tested_version()
        device = next(state.model[0].parameters()).device
        self._arena = offloader.context.arena
        self._link = offloader.meter.link
        self._segment = self._arena.allocate("activations", nbytes) if nbytes else None
        if self._segment is not None and not self._segment.pinned:
            logger.warning(
                "the %.2f GiB of host memory for activations could not be page-locked; every copy makes the GPU wait",
                nbytes / GIB,
            )
        options = activation_offload.options_of_rank(plan.activations, state.config)
        memory = torch.empty(0, dtype=torch.uint8) if self._segment is None else self._segment.tensor
        graphs = state.config.cuda_graph_impl != "none"
        try:
            self.offloader = activation_offload.install(state.model, options, memory, device, graphs=graphs)
        except BaseException:
            with preserve_first_error():
                if self._segment is not None:
                    self._arena.release(self._segment)
            raise

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Run the schedule of one training step inside.

        Raises:
            NoEffectError: a module offloaded nothing in the first step, and the recipe is strict.
        """
        if self.offloader is None:
            yield
            return
        before = self.offloader.report
        is_second = self._num_steps == 1  # the first one allocates and compiles
        timed = self.offloader.copies.timed_waits() if is_second else contextlib.nullcontext(Waits())
        with timed as waits:
            try:
                yield
            except BaseException:
                with preserve_first_error():
                    self.offloader.reset()  # a schedule that completes does it itself
                raise
        if self.offloader.report is before:
            return
        self._num_steps += 1
        if self._num_steps == 1:
            self._report_first_step(self.offloader.report)
        elif is_second:
            self._warn_of_waits(waits, self.offloader.report)

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of the last training step on this rank."""
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
        # Waiting for a failed GPU raises again.
        with preserve_first_error(), contextlib.ExitStack() as stack:
            if self._segment is not None:
                stack.callback(self._arena.release, self._segment)
            stack.callback(offloader.close)
            activation_offload.uninstall(offloader)

    def _report_first_step(self, report: StepReport) -> None:
        assert self.offloader is not None
        logger.info("activations offloaded in the first step:\n%s", table(report))
        without = {}
        leaving = self.offloader.offloaded_modules()
        modules = self.offloader.options.modules
        for module in modules:
            found = report.modules.get(module)
            reason = why_no_effect(module, found, modules, offloads_later=module in leaving)
            if reason is not None:
                without[module] = reason
            elif found is not None and found.freed_bytes < _FREED_SHARE * found.moved_bytes:
                logger.warning("%s", stays_alive(module, found, modules))
        if not without:
            return
        words = "; ".join(f"{module}: {reason}" for module, reason in without.items())
        message = f"policy.megatron_cfg.offload_modules names modules that have no effect in the first step: {words}."
        if self._strict:
            raise NoEffectError(f"{message} Remove them, or set policy.activation_offload.strict to false.")
        logger.warning("%s Remove them.", message)

    def _warn_of_waits(self, waits: Waits, report: StepReport) -> None:
        assert self.offloader is not None
        if report.captured_host_bytes or waits.seconds_waited <= _WAITED_SHARE * waits.seconds:
            return  # waits inside of graph replays are not timed
        options = self.offloader.options
        words = gpu_waited(
            waits,
            report.total().moved_bytes,
            link_speed=None if self._link is None else self._link.d2h_bytes_per_s,
            fraction=options.fraction,
            max_inflight=options.max_inflight,
        )
        logger.warning("%s", words)
