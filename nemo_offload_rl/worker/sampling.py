"""Reads from the recipe the distribution that generation samples from, which the policy's log-probs must match."""

from nemo_offload_rl.config.schema.policy import PolicyConfig, filters_logprobs, sampling_of
from nemo_offload_rl.mcore.logprob.logprob import KEEP_ALL, SamplingFilter


def sampling_temperature(policy: PolicyConfig) -> float:
    """Returns the sampling temperature, by which logits are divided for log-probs.

    A greedy sampler (0) reports log-probs at temperature 1. Only some algorithms' policies have a generation section.
    """
    section = sampling_of(policy)
    return 1.0 if section is None else section["temperature"] or 1.0


def sampling_filter(policy: PolicyConfig) -> SamplingFilter:
    """Returns the filter behind the sampler's log-probs; it keeps all tokens if they are reported before filtering."""
    section = sampling_of(policy)
    if section is None or not filters_logprobs(policy):
        return KEEP_ALL
    return SamplingFilter(section["top_k"], section["top_p"])
