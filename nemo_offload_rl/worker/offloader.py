"""Sets up the residency offloader of one rank: NUMA binding, host-memory budget, pinned memory, then the offloader."""

import contextlib
import dataclasses
import logging
from collections.abc import Mapping, Sequence

import torch

from nemo_offload_rl.mcore.build import TrainingState
from nemo_offload_rl.mcore.graphs.cuda_graphs import CudaGraphs, NoCudaGraphs, StepGraphs
from nemo_offload_rl.mcore.graphs.graph_capture import CaptureObserver
from nemo_offload_rl.mcore.optimizer.cpu_optimizer import cpu_optimizers, take_host_memory
from nemo_offload_rl.memory.numa import Binding, bind_process
from nemo_offload_rl.memory.pinned import PinnedArena
from nemo_offload_rl.placement.gpus import torch_pci_bus_id
from nemo_offload_rl.placement.machine import HostFacts, host_facts
from nemo_offload_rl.plan.host_budget import CPU_OPTIMIZER, RankNeed, check_host_budget, usable_bytes
from nemo_offload_rl.plan.plan import OffloadPlan
from nemo_offload_rl.residency.attach import Offloader, attach, needed_host_bytes
from nemo_offload_rl.residency.context import Options
from nemo_offload_rl.residency.table import Target

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
    on_cpu = sum(optimizer.host_bytes for optimizer in cpu_optimizers(state.optimizer))
    fixed_bytes = {**fixed_bytes, **({CPU_OPTIMIZER: on_cpu} if on_cpu else {})}
    _require_host_memory(need, fixed_bytes, plan.host_memory_limit_bytes)
    with contextlib.ExitStack() as undo:
        undo.callback(take_host_memory(state.optimizer, arena))
        for optimizer in cpu_optimizers(state.optimizer):
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
