"""Sets up one rank's residency offloader, starts its moves early, and measures the GPU memory of each verb."""

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from nemo_offload_rl.mcore.build import TrainingState
from nemo_offload_rl.mcore.graphs.cuda_graphs import CudaGraphs, NoCudaGraphs, StepGraphs
from nemo_offload_rl.mcore.graphs.graph_capture import CaptureObserver
from nemo_offload_rl.mcore.optimizer.cpu_optimizer import cpu_optimizers, take_host_memory
from nemo_offload_rl.memory.numa import Binding, bind_process
from nemo_offload_rl.memory.pinned import PinnedArena
from nemo_offload_rl.memory.units import GIB
from nemo_offload_rl.metrics.memory import gpu_allocated, memory_stats, reset_gpu_peak
from nemo_offload_rl.placement.gpus import torch_pci_bus_id
from nemo_offload_rl.placement.host import HostFacts, host_facts
from nemo_offload_rl.plan.host_budget import CPU_OPTIMIZER, RankNeed, check_host_budget, usable_bytes
from nemo_offload_rl.plan.plan import OffloadPlan
from nemo_offload_rl.residency.attach import Offloader, attach, needed_host_bytes
from nemo_offload_rl.residency.context import Options
from nemo_offload_rl.residency.residency import Residency
from nemo_offload_rl.residency.table import Phase, Placement, Target

logger = logging.getLogger(__name__)


def bind_to_gpu(numa: str | int, *, local_rank: int) -> Binding:
    """Bind this process to its GPU's NUMA node; call it before allocating memory that should be near the GPU.

    Args:
        numa: "auto", "none" or the number of a NUMA node.
        local_rank: index of the GPU, as torch numbers them.

    Raises:
        ValueError: there is no such node.
    """
    binding = bind_process(numa, torch_pci_bus_id(local_rank) if torch.cuda.is_available() else None)
    logger.info("%s", binding.note)
    limit_threads(binding)
    return binding


def limit_threads(binding: Binding) -> None:
    """Limit torch's CPU threads, which the CPU optimizer's step uses, to the number of CPUs of the binding."""
    if binding.node is not None:
        torch.set_num_threads(min(torch.get_num_threads(), len(binding.cpus)))


def make_offloader(
    state: TrainingState,
    plan: OffloadPlan,
    *,
    node: int | None,
    with_reference: bool,
    fixed_bytes: Mapping[str, int],
    generator_bytes: int | None,
) -> Offloader:
    """Attach the offloader to a rank's model and optimizer; collective over all ranks.

    Args:
        state: model and optimizer, on their device.
        plan: the recipe's offload plan.
        node: the NUMA node whose memory is preferred.
        with_reference: whether to keep the current weights as the reference policy.
        fixed_bytes: host memory of allocations that never move, by name; it counts against the budget.
        generator_bytes: see `residency.context.Options`.

    Raises:
        HostBudgetError: on every rank, if some host has too little memory for its ranks; nothing has been pinned.
        ValueError: see `attach`.
    """
    options = Options(
        pinned_optimizer_state=plan.pinned,
        verify=plan.verify,
        with_reference=with_reference,
        stream_window_bytes=plan.stream_window_bytes,
        generator_bytes=generator_bytes,
    )
    arena = PinnedArena(numa_node=node, huge_pages=plan.huge_pages)
    need = needed_host_bytes(state.model, state.optimizer, arena, table=plan.table, options=options)
    on_cpu = list(cpu_optimizers(state.optimizer))
    if host_bytes := sum(optimizer.host_bytes for optimizer in on_cpu):
        fixed_bytes = {**fixed_bytes, CPU_OPTIMIZER: host_bytes}
    _require_host_memory(need, fixed_bytes, plan.host_memory_limit_bytes)
    with contextlib.ExitStack() as undo:
        undo.callback(take_host_memory(on_cpu, arena))
        for optimizer in on_cpu:
            logger.info("%s, %d threads", optimizer.describe(), torch.get_num_threads())
        offloader = attach(state.model, state.optimizer, arena, table=plan.table, options=options)
        state.before_update = offloader.prefetch_streamed_state
        return dataclasses.replace(offloader, hooks=[*offloader.hooks, undo.pop_all().close])


def make_graphs(state: TrainingState, offloader: Offloader, observer: CaptureObserver | None) -> StepGraphs:
    """Returns the training step's CUDA graphs, if the recipe has them, captured while no state moves.

    Args:
        state: the model and the optimizer.
        offloader: the residency offloader, which brings all state to the GPU before a capture.
        observer: notified of captures and replays.
    """
    if state.config.cuda_graph_impl == "none" or state.optimizer is None:
        return NoCudaGraphs()

    def settle() -> None:
        offloader.load_all_to_gpu()
        offloader.residency.wait_until_released()

    return CudaGraphs(
        state.model,
        state.config,
        state.optimizer,
        warmup_steps=state.config.cuda_graph_warmup_steps,
        settle=settle,
        observer=observer,
    )


def _require_host_memory(need: dict[Target, int], fixed_bytes: Mapping[str, int], limit_bytes: int | None) -> None:
    """Gather every rank's need and its host's memory, and check them on every rank with the same result; collective."""
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    all_ranks = [(need, fixed_bytes, host_facts())] * world_size
    torch.distributed.all_gather_object(all_ranks, all_ranks[rank])
    check_ranks(all_ranks, limit_bytes)


