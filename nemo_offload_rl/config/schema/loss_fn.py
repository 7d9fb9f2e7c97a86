"""The section `loss_fn`: the clipped policy-gradient loss."""

from typing import Annotated, Literal, NotRequired, TypedDict

from pydantic import Field, with_config

from nemo_offload_rl.config.schema.value_types import STRICT, IfAbsent, NonNegativeFloat, PositiveFloat


@with_config(STRICT)
class LossConfig(TypedDict):
    """Section `loss_fn`."""

    # Weight of the KL divergence to the reference policy; 0 skips the reference pass and saves its memory. 0 or more;
    # recommended 0 to 0.01.
    reference_policy_kl_penalty: NotRequired[Annotated[NonNegativeFloat, IfAbsent(0.01)]]
    # Estimator of that divergence: k1 (log ratio), k2 (half its square) or k3 (unbiased and never negative). In
    # expectation, k1 and k3 have the gradient of the divergence, and k2 does not. Also used for train/gen_kl_error.
    # Recommended: k3.
    reference_policy_kl_type: NotRequired[Annotated[Literal["k1", "k2", "k3"], IfAbsent("k3")]]
    # Largest absolute log ratio that enters the estimator; null for no bound. Recommended: 20.0.
    kl_input_clamp_value: NotRequired[Annotated[PositiveFloat | None, IfAbsent(20.0)]]
    # Largest absolute value of the weighted estimate; null for no bound. Recommended: 10.0.
    kl_output_clamp_value: NotRequired[Annotated[PositiveFloat | None, IfAbsent(10.0)]]
    # How far the probability ratio may fall below 1 before its gradient is cut. 0 to 1; recommended 0.2.
    ratio_clip_min: NotRequired[Annotated[float, Field(ge=0, le=1), IfAbsent(0.2)]]
    # How far the probability ratio may rise above 1 before its gradient is cut. 0 or more; recommended 0.2.
    ratio_clip_max: NotRequired[Annotated[NonNegativeFloat, IfAbsent(0.2)]]
    # Dual clipping: bound of the loss for negative advantages, as a multiple of the advantage. Above 1; null for no
    # bound. Recommended: null, or 3.0.
    ratio_clip_c: NotRequired[Annotated[Annotated[float, Field(gt=1)] | None, IfAbsent(None)]]
    # Average the loss over all tokens of the batch (true) or over the token averages of each sample (false).
    # Recommended: true.
    token_level_loss: NotRequired[Annotated[bool, IfAbsent(True)]]
    # Weight tokens by the ratio of training to generation probability, which corrects for a sampler of another
    # precision. Recommended: false.
    use_importance_sampling_correction: NotRequired[Annotated[bool, IfAbsent(False)]]
    # How these weights are bounded: tis (clamped), icepop (tokens outside of the bounds are dropped) or seq-mask-tis
    # (samples whose geometric mean is outside are dropped). Needs use_importance_sampling_correction. Null for no
    # bounds. Recommended: null, or tis where the sampler has another precision.
    truncated_importance_sampling_type: NotRequired[
        Annotated[Literal["tis", "icepop", "seq-mask-tis"] | None, IfAbsent(None)]
    ]
    # Upper bound of the weights. Above 0; null if no type is set; recommended 2.0 with tis, 5.0 with icepop, 1.002 with
    # seq-mask-tis.
    truncated_importance_sampling_ratio: NotRequired[Annotated[PositiveFloat | None, IfAbsent(None)]]
    # Lower bound of the weights. At most the upper one; null means 0 with tis. Recommended: null with tis, 0.5 with
    # icepop, 0.999 with seq-mask-tis.
    truncated_importance_sampling_ratio_min: NotRequired[Annotated[NonNegativeFloat | None, IfAbsent(None)]]
    # Use one ratio for each sample, the geometric mean of its tokens' ratios (GSPO); needs token_level_loss false.
    # Recommended: false.
    sequence_level_importance_ratios: NotRequired[Annotated[bool, IfAbsent(False)]]
    # Use the plain policy gradient without a probability ratio (REINFORCE). Recommended: false.
    disable_ppo_ratio: NotRequired[Annotated[bool, IfAbsent(False)]]
    # Set the value of the probability ratio to 1, which skips the log-prob pass before training; needs one optimizer
    # step for each GRPO step. Recommended: false.
    force_on_policy_ratio: NotRequired[Annotated[bool, IfAbsent(False)]]
    # Weight the KL estimate by the ratio of current to generation probability, which makes it an estimate for the
    # current policy; otherwise the samples are treated as the current policy's. Recommended: false with one optimizer
    # step for each GRPO step, true with several.
    use_on_policy_kl_approximation: NotRequired[Annotated[bool, IfAbsent(False)]]
    # Weight each token's log-prob by its clipped ratio, without gradient, so that clipped tokens keep a gradient
    # (CISPO); needs token_level_loss true, and ratio_clip_c null. Recommended: false; with true, ratio_clip_min 1.0 and
    # ratio_clip_max 5.0.
    use_cispo: NotRequired[Annotated[bool, IfAbsent(False)]]
