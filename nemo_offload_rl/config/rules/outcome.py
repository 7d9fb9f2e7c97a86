"""Rules for validation, early stop, checkpoints and metrics."""

from typing import Any

from nemo_offload_rl.config.algorithms import AlgorithmSpec
from nemo_offload_rl.config.keys.tree import splits_validation_data
from nemo_offload_rl.config.megatron import DeviceSplit, checked_split
from nemo_offload_rl.config.problems import show, show_choices
from nemo_offload_rl.config.rules.base import COLOCATED, GPUS, NODES, SECTION, SPEC, RuleResult, note, rule
from nemo_offload_rl.config.schema.value_types import is_import_path
from nemo_offload_rl.config.upstream import duration_s
from nemo_offload_rl.metrics.names import validation_name, without_default_set

_MUST_SAVE_BY = "checkpointing.checkpoint_must_save_by"


@rule(
    "data.validation?",
    "data.train",
    f"{SECTION}.val_period",
    f"{SECTION}.val_at_start",
    f"{SECTION}.val_at_end",
    SPEC,
)
def validation_data(
    validation: Any, train: dict[str, Any], period: int, at_start: bool, at_end: bool, spec: AlgorithmSpec
) -> RuleResult:
    """Requires validation data for the validations that the recipe asks for.

    A class of the user's may have some, which is known once it has been called.
    """
    asked = {"val_period": period, "val_at_start": at_start, "val_at_end": at_end}
    first = next((name for name, value in asked.items() if value), None)
    if validation or splits_validation_data(train) or is_import_path(train["dataset_name"]) or first is None:
        return None
    can_split = splits_validation_data({**train, "split_validation_size": 1})
    split = "set data.train.split_validation_size above 0, " if can_split else ""
    return (
        f"is {show(validation)}, but {spec.name}.{first} is {show(asked[first])}; name validation data, {split}"
        "or set val_period to 0 and val_at_start and val_at_end to false"
    )


@rule("logger.num_val_samples_to_print?", SPEC)
def validation_printed_samples(num: int | None, spec: AlgorithmSpec) -> RuleResult:
    """Refuses to print answers for an algorithm whose validation samples none."""
    if not num or spec.name == "grpo":
        return None
    return f"is {num}, but validation of {spec.name} samples no answers; set it to 0"


@rule("policy.logprob_chunk_size?", SPEC)
def logprob_chunk_size(chunk: int | None, spec: AlgorithmSpec) -> RuleResult:
    """Refuses a chunk size for an algorithm that computes log-probs only in training and would not read it."""
    if chunk is None or spec.computes_logprobs:
        return None
    return f"is {chunk}, which {spec.name} does not read; set it to null, and use_fused_linear_logprobs to true"


@rule(
    f"{SECTION}.stop_at_validation_metric?", f"{SECTION}.stop_at_validation_threshold?", f"{SECTION}.val_period", SPEC
)
def validation_stop_target(metric: str | None, threshold: float | None, period: int, spec: AlgorithmSpec) -> RuleResult:
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
def checkpoint_metric(metric: str | None, enabled: bool, spec: AlgorithmSpec) -> RuleResult:
    """Requires checkpoints to be ranked by a metric that the algorithm measures."""
    known = [f"val:{name}" for name in spec.validation_metrics]
    if metric is None or not enabled or metric.startswith("train:") or without_default_set(metric) in known:
        return None
    return f"must be {show_choices(known)}, train:NAME or null; found {show(metric)}"


@note("checkpointing.save_period", "checkpointing.enabled", "checkpointing.metric_name", f"{SECTION}.val_period")
def checkpoint_metric_period(save: int, enabled: bool, metric: str | None, period: int) -> RuleResult:
    """Notes that a checkpoint between validations has no current validation metric."""
    if not enabled or metric is None or not metric.startswith("val:") or (period and save % period == 0):
        return None
    if not period:
        return f"{save} saves checkpoints without {metric}: val_period is 0, so at most the last has it (val_at_end)"
    return f"{save} is not a multiple of val_period ({period}), so some checkpoints are saved without {metric}"


@rule("logger.profile?", GPUS, NODES, COLOCATED)
def logger_profile(profile: dict[str, Any] | None, gpus: int, nodes: int, apart: dict[str, Any] | None) -> RuleResult:
    """Refuses a profile that would record nothing."""
    if profile is None:
        return None
    first, last = profile["steps"]
    if first > last:
        return f"has steps {show([first, last])}, whose first is behind the last; set them to {show([last, first])}"
    if not (profile["trace"] or profile["memory"] or profile["nvtx"]):
        return "has trace, memory and nvtx false, and would record nothing; set one to true, or the section to null"
    split = checked_split(gpus, nodes, apart)
    most = max(profile["ranks"])
    if isinstance(split, DeviceSplit) and most >= split.policy_ranks:  # another rule reports the other case
        return f"has rank {most}, but the policy has ranks 0 to {split.policy_ranks - 1}; choose among these"
    return None


@rule(f"{_MUST_SAVE_BY}?")
def checkpoint_must_save_by(text: str | None) -> RuleResult:
    """Requires a time limit in NeMo-RL's format with all four parts."""
    if text is None or duration_s(text) is not None:
        return None
    return f"must be days:hours:minutes:seconds above 0, such as '00:03:45:00'; found {show(text)}"


@note(f"{_MUST_SAVE_BY}?", "checkpointing.enabled")
def checkpoint_must_save_by_disabled(text: str | None, enabled: bool) -> RuleResult:
    """Notes that a time limit without checkpoints ends the run, as in NeMo-RL, but saves nothing."""
    if text is None or enabled:
        return None
    return f"{text} ends the run without a checkpoint, since checkpointing.enabled is false"


@note("checkpointing.ft_save_period?", "checkpointing.ft_keep_latest_k?", "checkpointing.keep_top_k")
def checkpoint_ft_save_period(period: int | None, num_newest: int | None, num_best: int | None) -> RuleResult:
    """Notes that every fault-tolerance checkpoint stays on the disk."""
    if period is None or num_newest is not None or num_best is not None:
        return None
    return f"is {period}, and all of these checkpoints stay, since ft_keep_latest_k and keep_top_k are null"
