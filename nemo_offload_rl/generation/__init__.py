"""Generation engines: sampling from the policy's current weights."""

from collections.abc import Callable, Mapping
from typing import Any

from nemo_offload_rl.generation.interface import ActorPlacement, GenerationInterface
from nemo_offload_rl.generation.transformers_backend import make_transformers_generation

# policy.generation.backend -> what starts it.
BACKENDS: Mapping[str, Callable[[Mapping[str, Any], ActorPlacement], GenerationInterface]] = {
    "transformers": make_transformers_generation,
}


def make_generation(policy_config: Mapping[str, Any], cluster: ActorPlacement) -> GenerationInterface:
    """Start the generation engine that a recipe's `policy` names; returns before it is built.

    Raises:
        ValueError: If the backend is not known.
    """
    backend = policy_config["generation"]["backend"]
    if backend not in BACKENDS:
        raise ValueError(
            f"policy.generation.backend is {backend!r}, which is not supported here; use one of {', '.join(BACKENDS)}."
        )
    return BACKENDS[backend](policy_config, cluster)
