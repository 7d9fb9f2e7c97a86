"""Which log-probs each kind of a worker's passes computes, and how many logits at a time."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nemo_offload_rl.mcore.build import TrainingState
from nemo_offload_rl.mcore.logprob.forward import LogprobOptions
from nemo_offload_rl.mcore.logprob.sampling_filter import KEEP_ALL
from nemo_offload_rl.mcore.patches.output_layer import check_is_plain
from nemo_offload_rl.worker.sampling import sampling_filter, sampling_temperature


@dataclass(frozen=True)
class LogprobPasses:
    """Says which log-probs each kind of pass computes.

    Attributes:
        train: in training, among the tokens that the sampler keeps.
        evaluate: for a loss without training, forward only.
        logprob: in log-prob passes of the policy, among the tokens that the sampler keeps.
        reference: in log-prob passes of the reference policy.
    """

    train: LogprobOptions
    evaluate: LogprobOptions
    logprob: LogprobOptions
    reference: LogprobOptions


def logprob_passes(policy: Mapping[str, Any], state: TrainingState) -> LogprobPasses:
    """What the recipe asks for.

    Args:
        policy: its section.
        state: the model.

    Raises:
        ValueError: logits are to be computed in chunks, and the model's output layer does not allow it.
    """
    megatron = policy["megatron_cfg"]
    training = megatron["fused_linear_logprobs_chunk_size"] if megatron["use_fused_linear_logprobs"] else None
    forward_only = policy["logprob_chunk_size"] or training
    if forward_only is not None:
        check_is_plain(state.model)
    temperature, kept = sampling_temperature(policy), sampling_filter(policy)
    return LogprobPasses(
        train=LogprobOptions(state.vocab_size, temperature, (kept,), training),
        evaluate=LogprobOptions(state.vocab_size, temperature, (KEEP_ALL,), training),
        logprob=LogprobOptions(state.vocab_size, temperature, (kept,), forward_only),
        reference=LogprobOptions(state.vocab_size, temperature, (KEEP_ALL,), forward_only),
    )
