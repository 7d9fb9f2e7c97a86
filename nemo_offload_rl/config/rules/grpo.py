"""Rules for GRPO and DPO (groups of answers, advantages, the loss), and for their data and environments."""

from typing import Any

from nemo_offload_rl.config.keys.tree import datasets_of, splits_validation_data
from nemo_offload_rl.config.problems import show, show_choices
from nemo_offload_rl.config.rules.base import RuleResult, note, rule
from nemo_offload_rl.config.schema.value_types import is_import_path
from nemo_offload_rl.metrics.names import validation_name
from nemo_offload_rl.named_datasets import CONVERSATIONS, NAMED_DATASETS

_STEP = ("grpo.num_prompts_per_step", "grpo.num_generations_per_prompt", "policy.train_global_batch_size")
_SHAPING, _TRUNCATION = "grpo.reward_shaping", "loss_fn.truncated_importance_sampling"
_AHEAD = "grpo.async_grpo.enabled"
_OVERLONG = ("overlong_buffer_length", "overlong_buffer_penalty", "max_response_length")


@rule(*_STEP)
def grpo_step_samples(prompts: int, generations: int, gbs: int) -> RuleResult:
    """Requires a GRPO step to be a whole number of optimizer steps."""
    if (prompts * generations) % gbs == 0:
        return None
    return (
        f"{prompts} prompts x grpo.num_generations_per_prompt {generations} = {prompts * generations} samples are not "
        f"a multiple of policy.train_global_batch_size ({gbs}); change either"
    )


@rule("grpo.num_generations_per_prompt")
def grpo_num_generations(generations: int) -> RuleResult:
    """Refuses a single answer, whose advantage over the others of its prompt is always 0."""
    return None if generations > 1 else "must be 2 or more, since the advantage of a single answer is 0; found 1"


@rule("grpo.batch_multiplier?", "grpo.use_dynamic_sampling", "grpo.num_prompts_per_step")
def grpo_batch_multiplier(multiplier: float | None, dynamic: bool, prompts: int) -> RuleResult:
    """Refuses a multiplier without dynamic sampling, which trains on all it samples, and one that leaves no prompt."""
    if multiplier in (None, 1) or (dynamic and prompts * multiplier >= 1):
        return None
    few = f"makes no prompt of grpo.num_prompts_per_step ({prompts}); raise either"
    return f"is {multiplier:g}, which {few if dynamic else 'needs grpo.use_dynamic_sampling true; set it to 1'}"


@rule(
    "grpo.val_num_generations_per_prompt?",
    "grpo.stop_at_validation_metric?",
    "checkpointing.metric_name",
    "checkpointing.enabled",
)
def grpo_pass_k(generations: int | None, target: str | None, metric: str | None, saves: bool) -> RuleResult:
    """Refuses pass@k as a metric if each problem has a single answer."""
    names = [target, metric if saves else None]
    if (generations or 1) > 1 or not any(validation_name(name or "") == "val:pass_k" for name in names):
        return None
    return "must be 2 or more for val:pass_k to be measured; found 1"


@rule("grpo.debug.replay_rollouts?", "grpo.debug.save_rollouts?", "policy.generation.colocated.enabled")
def grpo_replay_rollouts(replayed: str | None, saved: str | None, colocated: bool) -> RuleResult:
    """Refuses to save rollouts that are replayed, and to leave GPUs to an engine that is not started."""
    if replayed is None:
        return None
    if saved is not None:
        return f"is {show(replayed)}, and its rollouts are there already; set grpo.debug.save_rollouts to null"
    if not colocated:
        return (
            f"is {show(replayed)}, and no engine is started; set policy.generation.colocated.enabled to true, and "
            "cluster.gpus_per_node and num_nodes to those of the policy alone"
        )
    return None


@rule(_AHEAD, "grpo.debug.replay_rollouts?")
def grpo_async_replayed(enabled: bool, replayed: str | None) -> RuleResult:
    """Refuses to sample ahead where rollouts are replayed."""
    return "is true, but replayed rollouts are not sampled; set it to false" if enabled and replayed else None


