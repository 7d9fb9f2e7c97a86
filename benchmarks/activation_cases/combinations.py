"""Chooses the combinations of settings to compare with plain runs: single factors, then pairs of factors."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

MicroBatches = Literal["1", "4", "changing"]
Levels = Mapping[str, Sequence[Any]]

ATTENTION = ("qkv_linear", "core_attn", "attn_proj")
EXPERTS = ("expert_fc1", "moe_act")
NORMS = ("attn_norm", "mlp_norm")
ALL_OF_DENSE = ("attn_norm", *ATTENTION, "mlp_norm")
ALL_OF_MOE = (*ALL_OF_DENSE, *EXPERTS)


@dataclass(frozen=True)
class Combination:
    """Holds the settings of one run; its plain run has the same model and batches and none of the other settings.

    Attributes:
        model: a recipe beside this module.
        modules: offloaded; none is a plain run.
        fraction: of them that is offloaded.
        graphs: parts of a layer that are captured.
        delay: delay_offload_until_cuda_graph.
        micro_batches: of a step; "changing" is 2 to 6, another number in each step.
        packed: rows are packed, with other lengths in each step.
        phases: log-probs and all phases come between the steps.
        recompute: modules recomputed.
        op_fuser: use_transformer_engine_op_fuser, which fused_group_mlp needs.
        parallel: name of a layout over several GPUs; "one GPU" otherwise.
        extra: overrides of the layout.
    """

    model: str
    modules: tuple[str, ...] = ()
    fraction: float = 1.0
    graphs: tuple[str, ...] = ()
    delay: bool = False
    micro_batches: MicroBatches = "4"
    packed: bool = False
    phases: bool = False
    recompute: tuple[str, ...] = ()
    op_fuser: bool = False
    parallel: str = "one GPU"
    extra: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Returns the name that tells it from the others."""
        words = [self.model, "+".join(self.modules) or "plain"]
        words += [f"fraction={self.fraction:g}"] if self.fraction != 1 else []
        words += [f"graphs={'+'.join(self.graphs)}"] if self.graphs else []
        words += ["delay"] if self.delay else []
        words += [f"micro_batches={self.micro_batches}{'-packed' if self.packed else ''}"]
        words += ["phases"] if self.phases else []
        words += [f"recompute={'+'.join(self.recompute)}"] if self.recompute else []
        words += ["op_fuser"] if self.op_fuser else []
        words += [self.parallel.replace(" ", "_")] if self.parallel != "one GPU" else []
        return "/".join(words)

    def plain(self) -> "Combination":
        """Returns the run that it has to be equal to."""
        return replace(self, modules=(), fraction=1.0, graphs=(), delay=False, phases=False)

    def overrides(self) -> list[str]:
        """Returns the overrides of its recipe."""
        megatron = "policy.megatron_cfg"
        found = list(self.extra)
        if self.modules:
            found += [
                f"{megatron}.fine_grained_activation_offloading=true",
                f"{megatron}.offload_modules=[{','.join(self.modules)}]",
                f"{megatron}.activation_offload_fraction={self.fraction}",
            ]
        if self.graphs:
            found += [
                f"{megatron}.cuda_graph_impl=transformer_engine",
                f"{megatron}.cuda_graph_modules=[{','.join(self.graphs)}]",
            ]
        if self.delay:
            found.append(f"{megatron}.delay_offload_until_cuda_graph=true")
        if self.packed:
            found.append("policy.sequence_packing.enabled=true")
        if self.recompute:
            found += [
                f"{megatron}.activation_checkpointing=true",
                f"{megatron}.recompute_granularity=selective",
                f"{megatron}.recompute_modules=[{','.join(self.recompute)}]",
            ]
        if self.op_fuser:
            found.append(f"+{megatron}.use_transformer_engine_op_fuser=true")
        return found


