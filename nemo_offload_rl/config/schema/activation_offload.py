"""The section `policy.activation_offload`: settings of activation offloading for which megatron-core has no key."""

from typing import Annotated, NotRequired, TypedDict

from pydantic import with_config

from nemo_offload_rl.config.schema.value_types import STRICT, IfAbsent, PositiveGib


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