@rule("policy.residency.generation_weights?", _AHEAD, "policy.generation.colocated.enabled")
def grpo_async_generation_weights(where: str | None, enabled: bool, colocated: bool) -> RuleResult:
    """Refuses an engine that frees its memory for training, if it samples meanwhile."""
    if not enabled or not colocated or where in (None, "gpu"):
        return None
    return f"is {where}, but {_AHEAD} has the engine generate while the policy trains; set it to null"


@rule(_AHEAD, "grpo.async_grpo.max_trajectory_age_steps", "loss_fn.use_importance_sampling_correction")
def grpo_async_correction(enabled: bool, age: int, corrects: bool) -> RuleResult:
    """Requires the loss to correct for answers of older weights, as NeMo-RL does."""
    if not enabled or age == 0 or corrects:
        return None
    return (
        "is true, so that older weights than the policy's sample the answers; set "
        "loss_fn.use_importance_sampling_correction to true"
    )


@note(
    _AHEAD,
    "policy.generation.colocated.enabled",
    "policy.megatron_cfg.tensor_model_parallel_size",
    "policy.generation.vllm_cfg.tensor_parallel_size?",
)
def grpo_async_tensor_parallel(enabled: bool, colocated: bool, policy_tp: int, engine_tp: int | None) -> RuleResult:
    """Notes that GPUs which take turns between policy and engine make exchanges between them slow."""
    if not enabled or not colocated or max(policy_tp, engine_tp or 1) == 1:
        return None
    return (
        "is true on the policy's GPUs, with tensor parallelism: each GPU takes turns between the two, so that each "
        "exchange waits for the other GPUs' turns; a step on two H200s took 1.7 times as long as with false "
        "(docs/results/async_grpo.md)"
    )


@rule("grpo.adv_estimator.normalize_rewards", "grpo.normalize_rewards")
@rule("grpo.adv_estimator.use_leave_one_out_baseline", "grpo.use_leave_one_out_baseline")
def grpo_adv_estimator(in_estimator: bool, in_grpo: bool) -> RuleResult:
    """Requires the same value under both names of a setting."""
    if in_estimator == in_grpo:
        return None
    return f"is {show(in_estimator)}, but the key of the same name in grpo is {show(in_grpo)}; make them agree"


@rule(f"{_SHAPING}.enabled", f"{_SHAPING}.stop_properly_penalty_coef?", *(f"{_SHAPING}.{key}?" for key in _OVERLONG))
def grpo_reward_shaping(enabled: bool, factor: float | None, *overlong: float | None) -> RuleResult:
    """Requires the numbers of one of the two penalties."""
    absent = [key for key, value in zip(_OVERLONG, overlong, strict=True) if value is None]
    if not enabled or factor is not None or not absent:
        return None
    return f"is true, which needs {' and '.join(absent)}, or stop_properly_penalty_coef; set these, or this to false"


@rule(f"{_TRUNCATION}_type?", f"{_TRUNCATION}_ratio_min?", "loss_fn.sequence_level_importance_ratios")
def loss_truncated_importance_sampling(kind: str | None, low: float | None, of_sequences: bool) -> RuleResult:
    """Requires the lower bound of the types that have one, and single tokens for seq-mask-tis to weight."""
    if kind in ("icepop", "seq-mask-tis") and low is None:
        return f"is {kind}, which needs {_TRUNCATION}_ratio_min; set that"
    if kind == "seq-mask-tis" and of_sequences:
        return "is seq-mask-tis, which weights single tokens; set loss_fn.sequence_level_importance_ratios to false"
    return None


@rule("loss_fn.force_on_policy_ratio", *_STEP)
def loss_force_on_policy_ratio(forced: bool, prompts: int, generations: int, gbs: int) -> RuleResult:
    """Refuses to force the ratio to 1 for several optimizer steps: after the first, the policy has changed."""
    if not forced or prompts * generations == gbs:
        return None
    return (
        f"is true, which needs policy.train_global_batch_size ({gbs}) to be num_prompts_per_step x "
        f"num_generations_per_prompt ({prompts * generations}); change either"
    )


@rule("dpo.preference_loss_weight", "dpo.sft_loss_weight")
def dpo_loss_weights(preference: float, sft: float) -> RuleResult:
    """Refuses two loss weights of 0, with which nothing is trained."""
    return None if preference > 0 or sft > 0 else "is 0, and so is dpo.sft_loss_weight; set one of them above 0"


