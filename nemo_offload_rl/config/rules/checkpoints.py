"""Rules for when and how checkpoints are written."""

from nemo_offload_rl.config.problems import show
from nemo_offload_rl.config.rules.base import MEGATRON, Verdict, note, rule
from nemo_offload_rl.config.upstream.durations import duration_s

MUST_SAVE_BY = "checkpointing.checkpoint_must_save_by"


@rule(f"{MUST_SAVE_BY}?")
def time_limits_are_durations(text: str | None) -> Verdict:
    """Requires a time limit in NeMo-RL's format with all four parts."""
    if text is None or duration_s(text) is not None:
        return None
    return f"must be days:hours:minutes:seconds above 0, such as '00:03:45:00'; found {show(text)}"


@note("checkpointing.ft_save_period?", "checkpointing.ft_keep_latest_k?", "checkpointing.keep_top_k")
def number_of_checkpoints_is_limited(period: int | None, num_newest: int | None, num_best: int | None) -> Verdict:
    """Notes that every fault-tolerance checkpoint stays on the disk."""
    if period is None or num_newest is not None or num_best is not None:
        return None
    return (
        f"is {period}, and every one of these checkpoints is kept, since checkpointing.ft_keep_latest_k and "
        "checkpointing.keep_top_k are null"
    )


@note(f"{MUST_SAVE_BY}?", "checkpointing.enabled")
def time_limits_save_with_checkpoints(text: str | None, enabled: bool) -> Verdict:
    """Notes that a time limit without checkpoints ends the run, as in NeMo-RL, but saves nothing."""
    if text is None or enabled:
        return None
    return f"{text} ends the run without a checkpoint, since checkpointing.enabled is false"


@rule(f"{MEGATRON}.checkpoint.dist_ckpt_optim_fully_reshardable?")
def fully_reshardable_checkpoints_are_refused(enabled: bool | None) -> Verdict:
    """Refuses a format from which megatron-core 0.19.2 silently restores wrong optimizer state."""
    if not enabled:
        return None
    return (
        "is true, but megatron-core 0.19.2 restores wrong optimizer state from fully_reshardable checkpoints when a "
        "model has several gradient buckets; set it to false, which saves dp_reshardable checkpoints"
    )
