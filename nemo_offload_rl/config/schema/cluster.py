"""The section `cluster`: the nodes and GPUs of the run."""

from typing import Annotated, NotRequired, TypedDict

from pydantic import with_config

from nemo_offload_rl.config.schema.value_types import STRICT, IfAbsent, NonNegativeInt, Port, PositiveInt


@with_config(STRICT)
class ClusterConfig(TypedDict):
    """Section `cluster`."""

    # GPUs of each node; without GPUs, the ranks (processes) of each node. 1 or more.
    gpus_per_node: PositiveInt
    # Number of nodes. 1 or more.
    num_nodes: PositiveInt
    # Lowest port for the rendezvous of the ranks, and of an engine's processes. 1024 to 65535. Absent: any free port.
    master_port_range_low: NotRequired[Port]
    # Highest port for the rendezvous of the ranks, and of an engine's processes. 1024 to 65535. Absent: any free port.
    master_port_range_high: NotRequired[Port]
    # Number of consecutive nodes that must be in one NVLink domain, according to their Ray label nvidia.com/gpu.clique.
    # 1 or more, a divisor of num_nodes; null and 1 require nothing.
    segment_size: NotRequired[Annotated[PositiveInt | None, IfAbsent(None)]]
    # How many times a run restarts by itself from its newest checkpoint after it lost a process or a node; above 0 it
    # needs checkpointing.enabled and checkpointing.save_optimizer. 0 or more.
    max_restarts: NotRequired[Annotated[NonNegativeInt, IfAbsent(0)]]
