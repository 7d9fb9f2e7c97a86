"""Rules for GRPO: groups of answers, advantages, and the loss."""

from nemo_offload_rl.config.problems import show
from nemo_offload_rl.config.rules.base import Verdict, note, rule
from nemo_offload_rl.metrics.names import validation_name


@rule("grpo.num_prompts_per_step", "grpo.num_generations_per_prompt", "policy.train_global_batch_size")
def global_batches_fill_step(prompts: int, generations: int, gbs: int) -> Verdict:
    """Requires a GRPO step to be a whole number of optimizer steps."""
    if (prompts * generations) % gbs == 0:
        return None
    return (
        f"{prompts} prompts x grpo.num_generations_per_prompt {generations} = {prompts * generations} samples are not "
        f"a multiple of policy.train_global_batch_size ({gbs}); change either"
    )


@rule("grpo.num_generations_per_prompt")
def groups_have_two_answers(generations: int) -> Verdict:
    """Refuses a single answer, since an advantage compares it with the other answers to the same prompt."""
    if generations > 1:
        return None
    return (
        "must be 2 or more, since an answer's advantage compares its reward with those of the other answers to the "
        "same prompt, and is always 0 for a single answer; found 1"
    )


@rule("grpo.use_leave_one_out_baseline", "grpo.num_generations_per_prompt")
def leave_one_out_needs_two_answers(enabled: bool, generations: int) -> Verdict:
    """Refuses a leave-one-out baseline for a single answer, of which nothing is left."""
    if not enabled or generations > 1:
        return None
    return "is true, which needs grpo.num_generations_per_prompt of 2 or more; found 1"


@rule("grpo.use_dynamic_sampling", "grpo.num_generations_per_prompt")
def dynamic_sampling_needs_two_answers(enabled: bool, generations: int) -> Verdict:
    """Refuses dynamic sampling for a single answer, whose reward never differs within its group."""
    if not enabled or generations > 1:
        return None
    return "is true, which needs grpo.num_generations_per_prompt of 2 or more; found 1"


@rule("grpo.batch_multiplier?", "grpo.use_dynamic_sampling", "grpo.num_prompts_per_step")
def larger_batches_need_dynamic_sampling(multiplier: float | None, dynamic: bool, prompts: int) -> Verdict:
    """Refuses a multiplier without dynamic sampling, since a step then trains on everything it samples."""
    if multiplier is None or multiplier == 1:
        return None
    if not dynamic:
        return f"is {multiplier:g}, which needs grpo.use_dynamic_sampling true; set it to 1"
    if int(prompts * multiplier) == 0:
        return f"is {multiplier:g}, which times grpo.num_prompts_per_step ({prompts}) is less than one prompt; raise it"
    return None


@rule(
    "grpo.val_num_generations_per_prompt?",
    "grpo.stop_at_validation_metric?",
    "checkpointing.metric_name",
    "checkpointing.enabled",
)
def pass_k_needs_several_answers(
    generations: int | None, target: str | None, metric: str | None, saves: bool
) -> Verdict:
    """Refuses pass@k as a metric if each problem has a single answer."""
    names = [target, metric if saves else None]
    if (generations or 1) > 1 or not any(validation_name(name or "") == "val:pass_k" for name in names):
        return None
    return "must be 2 or more for val:pass_k to be measured; found 1"


@note("grpo.val_num_generations_per_prompt?", "policy.generation.val_temperature")
def greedy_answers_are_equal(generations: int | None, temperature: float) -> Verdict:
    """Notes that several greedy answers to a problem are equal."""
    if (generations or 1) == 1 or temperature > 0:
        return None
    return f"samples {generations} equal answers to a problem, since policy.generation.val_temperature is 0"


