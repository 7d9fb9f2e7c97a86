"""The sections of the algorithms: `grpo` with `loss_fn`, `sft`, `dpo`, and `warm_start`, an SFT run before the run."""

from typing import Annotated, Literal, NotRequired, TypedDict

from pydantic import Field, with_config

from nemo_offload_rl.config.schema.value_types import (
    STRICT,
    FiniteFloat,
    IfAbsent,
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

    # The advantage estimator. Only grpo: an answer's reward relative to the other answers to the same prompt.
    name: NotRequired[Annotated[Literal["grpo"], IfAbsent("grpo")]]
    # Must equal grpo.normalize_rewards, which is the key that counts. Recommended: "${grpo.normalize_rewards}".
    normalize_rewards: NotRequired[Annotated[bool, IfAbsent(True)]]
    # Must equal grpo.use_leave_one_out_baseline, which is the key that counts. Recommended:
    # "${grpo.use_leave_one_out_baseline}".
    use_leave_one_out_baseline: NotRequired[Annotated[bool, IfAbsent(True)]]


@with_config(STRICT)
class RewardScalingConfig(TypedDict):
    """Section `grpo.reward_scaling`: maps rewards linearly, clipped to the source range."""

    # Map rewards. Recommended: false for rewards that are already 0 or 1.
    enabled: NotRequired[Annotated[bool, IfAbsent(False)]]
    # Reward that becomes target_min; smaller rewards are clipped to it. Recommended: 0.0.
    source_min: NotRequired[Annotated[FiniteFloat, IfAbsent(0.0)]]
    # Reward that becomes target_max; larger rewards are clipped to it. Recommended: 1.0.
    source_max: NotRequired[Annotated[FiniteFloat, IfAbsent(1.0)]]
    # Smallest reward after the map. Recommended: 0.0.
    target_min: NotRequired[Annotated[FiniteFloat, IfAbsent(0.0)]]
    # Largest reward after the map. Recommended: 1.0.
    target_max: NotRequired[Annotated[FiniteFloat, IfAbsent(1.0)]]


@with_config(STRICT)
class RewardShapingConfig(TypedDict):
    """Section `grpo.reward_shaping`: penalizes long answers in training, after `reward_scaling`.

    Either stop_properly_penalty_coef counts or the other three keys do.
    """

    # Shape rewards. Dynamic sampling compares the rewards before shaping. Recommended: false, or true where answers get
    # longer without getting better.
    enabled: NotRequired[Annotated[bool, IfAbsent(False)]]
    # Tokens below max_response_length over which the penalty grows (DAPO). 1 or more; recommended an eighth of
    # max_response_length. Null: no such penalty.
    overlong_buffer_length: NotRequired[Annotated[PositiveInt | None, IfAbsent(None)]]
    # Penalty subtracted from the reward of an answer of max_response_length tokens; longer answers lose more. 0 or
    # more; recommended 1.0. Null: no such penalty.
    overlong_buffer_penalty: NotRequired[Annotated[NonNegativeFloat | None, IfAbsent(None)]]
    # Length of an answer in tokens, including its stop token, at which the penalty is overlong_buffer_penalty. 1 or
    # more; recommended "${policy.generation.max_new_tokens}". Null: no such penalty.
    max_response_length: NotRequired[Annotated[PositiveInt | None, IfAbsent(None)]]
    # Factor on the rewards of answers that were cut off at max_new_tokens, instead of the penalty above. 0 to 1;
    # recommended null. Null: the penalty above counts.
    stop_properly_penalty_coef: NotRequired[Annotated[Annotated[float, Field(ge=0, le=1)] | None, IfAbsent(None)]]


@with_config(STRICT)
class RolloutDebugConfig(TypedDict):
    """Section `grpo.debug`: keeps rollouts, to train on them again without a generation engine."""

    # Folder in which each step's rollouts are saved, one file a step; a folder of its own for each run. Null: nothing
    # is saved.
    save_rollouts: NotRequired[Annotated[NonEmptyStr | None, IfAbsent(None)]]
    # Folder of saved rollouts to train on: no engine is started, nothing is generated or validated, and the run ends
    # after the last saved step. Needs policy.generation.colocated.enabled true. Null: answers are generated.
    replay_rollouts: NotRequired[Annotated[NonEmptyStr | None, IfAbsent(None)]]


@with_config(STRICT)
class AsyncGRPOConfig(TypedDict):
    """Section `grpo.async_grpo`: answers of later steps are sampled while a step trains."""

    # Sample ahead of training: on GPUs of its own (policy.generation.colocated.enabled false), or while the policy
    # trains on the same ones. With an age above 0 it needs loss_fn.use_importance_sampling_correction true.
    enabled: NotRequired[Annotated[bool, IfAbsent(False)]]
    # The most updates of the policy that the weights may lack with which a step's answers were sampled, and so the
    # steps that are sampled ahead. 0 or more; 0 samples with the newest weights, as without this section; recommended
    # 1, with which a run can be repeated.
    max_trajectory_age_steps: NotRequired[Annotated[NonNegativeInt, IfAbsent(1)]]
    # Send new weights while answers are being generated: engines hold between two of their steps, and the answers go on
    # with the new weights. False: weights change between two steps' answers, and a step's training waits for them.
    # Recommended: true for answers of very uneven lengths, false for runs that can be repeated.
    in_flight_weight_updates: NotRequired[Annotated[bool, IfAbsent(False)]]
    # Whether answers under way get new keys and values from new weights, which prefills them anew. No effect unless
    # weights are sent in flight: vLLM's prefix cache is emptied then.
    recompute_kv_cache_after_weight_updates: NotRequired[Annotated[bool, IfAbsent(False)]]
    # Failures of generation that the run survives. Only 0: the first one ends it, and it resumes from its newest
    # checkpoint.
    max_generation_failures: NotRequired[Annotated[Literal[0], IfAbsent(0)]]


@with_config(STRICT)
class GRPOConfig(TypedDict):
    """Section `grpo`."""

    # Number of prompts in one step. 1 or more; recommended 32 to 512.
    num_prompts_per_step: NotRequired[Annotated[PositiveInt, IfAbsent(32)]]
    # Answers sampled for each prompt; their rewards are compared with each other. 2 or more; recommended 8 to 16.
    num_generations_per_prompt: NotRequired[Annotated[PositiveInt, IfAbsent(16)]]
    # Steps after which the run ends. 1 or more.
    max_num_steps: NotRequired[Annotated[PositiveInt, IfAbsent(1_000_000)]]
    # Passes over the training data after which the run ends, unless max_num_steps ends it first. 1 or more.
    max_num_epochs: NotRequired[Annotated[PositiveInt, IfAbsent(1)]]
    # Divide advantages by the standard deviation of their group's rewards. Recommended: true. Absent: that of
    # adv_estimator, or true without one.
    normalize_rewards: NotRequired[Annotated[bool, IfAbsent(True)]]
    # Compare a reward with the mean of the other answers to the same prompt, excluding the answer itself. Needs at
    # least two answers for each prompt; recommended true. Absent: that of adv_estimator, or true without one.
    use_leave_one_out_baseline: NotRequired[Annotated[bool, IfAbsent(True)]]
    # The newer place in NeMo-RL's recipes for the two settings above. Absent: nothing changes.
    adv_estimator: NotRequired[AdvEstimatorConfig]
    # Lower bound of advantages; smaller ones are set to it. Null: no bound.
    advantage_clip_low: NotRequired[Annotated[FiniteFloat | None, IfAbsent(None)]]
    # Upper bound of advantages; larger ones are set to it. Null: no bound.
    advantage_clip_high: NotRequired[Annotated[FiniteFloat | None, IfAbsent(None)]]
    # Linear map of the rewards. Absent: none.
    reward_scaling: NotRequired[RewardScalingConfig]
    # Penalties on long answers. Absent: none.
    reward_shaping: NotRequired[RewardShapingConfig]
    # Exclude answers that were cut off at max_new_tokens from the loss. Recommended: false.
    overlong_filtering: NotRequired[Annotated[bool, IfAbsent(False)]]
    # Largest train/token_mult_prob_error that counts as rounding; the run warns of each step above it. Above 1;
    # recommended 1.05. Null: no limit and no warning.
    token_mult_prob_error_limit: NotRequired[
        Annotated[Annotated[float, Field(gt=1, allow_inf_nan=False)] | None, IfAbsent(None)]
    ]
    # Leave an answer out of the loss if the sampler's and the policy's probabilities of it differ by more than this
    # factor: the mean of exp |difference of the log-probs| over its tokens. The step then has the log-prob pass before
    # training also with loss_fn.force_on_policy_ratio. 1 or more; recommended null, or 1.5. Null: no answer is left
    # out.
    seq_logprob_error_threshold: NotRequired[
        Annotated[Annotated[float, Field(ge=1, allow_inf_nan=False)] | None, IfAbsent(None)]
    ]
    # Whether to skip the reference policy's log-probs. They are only computed if loss_fn.reference_policy_kl_penalty is
    # above 0, so that true only requires that to be 0.
    skip_reference_policy_logprobs_calculation: NotRequired[Annotated[bool, IfAbsent(False)]]
    # Drop prompts whose answers all got the same reward, after reward_scaling, and sample more until the batch is full
    # (DAPO). Recommended: false.
    use_dynamic_sampling: NotRequired[Annotated[bool, IfAbsent(False)]]
    # Generation batches after which dynamic sampling may take one more, the last, before the step fails; as in NeMo-RL.
    # 1 or more; recommended 10.
    dynamic_sampling_max_gen_batches: NotRequired[Annotated[PositiveInt, IfAbsent(10)]]
    # Prompts of a generation batch of dynamic sampling, as a multiple of num_prompts_per_step, rounded down; above 1,
    # more prompts are sampled than a step trains on, and the surplus is dropped. Above 0, 1 without dynamic sampling;
    # recommended 1 divided by the share of prompts that are kept, train/informative_prompts.
    batch_multiplier: NotRequired[Annotated[PositiveFloat, IfAbsent(1)]]
    # Steps between validations; 0, or -1, for none. Recommended: 10.
    val_period: NotRequired[Annotated[Period, IfAbsent(10)]]
    # Validate before the first step. Recommended: true where the starting accuracy is of interest.
    val_at_start: NotRequired[Annotated[bool, IfAbsent(False)]]
    # Validate after the last step. Recommended: true.
    val_at_end: NotRequired[Annotated[bool, IfAbsent(False)]]
    # Problems in a validation, taken from the start of the set; if it is above val_batch_size, it is rounded down to a
    # multiple of that, as in NeMo-RL. 1 or more; recommended 256.
    max_val_samples: NotRequired[Annotated[PositiveInt, IfAbsent(256)]]
    # Answers sampled for each validation problem; metrics are means over all of them, and val:pass_k is also measured.
    # 1 or more; recommended 1, or 8 where val_temperature is above 0.
    val_num_generations_per_prompt: NotRequired[Annotated[PositiveInt, IfAbsent(1)]]
    # Problems in one validation batch. 1 or more; recommended max_val_samples.
    val_batch_size: NotRequired[Annotated[PositiveInt, IfAbsent(256)]]
    # Answers sampled ahead of training. Absent: each step samples its own.
    async_grpo: NotRequired[Annotated[AsyncGRPOConfig, IfAbsent({})]]
    # Saving and replaying of rollouts. Absent: neither.
    debug: NotRequired[Annotated[RolloutDebugConfig, IfAbsent({})]]
    # Seed of data order, sampling and initial weights. 0 or more.
    seed: NotRequired[Annotated[NonNegativeInt, IfAbsent(42)]]
    # Validation metric that ends the run early: accuracy or val:accuracy, and so on. Null: no early stop.
    stop_at_validation_metric: NotRequired[Annotated[NonEmptyStr | None, IfAbsent(None)]]
    # Value of that metric at which the run ends: it must be reached from below. Null: no early stop.
    stop_at_validation_threshold: NotRequired[Annotated[FiniteFloat | None, IfAbsent(None)]]


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


@with_config(STRICT)
class SupervisedConfig(TypedDict):
    """What the sections of all algorithms that train on known answers have."""

    # Passes over the training data after which the run ends, unless max_num_steps ends it first. 1 or more.
    max_num_epochs: NotRequired[Annotated[PositiveInt, IfAbsent(1)]]
    # Validate before the first step. Recommended: true.
    val_at_start: NotRequired[Annotated[bool, IfAbsent(True)]]
    # Validate after the last step. Recommended: true.
    val_at_end: NotRequired[Annotated[bool, IfAbsent(False)]]
    # Number of batches in a validation; 0 for the whole set. Recommended: 8.
    val_batches: NotRequired[Annotated[NonNegativeInt, IfAbsent(8)]]
    # Samples of one validation forward pass on one rank. 1 or more.
    val_micro_batch_size: NotRequired[Annotated[PositiveInt, IfAbsent(1)]]
    # Seed of data order and initial weights. 0 or more.
    seed: NotRequired[Annotated[NonNegativeInt, IfAbsent(42)]]
    # Validation metric that ends the run early, such as answer_probability or val:answer_probability. Null: no early
    # stop.
    stop_at_validation_metric: NotRequired[Annotated[NonEmptyStr | None, IfAbsent(None)]]
    # Value of that metric at which the run ends: reached from below, or from above if the metric is a loss. Null: no
    # early stop.
    stop_at_validation_threshold: NotRequired[Annotated[FiniteFloat | None, IfAbsent(None)]]
    # At the end, write the trained model as a Hugging Face folder, `hf/` in the run folder. Recommended: true.
    export_hf: NotRequired[Annotated[bool, IfAbsent(False)]]


@with_config(STRICT)
class SFTConfig(SupervisedConfig):
    """Section `sft`."""

    # Steps after which the run ends. 1 or more.
    max_num_steps: NotRequired[Annotated[PositiveInt, IfAbsent(60)]]
    # Steps between validations; 0, or -1, for none. Recommended: 10.
    val_period: NotRequired[Annotated[Period, IfAbsent(10)]]
    # Samples in a validation batch, over all ranks. A multiple of data-parallel size x val_micro_batch_size.
    val_global_batch_size: NotRequired[Annotated[PositiveInt, IfAbsent(32)]]
    # Of a conversation, train the last message only; false trains all messages of the assistant. Recommended: false.
    only_unmask_final: NotRequired[Annotated[bool, IfAbsent(False)]]


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


@with_config(STRICT)
class WarmStartConfig(TypedDict):
    """Section `warm_start`: an SFT run that comes first and provides the initial weights."""

    # The SFT recipe; its path is relative to the file that names it.
    recipe: NonEmptyStr
    # Overrides of that recipe, each written as on the command line. Absent: none.
    overrides: NotRequired[Annotated[list[Annotated[str, Field(min_length=1)]], IfAbsent([])]]
