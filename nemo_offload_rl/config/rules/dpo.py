"""The rule for DPO's loss."""

from nemo_offload_rl.config.rules.base import Verdict, rule


@rule("dpo.preference_loss_weight", "dpo.sft_loss_weight")
def a_part_of_the_loss_counts(preference: float, sft: float) -> Verdict:
    """Refuses two loss weights of 0, with which nothing is trained."""
    if preference > 0 or sft > 0:
        return None
    return "is 0, and so is dpo.sft_loss_weight, so that the loss is always 0; set one of them above 0"
