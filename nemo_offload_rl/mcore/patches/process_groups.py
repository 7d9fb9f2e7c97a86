"""Clears megatron-core's globals that outlive its process groups, and shuts torch's groups down faster."""

from concurrent.futures import ThreadPoolExecutor

import torch
from megatron.core import parallel_state as mpu
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding


def clear_globals() -> None:
    """Clear globals that `destroy_model_parallel` leaves, which would keep process groups, the store and its port."""
    for name, value in vars(mpu).items():  # it leaves two
        if isinstance(value, torch.distributed.ProcessGroup):
            setattr(mpu, name, None)
    for rope in (RotaryEmbedding, YarnRotaryEmbedding):  # their caches hold the instances
        rope.forward.cache_clear()


def shut_down_groups_at_once() -> None:
    """Shut all groups of a single-rank run down in parallel, before `destroy_process_group`.

    NCCL takes 0.5 s to end a communicator, and torch ends one after the other. With several ranks torch's order is
    kept: some versions of NCCL end a communicator on all of its ranks together.
    """
    groups = list(torch.distributed.distributed_c10d._world.pg_names)
    with ThreadPoolExecutor(len(groups)) as threads:
        list(threads.map(lambda group: group.shutdown(), groups))
