"""Defines ways to keep optimizer state off the GPU, as overrides of a recipe, and the models to try them on."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from model_shapes import QWEN2_1_5B, QWEN3_8B

STREAMED = "streamed"
"""The name of the way that others are compared with."""
_STREAM = "++policy.residency.table.train.optimizer_state=streamed"
_OPTIMIZER = "++policy.megatron_cfg.optimizer"


@dataclass(frozen=True)
class Way:
    """Describes a way to step an optimizer.

    Attributes:
        name: of the row.
        overrides: that make a recipe use it.
        fraction: of the parameters that are stepped on the CPU.
        overlap: whether the CPU's steps and copies overlap; None where nothing is stepped there.
    """

    name: str
    overrides: tuple[str, ...] = ()
    fraction: float = 0.0
    overlap: bool | None = None


def _on_cpu(fraction: float, *, overlap: bool) -> Way:
    overrides = (
        f"{_OPTIMIZER}.optimizer_cpu_offload=true",
        f"{_OPTIMIZER}.optimizer_offload_fraction={fraction}",
        f"{_OPTIMIZER}.overlap_cpu_optimizer_d2h_h2d={str(overlap).lower()}",
    )
    return Way(f"CPU {fraction:g}{', overlap' if overlap else ''}", overrides, fraction, overlap)


ON_GPU = (Way("resident"), Way(STREAMED, (_STREAM, "policy.residency.stream_window_mib=512")))
ON_CPU = tuple(_on_cpu(fraction, overlap=overlap) for fraction in (0.5, 1.0) for overlap in (False, True))
WAYS: Mapping[str, Way] = {way.name: way for way in (*ON_GPU, *ON_CPU)}
_GPU_WAYS = tuple(way.name for way in ON_GPU)


@dataclass(frozen=True)
class Case:
    """Describes a model and the batches to train it on.

    Attributes:
        name: of the row.
        hf_config: the model's sizes; its weights are random.
        rows: of a global batch.
        mbs: rows of a micro-batch.
        seq_length: tokens of a row.
        steps: that are measured, after two that are not.
        ways: that are tried.
        overrides: of the recipe.
        environ: of the process.
        larger_mbs: larger micro-batches, which the streamed way tries one after the other until one does not fit.
    """

    name: str
    hf_config: Mapping[str, Any]
    rows: int = 64
    mbs: int = 4
    seq_length: int = 512
    steps: int = 5
    ways: tuple[str, ...] = _GPU_WAYS
    overrides: tuple[str, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    larger_mbs: tuple[int, ...] = ()


_PRECISION_AWARE = "policy.megatron_cfg.optimizer.use_precision_aware_optimizer"
_ALL_LAYERS_AGAIN = (
    "policy.megatron_cfg.activation_checkpointing=true",
    "policy.megatron_cfg.recompute_granularity=full",
    "++policy.megatron_cfg.recompute_method=uniform",
    "++policy.megatron_cfg.recompute_num_layers=1",
)
# Attention's backward pass in a fixed order, so that ways can be compared bit by bit. It is slower, but attention is 2%
# of the FLOPs of the 1.5 B shape's rows of 512 tokens.
_DETERMINISTIC = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
CASES: Mapping[str, Case] = {
    case.name: case
    for case in (
        Case(
            "1.5B, 10 bytes a parameter",
            QWEN2_1_5B,
            ways=tuple(WAYS),
            overrides=(f"{_PRECISION_AWARE}=true",),
            environ=_DETERMINISTIC,
        ),
        Case(
            "1.5B, 12 bytes a parameter", QWEN2_1_5B, overrides=(f"{_PRECISION_AWARE}=false",), environ=_DETERMINISTIC
        ),
        Case(
            "1.5B, deterministic",
            QWEN2_1_5B,
            rows=8,
            steps=18,  # after two others: 20 are compared
            environ=_DETERMINISTIC,
        ),
        Case(
            "8B",
            QWEN3_8B | {"dtype": "bfloat16"},  # in float32 its weights would be made on the CPU, which takes minutes
            rows=8,
            mbs=1,
            seq_length=2048,
            steps=3,
            overrides=_ALL_LAYERS_AGAIN,
            larger_mbs=(2, 4, 8, 16, 32, 64, 128),
        ),
    )
}
