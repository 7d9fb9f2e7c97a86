"""The section `dpo`: direct preference optimisation."""

from typing import Annotated, NotRequired

from pydantic import with_config

from nemo_offload_rl.config.schema.sft import SupervisedConfig
from nemo_offload_rl.config.schema.value_types import (
    STRICT,
    IfAbsent,
    NonNegativeFloat,
    Period,
    PositiveFloat,
    PositiveInt,
)


@with_config(STRICT)
class DPOConfig(SupervisedConfig):
    """Section `dpo`."""

    # Steps after which the run ends. 1 or more.
    max_num_steps: NotRequired[Annotated[PositiveInt, IfAbsent(150)]]
    # Steps between validations; 0, or -1, for none. Recommended: 10.
    val_period: NotRequired[Annotated[Period, IfAbsent(25)]]
    # Samples in a validation batch, over all ranks. A multiple of data-parallel size x val_micro_batch_size.
    val_global_batch_size: NotRequired[Annotated[PositiveInt, IfAbsent(8)]]
    # Weight of a pair's margin in the preference loss, the beta of the DPO paper: a larger value keeps the policy
    # closer to the reference. Above 0; recommended 0.05.
    reference_policy_kl_penalty: NotRequired[Annotated[PositiveFloat, IfAbsent(0.05)]]
    # Weight of the preference loss. 0 or more; recommended 1.0.
    preference_loss_weight: NotRequired[Annotated[NonNegativeFloat, IfAbsent(1.0)]]
    # Weight of the negative log-likelihood of the chosen answers. 0 or more; recommended 0.
    sft_loss_weight: NotRequired[Annotated[NonNegativeFloat, IfAbsent(0.0)]]
    # Divide an answer's log-probs in the preference loss by its number of tokens. Recommended: false.
    preference_average_log_probs: NotRequired[Annotated[bool, IfAbsent(False)]]
    # Divide the log-probs in the likelihood loss by the answer's number of tokens, too. Recommended:
    # "${dpo.preference_average_log_probs}".
    sft_average_log_probs: NotRequired[Annotated[bool, IfAbsent(False)]]
