"""The sections `policy.residency` and `policy.activation_offload`: what is offloaded when, and its host memory."""

from typing import TYPE_CHECKING, Annotated, Literal, NotRequired, TypedDict

from pydantic import Discriminator, Tag, with_config

from nemo_offload_rl.config.schema.value_types import (
    ONE,
    STRICT,
    WORD,
    Auto,
    IfAbsent,
    PositiveGib,
    PositiveInt,
    section_or_word,
)


@with_config(STRICT)
class PhaseCells(TypedDict):
    """Section `policy.residency.table.NAME`: the cells of one phase that differ from the defaults and flags."""

    # The model's parameters: gpu, host or keep (wherever they are). train, logprob and refit compute with them, so only
    # generate may differ from gpu. generate also accepts auto: with vLLM, gpu if the plan has room for them next to
    # vLLM, otherwise host. Recommended: auto in generate. Absent: gpu; in generate auto.
    params: NotRequired[Literal["gpu", "host", "keep", "auto"]]
    # The gradient buffers: gpu, dropped (freed, and zeroed when they are allocated again) or keep. Absent: dropped; in
    # train gpu.
    grads: NotRequired[Literal["gpu", "dropped", "keep"]]
    # Moments and fp32 master weights: gpu, host or keep. In train gpu, or streamed: the state is created in host
    # memory, stays there, and passes through a window of GPU memory in each step; then no other phase may have gpu.
    # generate also accepts auto, which decides for refit as well: with vLLM, keep if the plan has room for the state
    # next to vLLM, otherwise what offload_optimizer_for_refit says. Absent: gpu in train; elsewhere what
    # offload_optimizer_for_refit (refit, generate) and offload_optimizer_for_logprob (logprob) say.
    optimizer_state: NotRequired[Literal["gpu", "host", "keep", "streamed", "auto"]]
    # The reference policy's weights, which are swapped in for its log-probs. Must be host. Absent: host.
    reference_weights: NotRequired[Literal["host"]]


@with_config(STRICT)
class ResidencyTable(TypedDict):
    """Section `policy.residency.table`: overrides of the residency table for each phase."""

    # While the policy is trained. Absent: no override.
    train: NotRequired[PhaseCells]
    # During log-prob passes. Absent: no override.
    logprob: NotRequired[PhaseCells]
    # While weights are sent to generation. Absent: no override.
    refit: NotRequired[PhaseCells]
    # While generation has the GPU. Absent: no override.
    generate: NotRequired[PhaseCells]


@with_config(STRICT)
class ResidencyConfig(TypedDict):
    """Section `policy.residency`."""

    # Compare checksums of all state that moves, before it leaves the GPU and after it is back, and stop if they differ.
    # Recommended: false; true for debugging, since it reads all state at every move.
    verify: NotRequired[Annotated[bool, IfAbsent(False)]]
    # Ask the kernel for 2 MiB pages for the pinned host buffers: the data are the same, and pinning is faster (18 GB in
    # 0.9 s instead of 1.4 s on an H200). Recommended: true; false where the kernel is slow to find huge pages.
    huge_pages: NotRequired[Annotated[bool, IfAbsent(True)]]
    # Largest host memory that one rank may take for everything that moves, in GiB. Above 0; null for the free memory of
    # the machine and its cgroup, shared by the ranks of a host. Recommended: null.
    host_memory_limit_gib: NotRequired[Annotated[PositiveGib | None, IfAbsent(None)]]
    # GPU memory that streamed optimizer state passes through, in MiB; read only with table.train.optimizer_state
    # streamed. 1 or more; recommended 512: a smaller window slows the copies, a larger one hardly shortens the step.
    stream_window_mib: NotRequired[Annotated[PositiveInt, IfAbsent(512)]]
    # Where vLLM keeps its weights while the policy computes on shared GPUs: discard (vLLM sleeps and frees their
    # memory, and the next refit brings them back), host (vLLM sleeps, and the weights wait in host memory, 2 bytes per
    # parameter of each engine, so that generating again with an unchanged policy, as in the step after a validation,
    # needs no refit) or gpu (vLLM does not sleep: weights and KV cache stay, and nothing moves between training and
    # generation). null: with vllm, gpu if the plan has room for it next to training and log-prob passes, otherwise
    # discard; with transformers, which cannot discard them, host. Recommended: null.
    generation_weights: NotRequired[Annotated[Literal["discard", "host", "gpu"] | None, IfAbsent(None)]]
    # Overrides of single cells, such as {generate: {params: keep}}; {} or null for none. Recommended: {}.
    table: NotRequired[Annotated[ResidencyTable | None, IfAbsent(None)]]


# The type that a recipe may write; config.keys.tree replaces auto by the section, which is what readers see.
if TYPE_CHECKING:
    ResidencyOrAuto = ResidencyConfig
else:
    ResidencyOrAuto = Annotated[
        Annotated[ResidencyConfig, Tag(ONE)] | Annotated[Auto, Tag(WORD)], Discriminator(section_or_word)
    ]


@with_config(STRICT)
class ActivationOffloadConfig(TypedDict):
    """Section `policy.activation_offload`; read only with `policy.megatron_cfg.fine_grained_activation_offloading`."""

    # Stop the run after its first step if a module of offload_modules freed no GPU memory there, instead of logging a
    # warning with the reason. Recommended: false; true in tests and where the run depends on that memory.
    strict: NotRequired[Annotated[bool, IfAbsent(False)]]
    # Pinned host memory for activations that each rank allocates at its start, all at once, in GiB; it is a part of
    # policy.residency's host_memory_limit_gib. Activations that do not fit stay on the GPU. Above 0; null for the size
    # that the plan computes. Recommended: null.
    host_memory_limit_gib: NotRequired[Annotated[PositiveGib | None, IfAbsent(None)]]
