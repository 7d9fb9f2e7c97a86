"""Defines which Megatron options a recipe may use: parts of layers, fields that this package owns, parallel sizes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

OFFLOAD_MODULES_KEY = "policy.megatron_cfg.offload_modules"


LAYER_INPUT = "layer_input"
"""The module that is offloaded with full recomputation, alone or with core_attn; megatron-core does not know it."""

# What `policy.megatron_cfg.offload_modules` may name, and of which saved activations each is. Norms have none where
# Transformer Engine fuses them into the next linear layer.
ACTIVATION_MODULES = (
    LAYER_INPUT,  # the input of each segment of recompute_num_layers layers, with full recomputation
    "attn_norm",  # the input of the norm before attention
    "qkv_linear",  # the input of the query, key and value projections
    "core_attn",  # queries, keys and values, and what the attention kernel keeps
    "attn_proj",  # the input of the output projection; needs core_attn, whose output it is
    "mlp_norm",  # the input of the norm before the MLP
    "expert_fc1",  # the input of the experts' first linear layer
    "moe_act",  # the input of the experts' activation function
    "fused_group_mlp",  # input and intermediates of experts fused by Transformer Engine; instead of the last two
)
EXPERT_MODULES = ("expert_fc1", "moe_act", "fused_group_mlp")
"""Those that only layers with experts have."""


@dataclass(frozen=True)
class DeviceSplit:
    """Counts the devices (GPUs, or processes where there are none) of the policy and of generation.

    Attributes:
        num_nodes: Number of nodes of the cluster.
        per_node: Number of devices of each node.
        num_engine_devices: Number of devices reserved for generation: the last ones of a single node, or all devices of
            the last ones of several nodes; 0 if generation shares the policy's.
    """

    num_nodes: int
    per_node: int
    num_engine_devices: int = 0

    @property
    def policy_nodes(self) -> int:
        """Number of nodes that train."""
        return self.policy_ranks // self.policy_per_node

    @property
    def policy_per_node(self) -> int:
        """Number of devices that train on each of these nodes."""
        return self.per_node - self.num_engine_devices if self.num_nodes == 1 else self.per_node

    @property
    def policy_ranks(self) -> int:
        """Number of devices that train, which are the policy's ranks."""
        return self.num_nodes * self.per_node - self.num_engine_devices

    @property
    def engine_devices_per_node(self) -> int:
        """Number of devices that the engines divide among themselves on each node with generation."""
        return self.num_engine_devices or self.per_node if self.num_nodes == 1 else self.per_node

    @property
    def all_engine_devices(self) -> int:
        """Number of devices that the engines divide among themselves on all nodes."""
        return self.num_engine_devices or self.num_nodes * self.per_node


