"""Provides the policy-gradient loss that tests start from: NeMo-RL's defaults, without a KL penalty."""

from nemo_offload_rl.algorithms.losses import ClippedPGLoss

PLAIN = ClippedPGLoss(
    ratio_clip_min=0.2, ratio_clip_max=0.2, ratio_clip_c=None, reference_policy_kl_penalty=0.0,
    reference_policy_kl_type="k3", kl_input_clamp_value=20.0, kl_output_clamp_value=10.0, token_level_loss=True,
    use_importance_sampling_correction=False, truncated_importance_sampling_type=None,
    truncated_importance_sampling_ratio=None, truncated_importance_sampling_ratio_min=None,
    sequence_level_importance_ratios=False, disable_ppo_ratio=False, force_on_policy_ratio=False,
    use_on_policy_kl_approximation=False, use_cispo=False,
)  # fmt: skip