# The first level of each factor is the base.
_SHARED: Levels = {
    "fraction": [1.0, 0.5, 0.0],
    "micro_batches": ["4", "1", "changing"],
    "phases": [False, True],
}
ONE_AT_A_TIME: Mapping[str, Levels] = {
    "tiny_dense": {
        "modules": [
            ATTENTION,
            ("qkv_linear",),
            ("core_attn",),
            ("core_attn", "attn_proj"),
            ("attn_norm",),
            ("mlp_norm",),
            ALL_OF_DENSE,
        ],
        "graphs": [(), ("attn",), ("attn", "mlp")],
        "delay": [False],  # holds copies of experts back
        "recompute": [(), ("mlp",), ("layernorm",)],
        **_SHARED,
    },
    "tiny_moe": {
        "modules": [
            EXPERTS,
            ("expert_fc1",),
            ("moe_act",),
            ("qkv_linear",),
            ("core_attn",),
            ("core_attn", "attn_proj"),
            ATTENTION,
            ("attn_norm",),
            ("mlp_norm",),
            ALL_OF_MOE,
        ],
        "graphs": [(), ("attn", "moe_router"), ("moe_router",)],
        "delay": [False, True],
        "recompute": [(), ("layernorm",), ("moe_act",)],
        **_SHARED,
    },
}
PAIRWISE: Mapping[str, Levels] = {
    "tiny_dense": {
        **ONE_AT_A_TIME["tiny_dense"],
        "modules": [ATTENTION, ("qkv_linear",), ("core_attn", "attn_proj"), ALL_OF_DENSE],
    },
    "tiny_moe": {**ONE_AT_A_TIME["tiny_moe"], "modules": [EXPERTS, ("moe_act",), (*ATTENTION, *EXPERTS), ALL_OF_MOE]},
}


def are_allowed(values: Mapping[str, Any]) -> bool:
    """Returns whether validation accepts these levels together; `REFUSED` has each refused combination once."""
    graphs, modules = values["graphs"], values["modules"]
    if values["delay"] and not graphs:
        return False
    if "attn" in graphs and "attn_norm" in modules:
        return False
    at_edge = "moe_router" in graphs or ("attn" in graphs and "mlp" not in graphs)
    return not (at_edge and "mlp_norm" in modules)


def single_gpu() -> list[Combination]:
    """Returns a control of each model that offloads nothing, then single factors, then the pairs, each once."""
    found: list[Combination] = []
    for model, levels in ONE_AT_A_TIME.items():
        found.append(Combination(model))
        found += [_combination(model, values) for values in one_at_a_time(levels)]
        found += [_combination(model, values) for values in pairwise(PAIRWISE[model], are_allowed)]
    found.append(Combination("tiny_moe", ("fused_group_mlp",), op_fuser=True))
    sizes = ("policy.train_micro_batch_size=1",)
    found.append(Combination("dense", ATTENTION, micro_batches="changing", packed=True, extra=sizes))
    return list(dict.fromkeys(found))


def one_at_a_time(levels: Levels) -> Iterator[dict[str, Any]]:
    """Returns the base, and the base with another level of one factor; a delay comes with graphs."""
    base = {name: choices[0] for name, choices in levels.items()}
    yield base
    for name, choices in levels.items():
        for choice in choices[1:]:
            changed = base | {name: choice}
            yield changed | {"graphs": levels["graphs"][1]} if name == "delay" else changed


def pairwise(levels: Levels, allowed: Callable[[Mapping[str, Any]], bool]) -> list[dict[str, Any]]:
    """Returns few rows in which all pairs of levels of two factors meet, as far as rows with them are allowed.

    Greedily takes the allowed row with the most new pairs; of several, the first in the order of the levels.
    """
    rows = [dict(zip(levels, values, strict=True)) for values in itertools.product(*levels.values())]
    pairs_of = [frozenset(itertools.combinations(row.items(), 2)) for row in rows]
    candidates = [index for index, row in enumerate(rows) if allowed(row)]
    missing = set().union(*(pairs_of[index] for index in candidates))
    chosen = []
    while missing:
        best = max(candidates, key=lambda index: (len(pairs_of[index] & missing), -index))
        missing -= pairs_of[best]
        chosen.append(rows[best])
    return chosen


def _combination(model: str, values: Mapping[str, Any]) -> Combination:
    """Changing micro-batches are packed, unless captured attention takes padded rows.

    Packed rows of a step with graphs are padded to all of their tokens; then those of its plain run are, too.
    """
    packed = values["micro_batches"] == "changing" and "attn" not in values["graphs"]
    whole_rows = "policy.sequence_packing.sequence_length_round=${policy.sequence_packing.train_mb_tokens}"
    return Combination(model, packed=packed, extra=(whole_rows,) if packed and values["graphs"] else (), **values)


