"""Puts the residency engine on one rank: its NUMA node, then the host's budget, then pinned memory, then the engine."""

import logging

import torch

from nemo_offload_rl.mcore.build import TrainingState
from nemo_offload_rl.offload.attach import Engine, attach, needed_host_bytes
from nemo_offload_rl.offload.pinned_arena import PinnedArena
from nemo_offload_rl.offload.site import Options
from nemo_offload_rl.offload.types import Target
from nemo_offload_rl.placement.gpus import torch_pci_bus_id
from nemo_offload_rl.placement.machine import host_facts
from nemo_offload_rl.placement.numa import Binding, bind_process
from nemo_offload_rl.plan.host_budget import RankNeed, check_host_budget, usable_bytes
from nemo_offload_rl.plan.plan import OffloadPlan

logger = logging.getLogger(__name__)


def bind_to_gpu(numa: str | int, *, rank: int, local_rank: int) -> Binding:
    """Put this process near its GPU; before it allocates what should be near, too.

    Args:
        numa: "auto", "none" or the number of a node.
        rank: for the log.
        local_rank: the GPU, as torch numbers them.

    Raises:
        ValueError: there is no such node.
    """
    binding = bind_process(numa, torch_pci_bus_id(local_rank) if torch.cuda.is_available() else None)
    logger.info("rank %d: %s", rank, binding.note)
    return binding


def make_engine(state: TrainingState, plan: OffloadPlan, *, node: int | None, keep_reference: bool) -> Engine:
    """Attach the engine to a rank's model and optimizer; collective over all ranks.

    Args:
        state: model and optimizer, on their device.
        plan: what the recipe asks for.
        node: the NUMA node whose memory is preferred.
        keep_reference: whether the weights of now are kept as the reference policy.

    Raises:
        HostBudgetError: on every rank alike, where some host cannot hold what its ranks need; nothing has been pinned.
        ValueError: see `attach`.
    """
    options = Options(pinned_optimizer_state=plan.pinned, verify=plan.verify, keep_reference=keep_reference)
    need = needed_host_bytes(state.model, state.optimizer, table=plan.table, options=options)
    _require_host_memory(need, plan.host_memory_limit_bytes)
    arena = PinnedArena(numa_node=node, huge_pages=plan.huge_pages)
    return attach(state.model, state.optimizer, arena, table=plan.table, options=options)


def _require_host_memory(need: dict[Target, int], limit_bytes: int | None) -> None:
    """Every rank learns what all ranks need and what their hosts have, and comes to the same answer."""
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    facts = host_facts()
    everybody = [(RankNeed(rank, facts.hostname, need), facts)] * world_size
    torch.distributed.all_gather_object(everybody, everybody[rank])
    # The least that any rank of a host sees: containers of one host may have limits of their own.
    hosts = {facts.hostname: facts for _, facts in sorted(everybody, key=lambda pair: -usable_bytes(pair[1]))}
    check_host_budget([need for need, _ in everybody], hosts, limit_bytes)
