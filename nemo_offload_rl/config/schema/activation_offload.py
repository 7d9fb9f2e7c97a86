"""The section `policy.activation_offload`: what megatron-core has no key for."""

from typing import NotRequired, TypedDict

from pydantic import with_config

from nemo_offload_rl.config.schema.value_types import STRICT, PositiveGib


@with_config(STRICT)
class ActivationOffloadConfig(TypedDict):
    """Section `policy.activation_offload`; read only with `policy.megatron_cfg.fine_grained_activation_offloading`."""

    # Stop after the first step where a module of offload_modules freed no GPU memory, instead of warning why.
    # Recommended: false; true in tests and where the memory is counted on. Absent: false.
    strict: NotRequired[bool]
    # Host memory that one rank page-locks for activations at its start, all of it, in GiB, within policy.residency's
    # host_memory_limit_gib; what does not fit stays on the GPU. Above 0; null for what the plan says.
    # Recommended: null. Absent: as null.
    host_memory_limit_gib: NotRequired[PositiveGib | None]