LAYOUTS: Mapping[str, tuple[int, Combination]] = {
    "dp2": (2, Combination("tiny_dense", ATTENTION, micro_batches="changing", packed=True)),
    "tp2": (
        2,
        Combination(
            "tiny_dense",
            ATTENTION,
            extra=(
                "policy.megatron_cfg.tensor_model_parallel_size=2",
                "policy.megatron_cfg.sequence_parallel=true",
                "policy.make_sequence_length_divisible_by=2",
            ),
        ),
    ),
    "pp2": (
        2,
        Combination(
            "tiny_dense",
            ATTENTION,
            micro_batches="changing",
            packed=True,  # on a pipeline it comes with variable_seq_lengths
            extra=("policy.megatron_cfg.pipeline_model_parallel_size=2",),
        ),
    ),
    "pp2_vpp2": (
        2,
        Combination(
            "tiny_dense",
            ATTENTION,
            extra=(
                "policy.megatron_cfg.pipeline_model_parallel_size=2",
                "+policy.megatron_cfg.virtual_pipeline_model_parallel_size=2",
            ),
        ),
    ),
    "ep2": (
        2,
        Combination(
            "tiny_moe",
            ALL_OF_MOE,
            micro_batches="changing",
            packed=True,
            extra=("policy.megatron_cfg.expert_model_parallel_size=2",),
        ),
    ),
}
"""Name of a layout: number of GPUs and what runs on them."""


def several_gpus() -> dict[str, tuple[int, Combination]]:
    """Returns the layouts, each under its combination's name."""
    found = {}
    for layout, (num_gpus, combination) in LAYOUTS.items():
        extra = (*combination.extra, f"cluster.gpus_per_node={num_gpus}")
        named = replace(combination, parallel=layout, extra=extra)
        found[named.name] = num_gpus, named
    return found


REFUSED: Mapping[str, Combination] = {
    "attn_proj alone": Combination("tiny_dense", ("attn_proj",)),
    "packed rows with attn captured": Combination("tiny_dense", ATTENTION, graphs=("attn",), packed=True),
    "packed rows with mlp captured": Combination("tiny_dense", ATTENTION, graphs=("mlp",), packed=True),
    "attn captured in rows of 192 tokens": Combination(
        "tiny_dense", ATTENTION, graphs=("attn",), extra=("policy.max_total_sequence_length=192",)
    ),
    "attention moved inside graphs of a pipeline": Combination(
        "tiny_dense",
        ATTENTION,
        graphs=("attn",),
        extra=("policy.megatron_cfg.pipeline_model_parallel_size=2", "cluster.gpus_per_node=2"),
    ),
    "graphs in float32": Combination(
        "tiny_dense",
        ATTENTION,
        graphs=("attn",),
        extra=("policy.precision=float32", "policy.megatron_cfg.optimizer.bf16=false"),
    ),
    "packed rows with graphs of a pipeline": Combination(
        "tiny_moe",
        EXPERTS,
        graphs=("moe_router",),
        packed=True,
        extra=("policy.megatron_cfg.pipeline_model_parallel_size=2", "cluster.gpus_per_node=2"),
    ),
    "moe captured": Combination("tiny_moe", EXPERTS, graphs=("moe",)),
    "delay without graphs": Combination("tiny_moe", EXPERTS, delay=True),
    "experts that drop tokens, moved beside graphs": Combination(
        "tiny_moe",
        EXPERTS,
        graphs=("attn", "moe_router"),
        extra=("+policy.megatron_cfg.moe_expert_capacity_factor=1.0",),
    ),
    "core_attn recomputed, too": Combination("tiny_dense", ATTENTION, recompute=("core_attn",)),
    "moe recomputed around its modules": Combination("tiny_moe", EXPERTS, recompute=("moe",)),
    "fraction above 1": Combination("tiny_dense", ATTENTION, fraction=1.5),
    "layers recomputed": Combination(
        "tiny_dense",
        ATTENTION,
        extra=("policy.megatron_cfg.activation_checkpointing=true", "policy.megatron_cfg.recompute_granularity=full"),
    ),
}
"""What cannot be right, or would mean nothing: validation has to refuse it."""
