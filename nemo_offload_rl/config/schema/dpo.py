"""The section `dpo`: direct preference optimisation."""

from typing import NotRequired

from pydantic import with_config

from nemo_offload_rl.config.schema.sft import SupervisedConfig
from nemo_offload_rl.config.schema.value_types import STRICT, NonNegativeFloat, PositiveFloat


@with_config(STRICT)
class DPOConfig(SupervisedConfig):
    """Section `dpo`."""

    # Weight of a pair's margin in the preference loss, the beta of the DPO paper: a larger value keeps the policy
    # closer to the reference. Above 0; recommended 0.05. Absent: 0.05.
    reference_policy_kl_penalty: NotRequired[PositiveFloat]
    # Weight of the preference loss. 0 or more; recommended 1.0. Absent: 1.0.
    preference_loss_weight: NotRequired[NonNegativeFloat]
    # Weight of the negative log-likelihood of the chosen answers. 0 or more; recommended 0. Absent: 0.
    sft_loss_weight: NotRequired[NonNegativeFloat]
    # Divide an answer's log-probs in the preference loss by its number of tokens. Recommended: false. Absent: false.
    preference_average_log_probs: NotRequired[bool]
    # Divide the log-probs in the likelihood loss by the answer's number of tokens, too. Recommended:
    # "${dpo.preference_average_log_probs}". Absent: false.
    sft_average_log_probs: NotRequired[bool]