def check_ranks(
    ranks: Sequence[tuple[dict[Target, int], Mapping[str, int], HostFacts]], limit_bytes: int | None
) -> None:
    """Check that every host has the memory that its ranks need.

    Args:
        ranks: for each rank, the bytes of its targets, the bytes of its fixed allocations, and facts of its host.
        limit_bytes: the recipe's limit for one rank; None for no limit.

    Raises:
        HostBudgetError: see `check_host_budget`.
    """
    # Neither name is unique: copies of an image share a hostname, containers of one machine its boot id.
    machines = [f"{facts.hostname} {facts.boot_id}" for _, _, facts in ranks]
    needs = [RankNeed(rank, machines[rank], need, fixed) for rank, (need, fixed, _) in enumerate(ranks)]
    # Use the least memory that any rank of a host sees: containers of one host may have limits of their own.
    most_first = sorted(range(len(ranks)), key=lambda rank: -usable_bytes(ranks[rank][2]))
    check_host_budget(needs, {machines[rank]: ranks[rank][2] for rank in most_first}, limit_bytes)


_MARGIN = 1.1
"""Memory reserved for a log-prob pass, relative to the most that any earlier pass took per token."""


class EarlyMoves:
    """Starts moves before the phase that needs them, if they leave enough memory for a log-prob pass.

    This changes only when copies begin, not where state is once a phase has been entered.

    Args:
        residency: moves the state.
        plan: where everything lives in each phase.
        most_tokens: the most tokens of a log-prob micro-batch, padding included; 0 without log-prob passes.
        refit_follows: whether weights are sent to engines after training.
    """

    def __init__(self, residency: Residency, plan: OffloadPlan, *, most_tokens: int, refit_follows: bool) -> None:
        self._residency = residency
        self._refit_follows = refit_follows
        self._state_may_return = plan.table[Phase.LOGPROB][Target.OPTIMIZER_STATE] is Placement.UNCHANGED
        self._most_tokens = most_tokens
        self._gib_per_token = 0.0  # of a log-prob micro-batch; the largest of all passes so far

    def after_training(self) -> None:
        """Start to move gradients and optimizer state off the GPU, if a refit comes next."""
        if self._refit_follows:
            self._residency.start_leaving(Phase.REFIT)

    def after_generation(self, *, logprobs: bool) -> None:
        """Start to bring parameters back to the GPU, and optimizer state after them, as far as memory allows.

        If training comes next, gradients get their memory before optimizer state is copied.

        Args:
            logprobs: whether log-prob passes come before training.
        """
        if logprobs:
            self._residency.prefetch(Phase.LOGPROB)
            self.beside_logprobs(self._most_tokens)
        else:
            self._residency.prefetch(Phase.TRAIN, with_dropped=True)

    def beside_logprobs(self, num_tokens: int) -> None:
        """Start to bring optimizer state back, if the GPU has memory for it and for a log-prob pass.

        The memory of a pass is known once one has run; before that nothing is started.

        Args:
            num_tokens: tokens of the largest micro-batch, padding included.
        """
        if self._state_may_return and self._gib_per_token:
            reserve = _MARGIN * self._gib_per_token * num_tokens
            self._residency.prefetch(Phase.TRAIN, reserve_bytes=int(reserve * GIB))

    def note_logprobs(self, num_tokens: int, gib: float) -> None:
        """Record the GPU memory that a log-prob pass of `num_tokens` tokens took."""
        self._gib_per_token = max(self._gib_per_token, gib / num_tokens)


class GpuPeaks:
    """Records the peak GPU memory of each verb's last call; records nothing without a GPU.

    Args:
        mapped_bytes: Returns the bytes that are mapped in ranges now, which torch's allocator does not count.
    """

    def __init__(self, mapped_bytes: Callable[[], int]) -> None:
        self._mapped_bytes = mapped_bytes
        self._peaks: dict[str, float] = {}
        self._taken_gib: dict[str, float] = {}
        self._peak_mapped_bytes = 0  # since the last verb began

    @contextmanager
    def of(self, verb: str) -> Iterator[None]:
        """Measures the work inside and records it under a verb's name."""
        reset_gpu_peak()
        before, mapped = gpu_allocated(), self._mapped_bytes()
        yield
        now = gpu_allocated()
        if before is not None and now is not None:
            self._peak_mapped_bytes = max(mapped, self._mapped_bytes())
            self._peaks[f"gpu_peak_{verb}_gib"] = (now.peak_bytes + self._peak_mapped_bytes) / GIB
            self._taken_gib[verb] = (now.peak_bytes - before.nbytes) / GIB

    def taken_gib(self, verb: str) -> float | None:
        """Returns the verb's peak in GiB above what was allocated before its last call; None without a GPU."""
        return self._taken_gib.get(verb)

    def memory_stats(self) -> dict[str, float]:
        """Returns this process's memory in GiB: now, and `gpu_peak_VERB_gib`, the peak of each verb's last call."""
        return memory_stats(self._mapped_bytes(), self._peak_mapped_bytes) | self._peaks
