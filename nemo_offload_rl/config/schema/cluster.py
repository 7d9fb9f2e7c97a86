"""The section `cluster`: the machines of the run."""

from typing import NotRequired, TypedDict

from pydantic import with_config

from nemo_offload_rl.config.schema.value_types import STRICT, NonNegativeInt, Port, PositiveInt


@with_config(STRICT)
class ClusterConfig(TypedDict):
    """Section `cluster`."""

    # GPUs of each node; where there is no GPU, the ranks (processes) of each node. 1 or more.
    gpus_per_node: PositiveInt
    # Nodes. 1 or more.
    num_nodes: PositiveInt
    # First port that the ranks may meet at. 1024 to 65535. Absent: any free port.
    master_port_range_low: NotRequired[Port]
    # Last port that the ranks may meet at. 1024 to 65535. Absent: any free port.
    master_port_range_high: NotRequired[Port]
    # Consecutive nodes that have to be of one NVLink domain, by the nodes' Ray label nvidia.com/gpu.clique. 1 or more,
    # a divisor of num_nodes; null and 1 ask for nothing. Absent: null.
    segment_size: NotRequired[PositiveInt | None]
    # How often a run goes on by itself, from its newest checkpoint, after a process or a node was lost. 0 or more.
    # Absent: 0.
    max_restarts: NotRequired[NonNegativeInt]