@rule("grpo.adv_estimator.normalize_rewards", "grpo.normalize_rewards")
def estimator_agrees_on_normalisation(in_estimator: bool, in_grpo: bool) -> Verdict:
    """Requires the same value under both names of the setting."""
    if in_estimator == in_grpo:
        return None
    return f"is {show(in_estimator)}, but grpo.normalize_rewards is {show(in_grpo)}; set both to the same value"


@rule("grpo.adv_estimator.use_leave_one_out_baseline", "grpo.use_leave_one_out_baseline")
def estimator_agrees_on_baseline(in_estimator: bool, in_grpo: bool) -> Verdict:
    """Requires the same value under both names of the setting."""
    if in_estimator == in_grpo:
        return None
    return (
        f"is {show(in_estimator)}, but grpo.use_leave_one_out_baseline is {show(in_grpo)}; set both to the same value"
    )


@rule("grpo.skip_reference_policy_logprobs_calculation", "loss_fn.reference_policy_kl_penalty")
def skipped_reference_is_not_needed(skips: bool, penalty: float) -> Verdict:
    """Refuses to skip the reference policy's log-probs if the loss needs them."""
    if not skips or penalty == 0:
        return None
    return f"is true, which needs loss_fn.reference_policy_kl_penalty 0; found {penalty}; set either"


@rule("grpo.advantage_clip_low?", "grpo.advantage_clip_high?")
def advantage_bounds_are_in_order(low: float | None, high: float | None) -> Verdict:
    """Requires the lower bound of advantages to be below the upper one."""
    if low is None or high is None or low < high:
        return None
    return f"is {low}, but must be below grpo.advantage_clip_high ({high}); lower it, or raise that"


@rule(
    "grpo.reward_scaling.enabled",
    "grpo.reward_scaling.source_min",
    "grpo.reward_scaling.source_max",
    "grpo.reward_scaling.target_min",
    "grpo.reward_scaling.target_max",
)
def reward_scaling_has_its_ranges(
    enabled: bool, source_min: float, source_max: float, target_min: float, target_max: float
) -> Verdict:
    """Requires both ranges of the linear map to be ranges."""
    if not enabled:
        return None
    if source_min >= source_max or target_min > target_max:
        return (
            f"maps [{source_min}, {source_max}] to [{target_min}, {target_max}]; each range must go from its minimum "
            "to its maximum"
        )
    return None


_SHAPING = "grpo.reward_shaping"
_STOP_PROPERLY = f"{_SHAPING}.stop_properly_penalty_coef"
_OVERLONG = ("overlong_buffer_length", "overlong_buffer_penalty", "max_response_length")


@rule(f"{_SHAPING}.enabled", f"{_STOP_PROPERLY}?", *(f"{_SHAPING}.{key}?" for key in _OVERLONG))
def reward_shaping_has_its_numbers(enabled: bool, factor: float | None, *overlong: float | None) -> Verdict:
    """Requires the numbers of one of the two penalties."""
    if not enabled or factor is not None:
        return None
    absent = [key for key, value in zip(_OVERLONG, overlong, strict=True) if value is None]
    if not absent:
        return None
    return (
        f"is true, which needs {' and '.join(absent)}, or stop_properly_penalty_coef; set those of one penalty, or set "
        "it to false"
    )


@note(f"{_STOP_PROPERLY}?", f"{_SHAPING}.enabled", *(f"{_SHAPING}.{key}?" for key in _OVERLONG))
def one_penalty_counts(factor: float | None, enabled: bool, *overlong: float | None) -> Verdict:
    """Notes which penalty counts, since NeMo-RL's recipes inherit the numbers of the other."""
    given = [key for key, value in zip(_OVERLONG, overlong, strict=True) if value is not None]
    if not enabled or factor is None or not given:
        return None
    verb = "has" if len(given) == 1 else "have"
    return f"{factor} is the penalty in use; {', '.join(given)} of {_SHAPING} {verb} no effect"