def engine_replicas(vllm_cfg: Mapping[str, Any]) -> int:
    """Returns how many replicas of the model a vLLM engine has, which divide its experts among all of their GPUs.

    They are vLLM's data-parallel size: it has no expert-parallel size of its own, but takes the product of its tensor-
    and data-parallel sizes.

    Args:
        vllm_cfg: The section `policy.generation.vllm_cfg`.
    """
    return max(1, vllm_cfg["expert_parallel_size"] // vllm_cfg["tensor_parallel_size"])


def engine_devices(vllm_cfg: Mapping[str, Any]) -> int:
    """Returns how many devices a vLLM engine has.

    Args:
        vllm_cfg: The section `policy.generation.vllm_cfg`.
    """
    return int(vllm_cfg["tensor_parallel_size"]) * engine_replicas(vllm_cfg)


def is_colocated(policy: Mapping[str, Any]) -> bool:
    """Returns whether generation shares the policy's devices; also true for a policy without generation."""
    return "generation" not in policy or bool(policy["generation"]["colocated"]["enabled"])


def split_devices(cluster: Mapping[str, Any], policy: Mapping[str, Any]) -> DeviceSplit:
    """Returns the split for the sections `cluster` and `policy` of a validated recipe."""
    colocated = None if is_colocated(policy) else policy["generation"]["colocated"]
    split = checked_split(cluster["gpus_per_node"], cluster["num_nodes"], colocated)
    assert isinstance(split, DeviceSplit), "a rule checks it"
    return split


def checked_split(per_node: int, num_nodes: int, colocated: Mapping[str, Any] | None) -> DeviceSplit | tuple[str, str]:
    """Divides the devices as NeMo-RL does, or says what is wrong with the section.

    Args:
        per_node: `cluster.gpus_per_node`.
        num_nodes: `cluster.num_nodes`.
        colocated: The section `policy.generation.colocated`; None if it is absent.

    Returns:
        The split; or a key of `colocated.resources` and what is wrong with it.
    """
    if colocated is None or colocated["enabled"]:
        return DeviceSplit(num_nodes, per_node)
    gpus, nodes = colocated["resources"]["gpus_per_node"], colocated["resources"]["num_nodes"]
    if num_nodes > 1 and gpus not in (None, per_node):
        return "gpus_per_node", (
            f"is {gpus}, but on a cluster of several nodes generation uses all GPUs of a node; set it to "
            f"cluster.gpus_per_node ({per_node}) or null"
        )
    if num_nodes == 1 and nodes not in (None, 1):
        return "num_nodes", f"is {nodes}, but cluster.num_nodes is 1; set it to null, or raise cluster.num_nodes"
    key, unit, taken, total = (
        ("gpus_per_node", 1, gpus, per_node) if num_nodes == 1 else ("num_nodes", per_node, nodes, num_nodes)
    )
    if taken is None:
        return key, (
            "is missing, but policy.generation.colocated.enabled is false; set it to the part that generation gets, "
            f"below cluster.{key} ({total}), or raise that: the policy needs at least one"
        )
    if taken >= total:
        return key, (
            f"is {taken}, but the policy needs at least one of cluster.{key} ({total}); lower it, or raise "
            f"cluster.{key}"
        )
    return DeviceSplit(num_nodes, per_node, taken * unit)


# megatron-core's defaults, as a recipe writes them. Of the other fields that are read here, absent means null, or what
# the model's own config says.
DEFAULTS: Mapping[str, Any] = {
    "bias_activation_fusion": False,
    "exp_avg_dtype": "float32",
    "exp_avg_sq_dtype": "float32",
    "main_params_dtype": "float32",
    "moe_pad_expert_input_to_capacity": False,
    "pad_buckets_for_high_nccl_busbw": False,
    "param_name_patterns_for_fp32_local_accumulation": (),
    "store_param_remainders": True,
    "use_transformer_engine_op_fuser": False,
}


def megatron_field(section: Mapping[str, Any], name: str) -> Any:
    """Returns a field of a section; where it is absent or null, megatron-core's default, or None.

    Args:
        section: the recipe's `policy.megatron_cfg`, or its `optimizer` or `distributed_data_parallel_config`.
        name: the field.
    """
    value = section[name] if name in section else None
    return DEFAULTS[name] if value is None and name in DEFAULTS else value


GRAPH_MODULES_KEY = "policy.megatron_cfg.cuda_graph_modules"
GRAPH_IMPL_KEY = "policy.megatron_cfg.cuda_graph_impl"

# What `policy.megatron_cfg.cuda_graph_modules` may name, and what each captures.
GRAPH_MODULES = (
    "attn",  # the norm before attention, and attention
    "mlp",  # the norm before the MLP, and the MLP, of dense layers
    "moe_router",  # the norm before the experts, and the router, of mixture-of-experts layers
    "moe_preprocess",  # the preparation of the tokens' exchange; needs moe_router
)

# Variables with the settings of torch's allocator; if both are set, the second counts.
ALLOCATOR_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def check_graph_environment(environ: Mapping[str, str]) -> None:
    """Refuses settings with which a graph replay reads memory that NCCL registered and torch has since unmapped.

    Expandable segments map memory anew, and a replay then reads what NCCL registered: illegal memory accesses.

    Args:
        environ: the process's environment.

    Raises:
        ValueError: expandable segments without NCCL_GRAPH_REGISTER=0.
    """
    settings = {name: environ.get(name, "").replace(" ", "").lower() for name in ALLOCATOR_SETTINGS}
    name = next((name for name, text in settings.items() if "expandable_segments:true" in text), None)
    if name is None or environ.get("NCCL_GRAPH_REGISTER") == "0":
        return
    found = f"it is {environ['NCCL_GRAPH_REGISTER']}" if "NCCL_GRAPH_REGISTER" in environ else "it is not set"
    raise ValueError(
        f"{name} has expandable_segments:True, with which CUDA graphs ({GRAPH_IMPL_KEY}) need NCCL_GRAPH_REGISTER=0 in "
        f"the environment, but {found}; set it to 0, or remove expandable_segments from {name}."
    )


def num_interleaved(least: int, num_stages: int, group_size: int) -> int:
    """Returns the smallest number of micro-batches, from `least` on, that the schedule of virtual stages takes.

    They are scheduled in groups, and each group must keep all pipeline stages busy, the last one too
    (core pipeline_parallel/schedules.py, `forward_backward_pipelining_with_interleaving`).

    Args:
        least: micro-batches that a rank has.
        num_stages: the pipeline-parallel size.
        group_size: microbatch_group_size_per_vp_stage, at least `num_stages`.
    """
    number = max(least, group_size)
    in_last_group = number % group_size
    return number + num_stages - in_last_group if 0 < in_last_group < num_stages else number


def exchanges_weights(megatron_cfg: Mapping[str, Any]) -> bool:
    """Returns whether ranks exchange weights in an export, of which each has a part."""
    kinds = ("tensor_model", "pipeline_model", "expert_model", "expert_tensor")
    return any(megatron_cfg[f"{kind}_parallel_size"] > 1 for kind in kinds)


MLP_TILES_KEY = "policy.megatron_cfg.mlp_tile_tokens"
# The least tile of `auto`. A tile's weight gradients are added up in float32, which moves as many bytes for a small
# tile as for a large one: by calculation, on an H100 2% of the time of its products at this size, 20% at 1,536 tokens.
_LEAST_AUTO_TOKENS = 16_384


def tokens_of_tile(value: int | Literal["auto"] | None, hidden_size: int) -> int | None:
    """Returns the number of tokens of a tile; None if MLPs are not tiled.

    Args:
        value: `policy.megatron_cfg.mlp_tile_tokens`. `auto` is the rule of Arctic Long Sequence Training, the hidden
            size, from a size on at which tiles cost little.
        hidden_size: the model's hidden size.
    """
    return max(hidden_size, _LEAST_AUTO_TOKENS) if value == "auto" else value


_SIZES: Mapping[str, Any] = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": 1,
    "sequence_parallel": False,
    "num_layers_in_first_pipeline_stage": None,
    "num_layers_in_last_pipeline_stage": None,
    "moe_token_dispatcher_type": "alltoall",  # `flex` asserts that several ranks share the experts
}
_DEFAULT = frozenset(
    {
        "account_for_embedding_in_pipeline_split",
        "account_for_loss_in_pipeline_split",
        "pipeline_model_parallel_layout",
        "overlap_p2p_comm",
        "batch_p2p_comm",
        "moe_enable_deepep",
        "moe_flex_dispatcher_backend",
        "moe_shared_expert_overlap",
    }
)
"""Fields that get megatron-core's default."""


def on_one_rank(megatron_cfg: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a `policy.megatron_cfg` whose model has the same weights, all of them on one rank."""
    return {key: value for key, value in megatron_cfg.items() if key not in _DEFAULT} | dict(_SIZES)


# Keys of policy.megatron_cfg whose product is the number of ranks of a model replica, and of a replica of the experts.
REPLICA_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
EXPERT_REPLICA_SIZES = ("expert_model_parallel_size", "expert_tensor_parallel_size", "pipeline_model_parallel_size")


def data_parallel_size(world_size: int, *sizes: int) -> int | None:
    """Returns the number of replicas on the ranks; None if their number is no multiple of the sizes' product."""
    replicas, rest = divmod(world_size, math.prod(sizes))
    return None if rest else replicas
