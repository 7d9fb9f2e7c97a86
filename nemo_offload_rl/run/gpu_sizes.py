"""Decides all settings that a recipe leaves to the GPUs' memory: resident state, KV cache, start-up, packed rows."""

from collections.abc import Mapping
from typing import Any

from nemo_offload_rl.run.awake_engine import with_awake_engine_here
from nemo_offload_rl.run.engine_build import with_engine_build
from nemo_offload_rl.run.kv_cache import with_kv_cache_bytes
from nemo_offload_rl.run.resident_state import with_resident_state_here
from nemo_offload_rl.run.row_tokens import with_row_tokens_here

# The order matters: resident state leaves less room for packed rows; the KV cache leaves less room for an engine that
# stays awake, and for building the policy at the same time as the engine.
_DECISIONS = (
    with_resident_state_here,
    with_kv_cache_bytes,
    with_awake_engine_here,
    with_engine_build,
    with_row_tokens_here,
)


def fitted_to_gpus(
    config: Mapping[str, Any], algorithm: str, gpu_bytes: int | None
) -> tuple[Mapping[str, Any], list[str]]:
    """Returns the config with every setting decided that the recipe leaves to the GPUs' memory.

    Args:
        config: a validated recipe, resolved for this machine; not modified.
        algorithm: a key of `ALGORITHMS`, the section that marks the recipe.
        gpu_bytes: memory of the smallest GPU; None where that is not known.

    Returns:
        The config that workers and engines get, and a line for the user for each decision.

    Raises:
        HostBudgetError: a rank needs more host memory than the recipe's limit.
        ValueError: the GPU has no room for the KV cache of one sequence, or for a packed row of the longest one.
    """
    lines = []
    for decide in _DECISIONS:
        config, said = decide(config, algorithm, gpu_bytes)
        lines += said
    return config, lines
