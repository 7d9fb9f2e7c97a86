"""Chooses which log-probs each kind of pass of a worker computes, for the distribution that answers come from."""

from dataclasses import dataclass

from nemo_offload_rl.config.schema.policy import PolicyConfig, filters_logprobs, sampling_of
from nemo_offload_rl.mcore.build import TrainingState
from nemo_offload_rl.mcore.logprob.forward import LogprobOptions
from nemo_offload_rl.mcore.logprob.logprob import KEEP_ALL, SamplingFilter
from nemo_offload_rl.mcore.patches.layer_state import check_is_plain


@dataclass(frozen=True)
class LogprobPasses:
    """Says which log-probs each kind of pass computes.

    Attributes:
        train: in training, over the tokens that the sampler keeps.
        evaluate: for a loss without training, forward only, over all tokens.
        logprob: in log-prob passes of the policy, over the tokens that the sampler keeps.
        reference: in log-prob passes of the reference policy, over all tokens.
    """

    train: LogprobOptions
    evaluate: LogprobOptions
    logprob: LogprobOptions
    reference: LogprobOptions


def logprob_passes(policy: PolicyConfig, state: TrainingState) -> LogprobPasses:
    """Returns the log-prob options of each kind of pass that the recipe asks for.

    Args:
        policy: the recipe's policy section.
        state: the model.

    Raises:
        ValueError: the recipe computes logits in chunks, which the model's output layer does not allow.
    """
    megatron, sampling = policy["megatron_cfg"], sampling_of(policy)
    training = megatron["fused_linear_logprobs_chunk_size"] if megatron["use_fused_linear_logprobs"] else None
    forward_only = policy["logprob_chunk_size"] or training
    if forward_only is not None:
        check_is_plain(state.model)
    # Logits are divided by the temperature; a greedy sampler (0) reports log-probs at temperature 1.
    temperature = 1.0 if sampling is None else sampling["temperature"] or 1.0
    kept = SamplingFilter(sampling["top_k"], sampling["top_p"]) if filters_logprobs(sampling) else KEEP_ALL
    return LogprobPasses(
        train=LogprobOptions(state.vocab_size, temperature, (kept,), training),
        evaluate=LogprobOptions(state.vocab_size, temperature, (KEEP_ALL,), training),
        logprob=LogprobOptions(state.vocab_size, temperature, (kept,), forward_only),
        reference=LogprobOptions(state.vocab_size, temperature, (KEEP_ALL,), forward_only),
    )
