"""The section `grpo`: group relative policy optimisation."""

from typing import Annotated, Literal, NotRequired, TypedDict

from pydantic import Field, with_config

from nemo_offload_rl.config.schema.value_types import (
    STRICT,
    FiniteFloat,
    NonEmptyStr,
    NonNegativeFloat,
    NonNegativeInt,
    Period,
    PositiveFloat,
    PositiveInt,
)


@with_config(STRICT)
class AdvEstimatorConfig(TypedDict):
    """Section `grpo.adv_estimator`: the newer place in NeMo-RL's recipes for the advantage settings."""

    # The advantage estimator. Only grpo: an answer's reward relative to the other answers to the same prompt. Absent:
    # grpo.
    name: NotRequired[Literal["grpo"]]
    # Must equal grpo.normalize_rewards, which is the key that counts. Recommended: "${grpo.normalize_rewards}". Absent:
    # true.
    normalize_rewards: NotRequired[bool]
    # Must equal grpo.use_leave_one_out_baseline, which is the key that counts. Recommended:
    # "${grpo.use_leave_one_out_baseline}". Absent: true.
    use_leave_one_out_baseline: NotRequired[bool]


@with_config(STRICT)
class RewardScalingConfig(TypedDict):
    """Section `grpo.reward_scaling`: maps rewards linearly, clipped to the source range."""

    # Map rewards. Recommended: false for rewards that are already 0 or 1. Absent: false.
    enabled: NotRequired[bool]
    # Reward that becomes target_min; smaller rewards are clipped to it. Recommended: 0.0. Absent: 0.0.
    source_min: NotRequired[FiniteFloat]
    # Reward that becomes target_max; larger rewards are clipped to it. Recommended: 1.0. Absent: 1.0.
    source_max: NotRequired[FiniteFloat]
    # Smallest reward after the map. Recommended: 0.0. Absent: 0.0.
    target_min: NotRequired[FiniteFloat]
    # Largest reward after the map. Recommended: 1.0. Absent: 1.0.
    target_max: NotRequired[FiniteFloat]


@with_config(STRICT)
class RewardShapingConfig(TypedDict):
    """Section `grpo.reward_shaping`: penalizes long answers in training, after `reward_scaling`.

    Either stop_properly_penalty_coef counts or the other three keys do.
    """

    # Shape rewards. Dynamic sampling compares the rewards before shaping. Recommended: false, or true where answers get
    # longer without getting better. Absent: false.
    enabled: NotRequired[bool]
    # Tokens below max_response_length over which the penalty grows (DAPO). 1 or more; recommended an eighth of
    # max_response_length. Null or absent: no such penalty.
    overlong_buffer_length: NotRequired[PositiveInt | None]
    # Penalty subtracted from the reward of an answer of max_response_length tokens; longer answers lose more. 0 or
    # more; recommended 1.0. Null or absent: no such penalty.
    overlong_buffer_penalty: NotRequired[NonNegativeFloat | None]
    # Length of an answer in tokens, including its stop token, at which the penalty is overlong_buffer_penalty. 1 or
    # more; recommended "${policy.generation.max_new_tokens}". Null or absent: no such penalty.
    max_response_length: NotRequired[PositiveInt | None]
    # Factor on the rewards of answers that were cut off at max_new_tokens, instead of the penalty above. 0 to 1;
    # recommended null. Null or absent: the penalty above counts.
    stop_properly_penalty_coef: NotRequired[Annotated[float, Field(ge=0, le=1)] | None]


