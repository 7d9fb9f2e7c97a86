"""Generation engines, which sample from the policy's current weights."""

import logging
import pkgutil

from nemo_offload_rl.config.schema.policy import GRPOPolicyConfig
from nemo_offload_rl.generation.interface import EngineSpec, GenerationInterface, InFlightUpdates
from nemo_offload_rl.placement.cluster import Cluster

logger = logging.getLogger(__name__)

# policy.generation.backend -> "module:name" of its `EngineSpec`, imported only if a recipe names it.
ENGINES: dict[str, str] = {
    "transformers": "nemo_offload_rl.generation.transformers_backend:ENGINE",
    "vllm": "nemo_offload_rl.generation.vllm_backend:ENGINE",
}


def make_generation(
    policy_config: GRPOPolicyConfig, cluster: Cluster, in_flight: InFlightUpdates | None = None
) -> GenerationInterface:
    """Starts the generation engines that a recipe's `policy` names; returns before they are built.

    Args:
        policy_config: The recipe's `policy`.
        cluster: Where the engines run.
        in_flight: How weights change while engines generate; None if they do not.

    Raises:
        ValueError: If the backend is unknown or needs GPUs that the cluster does not have, or if an engine's number of
            bundles does not divide a node's.
    """
    backend = policy_config["generation"]["backend"]
    if backend not in ENGINES:
        raise ValueError(
            f"policy.generation.backend is {backend!r}, which is not supported here; use one of {', '.join(ENGINES)}."
        )
    spec: EngineSpec = pkgutil.resolve_name(ENGINES[backend])
    bundles_by_engine = cluster.bundles_by_engine(spec.bundles_per_engine(policy_config, cluster))
    generation = spec.start(policy_config, cluster, bundles_by_engine, in_flight)
    if not generation.capabilities.batch_independent_sampling:
        logger.warning(
            "The %s backend samples the rows of a batch together, so a resumed run may differ from an uninterrupted "
            "one.",
            backend,
        )
    return generation
