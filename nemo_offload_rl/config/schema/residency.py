"""The section `policy.residency`: where training state lives between phases, and what host memory it may take."""

from typing import Annotated, Literal, NotRequired, TypedDict

from pydantic import Discriminator, Tag, with_config

from nemo_offload_rl.config.schema.value_types import (
    ONE,
    STRICT,
    WORD,
    Auto,
    PositiveGib,
    PositiveInt,
    section_or_word,
)


@with_config(STRICT)
class PhaseCells(TypedDict):
    """Section `policy.residency.table.NAME`: cells of one phase that differ from what the defaults and flags say."""

    # The model's parameters: gpu, host or keep (wherever they are). train, logprob and refit compute with them, so
    # only generate may differ from gpu; there auto, too: with vLLM gpu where the plan has room for them beside it, else
    # host. Recommended: auto in generate. Absent: gpu; in generate auto.
    params: NotRequired[Literal["gpu", "host", "keep", "auto"]]
    # The gradient buffers: gpu, dropped (given back, and zeroed when they return) or keep. Absent: dropped; in train
    # gpu.
    grads: NotRequired[Literal["gpu", "dropped", "keep"]]
    # Moments and fp32 master weights: gpu, host or keep. In train gpu, or streamed: they are made on the host, stay
    # there, and pass through a window of GPU memory in each step; then they are never gpu elsewhere. In generate auto,
    # too, which decides refit as well: with vLLM keep where the plan has room for them beside it, else what
    # offload_optimizer_for_refit says. Absent: gpu in train; what offload_optimizer_for_refit (refit, generate) and
    # offload_optimizer_for_logprob (logprob) say.
    optimizer_state: NotRequired[Literal["gpu", "host", "keep", "streamed", "auto"]]
    # The reference policy's weights, which are swapped in for their log-probs. Only host. Absent: host.
    reference_weights: NotRequired[Literal["host"]]


@with_config(STRICT)
class ResidencyTable(TypedDict):
    """Section `policy.residency.table`: for each phase, what overrides the residency table."""

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

    # Compare a checksum of everything that moves before it leaves and after it is back, and stop where they differ.
    # Recommended: false; true to look for a fault, since it reads all state at every move. Absent: false.
    verify: NotRequired[bool]
    # Ask the kernel for 2 MiB pages under the page-locked host buffers: no less exact, and sooner ready (18 GB in 0.9 s
    # for 1.4 s on an H200).
    # Recommended: true; false where the kernel is slow to find them. Absent: true.
    huge_pages: NotRequired[bool]
    # Most host memory that one rank may take for everything that moves, in GiB. Above 0; null for what the machine and
    # its cgroup have free, shared by the ranks of a host. Recommended: null. Absent: null.
    host_memory_limit_gib: NotRequired[PositiveGib | None]
    # GPU memory that streamed optimizer state passes through, in MiB; read only with table.train.optimizer_state
    # streamed. 1 or more; recommended 512: less slows the copies, more shortens the step by hardly anything.
    # Absent: 512.
    stream_window_mib: NotRequired[PositiveInt]
    # Where vLLM's weights are while the policy computes on the GPUs that both share: discard (vLLM sleeps, their memory
    # is given back, and the next refit brings them), host (it sleeps, and they wait in host memory, 2 bytes a parameter
    # of each engine, so that a generation from a policy that has not changed, as in the step behind a validation, needs
    # no refit) or gpu (vLLM does not sleep: weights and KV cache stay, and nothing moves between training and
    # generation). null: with vllm gpu where the plan has room for it beside training and log-prob passes, else discard;
    # with transformers, which cannot discard them, host. Recommended: null. Absent: null.
    generation_weights: NotRequired[Literal["discard", "host", "gpu"] | None]
    # Single cells that differ, such as {generate: {params: keep}}; {} or null for none. Recommended: {}. Absent: null.
    table: NotRequired[ResidencyTable | None]


# As a recipe may write it; where absent keys are resolved, auto becomes the section.
ResidencyOrAuto = Annotated[
    Annotated[ResidencyConfig, Tag(ONE)] | Annotated[Auto, Tag(WORD)], Discriminator(section_or_word)
]