@rule("loss_fn.sequence_level_importance_ratios", "loss_fn.token_level_loss")
def sequence_ratios_need_sequence_loss(sequence_ratios: bool, token_loss: bool) -> Verdict:
    """Refuses sequence-level ratios with a token-level loss: they weight whole samples, not tokens."""
    if not sequence_ratios or not token_loss:
        return None
    return "is true, which needs loss_fn.token_level_loss false; set either to false"


_TRUNCATION = "loss_fn.truncated_importance_sampling"


@rule(
    f"{_TRUNCATION}_type?",
    f"{_TRUNCATION}_ratio?",
    f"{_TRUNCATION}_ratio_min?",
    "loss_fn.use_importance_sampling_correction",
    "loss_fn.sequence_level_importance_ratios",
)
def truncation_has_its_bounds(
    kind: str | None, high: float | None, low: float | None, corrects: bool, of_sequences: bool
) -> Verdict:
    """Requires the bounds of the chosen type, and importance weights for them to bound."""
    if kind is None:
        given = "ratio" if high is not None else "ratio_min"
        return None if high is None and low is None else f"is null, but {_TRUNCATION}_{given} is set; name a type"
    if not corrects:
        return f"is {kind}, which needs loss_fn.use_importance_sampling_correction true"
    if high is None or (low is None and kind != "tis"):
        return f"is {kind}, which needs {_TRUNCATION}_ratio{'' if high is None else '_min'}"
    if low is not None and low > high:
        return f"{_TRUNCATION}_ratio_min", f"is {low}, above {_TRUNCATION}_ratio ({high})"
    if kind == "seq-mask-tis" and of_sequences:
        return "is seq-mask-tis, which weights single tokens; set loss_fn.sequence_level_importance_ratios to false"
    return None


@rule("loss_fn.disable_ppo_ratio", "loss_fn.force_on_policy_ratio", "loss_fn.sequence_level_importance_ratios")
def no_ratio_has_no_settings(disabled: bool, forced: bool, sequence_level: bool) -> Verdict:
    """Refuses to force or average a ratio that is disabled."""
    if not disabled or not (forced or sequence_level):
        return None
    other = "force_on_policy_ratio" if forced else "sequence_level_importance_ratios"
    return f"is true, so that loss_fn.{other} has no ratio to apply to; set one of them to false"


@rule(
    "loss_fn.use_cispo",
    "loss_fn.token_level_loss",
    "loss_fn.ratio_clip_c",
    "loss_fn.disable_ppo_ratio",
    "loss_fn.force_on_policy_ratio",
    "loss_fn.sequence_level_importance_ratios",
)
def cispo_weights_tokens(
    enabled: bool, token_loss: bool, dual_clip: float | None, disabled: bool, forced: bool, sequence_level: bool
) -> Verdict:
    """Refuses what NeMo-RL refuses with CISPO, which weights single tokens by their clipped ratio."""
    conflicts = {
        "token_level_loss true": not token_loss,
        "ratio_clip_c null": dual_clip is not None,
        "disable_ppo_ratio false": disabled,
        "force_on_policy_ratio false": forced,
        "sequence_level_importance_ratios false": sequence_level,
    }
    needed = [f"loss_fn.{setting}" for setting, conflict in conflicts.items() if conflict]
    if not enabled or not needed:
        return None
    return f"is true, which needs {' and '.join(needed)}; set that, or this to false"


@rule(
    "loss_fn.force_on_policy_ratio",
    "grpo.num_prompts_per_step",
    "grpo.num_generations_per_prompt",
    "policy.train_global_batch_size",
)
def forced_ratio_needs_one_update(forced: bool, prompts: int, generations: int, gbs: int) -> Verdict:
    """Refuses to force the ratio to 1 for several optimizer steps: after the first, the policy has changed."""
    if not forced or prompts * generations == gbs:
        return None
    return (
        f"is true, which needs one optimizer step per GRPO step: policy.train_global_batch_size ({gbs}) equal to "
        f"grpo.num_prompts_per_step x num_generations_per_prompt ({prompts * generations})"
    )
