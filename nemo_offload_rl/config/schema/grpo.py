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
    """Section `grpo.adv_estimator`: NeMo-RL's newer place for the settings of the advantages."""

    # The estimator. Only grpo: the reward against the other answers to the same prompt.
    name: Literal["grpo"]
    # Must equal grpo.normalize_rewards, which is what is read. Recommended: "${grpo.normalize_rewards}".
    normalize_rewards: bool
    # Must equal grpo.use_leave_one_out_baseline, which is what is read. Recommended:
    # "${grpo.use_leave_one_out_baseline}".
    use_leave_one_out_baseline: bool


@with_config(STRICT)
class RewardScalingConfig(TypedDict):
    """Section `grpo.reward_scaling`: a linear map of rewards, clipped to its source range."""

    # Map rewards. Recommended: false for rewards that are 0 or 1 already.
    enabled: bool
    # Reward that becomes target_min; smaller ones count as this. Recommended: 0.0. Absent: enabled is false.
    source_min: NotRequired[FiniteFloat]
    # Reward that becomes target_max; larger ones count as this. Recommended: 1.0. Absent: enabled is false.
    source_max: NotRequired[FiniteFloat]
    # Smallest reward after the map. Recommended: 0.0. Absent: enabled is false.
    target_min: NotRequired[FiniteFloat]
    # Largest reward after the map. Recommended: 1.0. Absent: enabled is false.
    target_max: NotRequired[FiniteFloat]


@with_config(STRICT)
class RewardShapingConfig(TypedDict):
    """Section `grpo.reward_shaping`: rewards by the length of answers, after `reward_scaling`, in training alone.

    Either stop_properly_penalty_coef or the other three keys count.
    """

    # Shape rewards. Dynamic sampling compares them as they were before. Recommended: false, or true where answers grow
    # without getting better.
    enabled: bool
    # Tokens below max_response_length over which the penalty grows (DAPO). 1 or more; recommended an eighth of
    # max_response_length. Null or absent: no such penalty.
    overlong_buffer_length: NotRequired[PositiveInt | None]
    # What an answer of max_response_length tokens loses; longer ones lose more. 0 or more; recommended 1.0. Null or
    # absent: no such penalty.
    overlong_buffer_penalty: NotRequired[NonNegativeFloat | None]
    # Tokens of an answer, its stop token included. 1 or more; recommended "${policy.generation.max_new_tokens}". Null
    # or absent: no such penalty.
    max_response_length: NotRequired[PositiveInt | None]
    # Factor on the rewards of answers that were cut off at max_new_tokens, in place of the penalty above. 0 to 1;
    # recommended null. Null or absent: the penalty above counts.
    stop_properly_penalty_coef: NotRequired[Annotated[float, Field(ge=0, le=1)] | None]


@with_config(STRICT)
class GRPOConfig(TypedDict):
    """Section `grpo`."""

    # Prompts of one step. 1 or more; recommended 32 to 512.
    num_prompts_per_step: PositiveInt
    # Answers sampled for each prompt; their rewards are compared with each other. 2 or more; recommended 8 to
    # 16.
    num_generations_per_prompt: PositiveInt
    # Steps after which the run ends. 1 or more.
    max_num_steps: PositiveInt
    # Passes over the training data after which the run ends, if max_num_steps does not end it before. 1 or more.
    max_num_epochs: PositiveInt
    # Divide advantages by the standard deviation of their group's rewards. Recommended: true.
    normalize_rewards: bool
    # Compare a reward with the mean of the other answers to its prompt, itself left out. Needs two answers or more;
    # recommended true.
    use_leave_one_out_baseline: bool
    # NeMo-RL's newer place for the two settings above. Absent: nothing changes.
    adv_estimator: NotRequired[AdvEstimatorConfig]
    # Smallest advantage; smaller ones are set to it. Null or absent: no bound.
    advantage_clip_low: NotRequired[FiniteFloat | None]
    # Largest advantage; larger ones are set to it. Null or absent: no bound.
    advantage_clip_high: NotRequired[FiniteFloat | None]
    # A linear map of the rewards. Absent: none.
    reward_scaling: NotRequired[RewardScalingConfig]
    # Penalties on long answers. Absent: none.
    reward_shaping: NotRequired[RewardShapingConfig]
    # Leave answers out of the loss that were cut off at max_new_tokens. Recommended: false.
    overlong_filtering: bool
    # Largest train/token_mult_prob_error that is taken for rounding; the run warns of each step above it. Above 1;
    # recommended 1.05. Null or absent: none, no warning.
    token_mult_prob_error_limit: NotRequired[Annotated[float, Field(gt=1, allow_inf_nan=False)] | None]
    # Leave prompts out whose answers all got the same reward, after reward_scaling, and sample more until the batch is
    # full (DAPO). Recommended: false.
    use_dynamic_sampling: bool
    # Generation batches that dynamic sampling may use for one step before it fails. 1 or more; recommended 10.
    dynamic_sampling_max_gen_batches: PositiveInt
    # Prompts of a generation batch of dynamic sampling, as a multiple of num_prompts_per_step, rounded down: above 1,
    # more prompts are sampled than a step trains on, and what is too many is dropped. Above 0, 1 without dynamic
    # sampling; recommended 1 over the share of prompts that are kept, train/informative_prompts. Absent: 1.
    batch_multiplier: NotRequired[PositiveFloat]
    # Steps between validations; 0, or -1, for none. Recommended: 10.
    val_period: Period
    # Validate before the first step. Recommended: true where the starting accuracy is of interest.
    val_at_start: bool
    # Validate after the last step. Recommended: true.
    val_at_end: bool
    # Problems of a validation; the first ones of the set. 1 or more; recommended 256.
    max_val_samples: PositiveInt
    # Answers sampled to each problem of a validation, which then means over all of them, and also measures
    # val:pass_k. 1 or more; recommended 1, or 8 where val_temperature is above 0. Absent: 1.
    val_num_generations_per_prompt: NotRequired[PositiveInt]
    # Problems of one validation batch. 1 or more; recommended max_val_samples.
    val_batch_size: PositiveInt
    # Seed of data order, sampling and initial weights. 0 or more.
    seed: NonNegativeInt
    # Validation metric that ends the run early, such as val:accuracy. Null or absent: nothing does.
    stop_at_validation_metric: NotRequired[NonEmptyStr | None]
    # Value of that metric at which the run ends: reached from below. Null or absent: nothing does.
    stop_at_validation_threshold: NotRequired[FiniteFloat | None]