@rule("data.default.env_name?", "env")
def env_name(name: str | None, env: dict[str, Any]) -> RuleResult:
    """Requires GRPO to name an environment that judges its answers."""
    if name in env:
        return None
    found = "missing; it names the section of env that judges answers" if name is None else f"names {show(name)}"
    return f"{found}: env has {show_choices(env) if env else 'no section'}"


@rule("data.default.env_name?", "env")
def env_reward(used: str | None, env: dict[str, Any]) -> RuleResult:
    """Requires the environment in use to have either reward or math_verify_impl, and a Python reward its function."""
    section = env.get(used) if used else None
    if section is None:
        return None
    reward, math = section.get("reward"), section["math_verify_impl"]
    if (reward is None) == (math is None):
        return f"env.{used}", (
            "must have either reward (exact_match, numeric_match or python) or math_verify_impl (hf_math_verify or "
            f"dapo_math_verify); found reward {show(reward)}, math_verify_impl {show(math)}"
        )
    if (reward == "python") != (section.get("reward_function") is not None):
        return f"env.{used}.reward", "must be python with reward_function, and only with it; change either"
    return None


@rule("data")
def dataset_keys(data: dict[str, Any]) -> RuleResult:
    """Requires values that the named dataset has, and refuses keys that only other datasets read."""
    for path, section in {**datasets_of(data, "train"), **datasets_of(data, "validation")}.items():
        name = section["dataset_name"]
        if name not in NAMED_DATASETS:
            continue
        dataset = NAMED_DATASETS[name]
        for key, values in (("split", dataset.splits), ("output_key", dataset.output_keys)):
            if key in section and section[key] not in values:
                remedy = f"must be {show_choices(values)}" if values else "must be deleted"
                return f"{path}.{key}", f"{remedy} for {name}; found {show(section[key])}"
        if "repeat" in section and dataset.repeat is None:
            return f"{path}.repeat", f"must be deleted for {name}, which does not read it"
        if "max_samples" in section and not dataset.reads_max_samples:
            return f"{path}.max_samples", f"must be deleted for {name}, which does not read it"
        prompt_file = (data["default"] | section).get("system_prompt_file")
        if name in CONVERSATIONS and prompt_file is not None:
            return f"{path}.system_prompt_file", f"must be null for {name}, whose rows have their own system messages"
    return None


@rule("data")
def dataset_default_keys(data: dict[str, Any]) -> RuleResult:
    """Refuses settings of a class of the user's that would be read from data.default alone."""
    for path, section in {**datasets_of(data, "train"), **datasets_of(data, "validation")}.items():
        for key in ("env_name", "processor"):
            if key in section:
                return f"{path}.{key}", f"is read from data.default alone; write data.default.{key} instead"
    return None


@rule("data.train.split_validation_size?", "data.train.seed?", "data.train.dataset_name?")
def dataset_split_seed(size: float | None, seed: int | None, name: str | None) -> RuleResult:
    """Requires a seed for the split, so that resumed runs, on any machine, split the data in the same way."""
    # Named datasets have a default seed, or are not split; a class of the user's splits its data itself.
    if seed is not None or not size or name in NAMED_DATASETS or is_import_path(name or ""):
        return None
    return f"is {size}, which needs data.train.seed, so that resumed runs split the data in the same way; set that"


@note("data.train.split_validation_size?", "data.train.dataset_name?")
def dataset_never_split(size: float | None, name: str | None) -> RuleResult:
    """Notes that nothing is split off a dataset that NeMo-RL does not split either."""
    if not size or name is None or splits_validation_data({"dataset_name": name, "split_validation_size": size}):
        return None
    return f"has no effect: {name} is not split, as in NeMo-RL"


@rule("data")
def dataset_validation_split(data: dict[str, Any]) -> RuleResult:
    """Refuses to split validation data, of which the rest would be lost."""
    for path, section in datasets_of(data, "validation").items():
        if section.get("split_validation_size") and not is_import_path(section["dataset_name"]):
            return f"{path}.split_validation_size", "is set, but only data.train is split; delete it"
    return None