@with_config(STRICT)
class GRPOConfig(TypedDict):
    """Section `grpo`."""

    # Number of prompts in one step. 1 or more; recommended 32 to 512. Absent: 32.
    num_prompts_per_step: NotRequired[PositiveInt]
    # Answers sampled for each prompt; their rewards are compared with each other. 2 or more; recommended 8 to 16.
    # Absent: 16.
    num_generations_per_prompt: NotRequired[PositiveInt]
    # Steps after which the run ends. 1 or more. Absent: 1000000.
    max_num_steps: NotRequired[PositiveInt]
    # Passes over the training data after which the run ends, unless max_num_steps ends it first. 1 or more. Absent: 1.
    max_num_epochs: NotRequired[PositiveInt]
    # Divide advantages by the standard deviation of their group's rewards. Recommended: true. Absent: that of
    # adv_estimator, or true without one.
    normalize_rewards: NotRequired[bool]
    # Compare a reward with the mean of the other answers to the same prompt, excluding the answer itself. Needs at
    # least two answers for each prompt; recommended true. Absent: that of adv_estimator, or true without one.
    use_leave_one_out_baseline: NotRequired[bool]
    # The newer place in NeMo-RL's recipes for the two settings above. Absent: nothing changes.
    adv_estimator: NotRequired[AdvEstimatorConfig]
    # Lower bound of advantages; smaller ones are set to it. Null or absent: no bound.
    advantage_clip_low: NotRequired[FiniteFloat | None]
    # Upper bound of advantages; larger ones are set to it. Null or absent: no bound.
    advantage_clip_high: NotRequired[FiniteFloat | None]
    # Linear map of the rewards. Absent: none.
    reward_scaling: NotRequired[RewardScalingConfig]
    # Penalties on long answers. Absent: none.
    reward_shaping: NotRequired[RewardShapingConfig]
    # Exclude answers that were cut off at max_new_tokens from the loss. Recommended: false. Absent: false.
    overlong_filtering: NotRequired[bool]
    # Largest train/token_mult_prob_error that counts as rounding; the run warns of each step above it. Above 1;
    # recommended 1.05. Null or absent: no limit and no warning.
    token_mult_prob_error_limit: NotRequired[Annotated[float, Field(gt=1, allow_inf_nan=False)] | None]
    # Leave an answer out of the loss if the sampler's and the policy's probabilities of it differ by more than this
    # factor: the mean of exp |difference of the log-probs| over its tokens. The step then has the log-prob pass before
    # training also with loss_fn.force_on_policy_ratio. 1 or more; recommended null, or 1.5. Null or absent: no answer
    # is left out.
    seq_logprob_error_threshold: NotRequired[Annotated[float, Field(ge=1, allow_inf_nan=False)] | None]
    # Whether to skip the reference policy's log-probs. They are only computed if loss_fn.reference_policy_kl_penalty is
    # above 0, so that true only requires that to be 0. Absent: false.
    skip_reference_policy_logprobs_calculation: NotRequired[bool]
    # Drop prompts whose answers all got the same reward, after reward_scaling, and sample more until the batch is full
    # (DAPO). Recommended: false. Absent: false.
    use_dynamic_sampling: NotRequired[bool]
    # Generation batches after which dynamic sampling may take one more, the last, before the step fails; as in NeMo-RL.
    # 1 or more; recommended 10. Absent: 10.
    dynamic_sampling_max_gen_batches: NotRequired[PositiveInt]
    # Prompts of a generation batch of dynamic sampling, as a multiple of num_prompts_per_step, rounded down; above 1,
    # more prompts are sampled than a step trains on, and the surplus is dropped. Above 0, 1 without dynamic sampling;
    # recommended 1 divided by the share of prompts that are kept, train/informative_prompts. Absent: 1.
    batch_multiplier: NotRequired[PositiveFloat]
    # Steps between validations; 0, or -1, for none. Recommended: 10. Absent: 10.
    val_period: NotRequired[Period]
    # Validate before the first step. Recommended: true where the starting accuracy is of interest. Absent: false.
    val_at_start: NotRequired[bool]
    # Validate after the last step. Recommended: true. Absent: false.
    val_at_end: NotRequired[bool]
    # Problems in a validation, taken from the start of the set; if it is above val_batch_size, it is rounded down to a
    # multiple of that, as in NeMo-RL. 1 or more; recommended 256. Absent: 256.
    max_val_samples: NotRequired[PositiveInt]
    # Answers sampled for each validation problem; metrics are means over all of them, and val:pass_k is also measured.
    # 1 or more; recommended 1, or 8 where val_temperature is above 0. Absent: 1.
    val_num_generations_per_prompt: NotRequired[PositiveInt]
    # Problems in one validation batch. 1 or more; recommended max_val_samples. Absent: 256.
    val_batch_size: NotRequired[PositiveInt]
    # Seed of data order, sampling and initial weights. 0 or more. Absent: 42.
    seed: NotRequired[NonNegativeInt]
    # Validation metric that ends the run early: accuracy or val:accuracy, and so on. Null or absent: no early stop.
    stop_at_validation_metric: NotRequired[NonEmptyStr | None]
    # Value of that metric at which the run ends: it must be reached from below. Null or absent: no early stop.
    stop_at_validation_threshold: NotRequired[FiniteFloat | None]
