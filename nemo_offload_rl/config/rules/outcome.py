"""Rules for validation, early stop, checkpoints and metrics."""

from typing import Any

from nemo_offload_rl.config.algorithms import AlgorithmSpec
from nemo_offload_rl.config.keys.absent_keys import splits_validation_data
from nemo_offload_rl.config.problems import show, show_choices
from nemo_offload_rl.config.rules.base import SECTION, SPEC, Verdict, rule
from nemo_offload_rl.config.schema.value_types import is_import_path
from nemo_offload_rl.metrics.names import validation_name, without_default_set


@rule(
    "data.validation?",
    "data.train",
    f"{SECTION}.val_period",
    f"{SECTION}.val_at_start",
    f"{SECTION}.val_at_end",
    SPEC,
)
def validation_has_data(
    validation: Any, train: dict[str, Any], period: int, at_start: bool, at_end: bool, spec: AlgorithmSpec
) -> Verdict:
    """Requires validation data for the validations that the recipe asks for.

    A class of the user's may have some, which is known once it has been called.
    """
    asked = {"val_period": period, "val_at_start": at_start, "val_at_end": at_end}
    first = next((name for name, value in asked.items() if value), None)
    if validation or splits_validation_data(train) or is_import_path(train["dataset_name"]) or first is None:
        return None
    return (
        f"is {show(validation)}, but {spec.name}.{first} is {show(asked[first])}; name validation data, set "
        "data.train.split_validation_size above 0, or set val_period to 0 and val_at_start and val_at_end to false"
    )


@rule("logger.num_val_samples_to_print?", SPEC)
def answers_are_sampled_where_they_are_printed(num: int | None, spec: AlgorithmSpec) -> Verdict:
    """Refuses to print answers for an algorithm whose validation samples none."""
    if not num or spec.name == "grpo":
        return None
    return f"is {num}, but validation of {spec.name} samples no answers; set it to 0 or delete it"


@rule(
    f"{SECTION}.stop_at_validation_metric?", f"{SECTION}.stop_at_validation_threshold?", f"{SECTION}.val_period", SPEC
)
def stop_target_is_whole(metric: str | None, threshold: float | None, period: int, spec: AlgorithmSpec) -> Verdict:
    """Requires an early stop to have a metric and its value."""
    if metric is None and threshold is None:
        return None
    if metric is None or threshold is None:
        return "stop_at_validation_metric and stop_at_validation_threshold must be set together; set both or neither"
    known = [f"val:{name}" for name in spec.validation_metrics]
    if validation_name(metric) not in known:
        return f"must be {show_choices(known)}; found {show(metric)}"
    return None if period > 0 else f"needs validation during the run; set {spec.name}.val_period above 0"


@rule("checkpointing.metric_name", "checkpointing.enabled", SPEC)
def checkpoint_metric_is_measured(metric: str | None, enabled: bool, spec: AlgorithmSpec) -> Verdict:
    """Requires checkpoints to be ranked by a metric that the algorithm measures."""
    if metric is None or not enabled or metric.startswith("train:"):
        return None
    known = [f"val:{name}" for name in spec.validation_metrics]
    if without_default_set(metric) in known:
        return None
    return f"must be {show_choices(known)}, train:NAME or null; found {show(metric)}"


@rule("logger.wandb_enabled", "logger.wandb?")
def wandb_has_its_names(enabled: bool, wandb: Any) -> Verdict:
    """Requires a project and a name for Weights & Biases."""
    return "is true, which needs logger.wandb with project and name" if enabled and wandb is None else None
