"""Validation, early stop, checkpoints, metrics."""

from typing import Any

from nemo_offload_rl.config.problems import show, show_choices
from nemo_offload_rl.config.rules.base import Verdict, rule

# What a validation measures; a recipe writes val:NAME.
VALIDATION_METRICS = {
    "grpo": ("accuracy", "reward", "mean_gen_tokens_per_sample"),
    "sft": ("val_loss", "answer_probability"),
}


@rule("data.validation?", "grpo.val_period", "grpo.val_at_start", "grpo.val_at_end")
def grpo_validation_has_data(validation: Any, period: int, at_start: bool, at_end: bool) -> Verdict:
    """A validation needs problems."""
    return _has_data(validation, "grpo", period, at_start, at_end)


@rule("data.validation?", "sft.val_period", "sft.val_at_start", "sft.val_at_end")
def sft_validation_has_data(validation: Any, period: int, at_start: bool, at_end: bool) -> Verdict:
    """A validation needs problems."""
    return _has_data(validation, "sft", period, at_start, at_end)


def _has_data(validation: Any, section: str, period: int, at_start: bool, at_end: bool) -> Verdict:
    asked = {"val_period": period, "val_at_start": at_start, "val_at_end": at_end}
    first = next((name for name, value in asked.items() if value), None)
    if validation is not None or first is None:
        return None
    return (
        f"is null, but {section}.{first} is {show(asked[first])}; name validation data, or set val_period to 0 and "
        "val_at_start and val_at_end to false"
    )


@rule("grpo.stop_at_validation_metric?", "grpo.stop_at_validation_threshold?", "grpo.val_period", "grpo.val_at_end")
def grpo_stop_target_is_whole(metric: str | None, threshold: float | None, period: int, at_end: bool) -> Verdict:
    """An early stop names a metric and its value."""
    return _stop_target("grpo", metric, threshold, period)


@rule("sft.stop_at_validation_metric?", "sft.stop_at_validation_threshold?", "sft.val_period", "sft.val_at_end")
def sft_stop_target_is_whole(metric: str | None, threshold: float | None, period: int, at_end: bool) -> Verdict:
    """An early stop names a metric and its value."""
    return _stop_target("sft", metric, threshold, period)


def _stop_target(section: str, metric: str | None, threshold: float | None, period: int) -> Verdict:
    if metric is None and threshold is None:
        return None
    if metric is None or threshold is None:
        return "stop_at_validation_metric and stop_at_validation_threshold come together; give both or neither"
    known = [f"val:{name}" for name in VALIDATION_METRICS[section]]
    if metric not in known:
        return f"must be {show_choices(known)}; found {show(metric)}"
    return None if period > 0 else f"needs validation during the run; set {section}.val_period above 0"


@rule("checkpointing.metric_name", "checkpointing.enabled", "grpo?", "sft?")
def checkpoint_metric_is_measured(metric: str | None, enabled: bool, grpo: Any, sft: Any) -> Verdict:
    """Checkpoints are ranked by something that the algorithm measures."""
    if metric is None or not enabled or metric.startswith("train:"):
        return None
    known = [f"val:{name}" for name in VALIDATION_METRICS["grpo" if grpo is not None else "sft"]]
    return None if metric in known else f"must be {show_choices(known)}, train:NAME or null; found {show(metric)}"


@rule("logger.wandb_enabled", "logger.wandb?")
def wandb_has_its_names(enabled: bool, wandb: Any) -> Verdict:
    """Weights & Biases asks for a project and a name."""
    return "is true, which needs logger.wandb with project and name" if enabled and wandb is None else None
