"""The section `checkpointing`: what the run saves, when it saves, and which checkpoints it keeps."""

from typing import Annotated, Literal, NotRequired, TypedDict

from pydantic import with_config

from nemo_offload_rl.config.schema.value_types import (
    STRICT,
    IfAbsent,
    NonEmptyStr,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)


@with_config(STRICT)
class CheckpointingConfig(TypedDict):
    """Section `checkpointing`."""

    # Save checkpoints. Recommended: true.
    enabled: bool
    # Folder of the checkpoints; a run that finds checkpoints there resumes from the latest one.
    checkpoint_dir: NonEmptyStr
    # Metric by which checkpoints are ranked, such as val:accuracy; null ranks them by age.
    metric_name: NonEmptyStr | None
    # Whether a larger value of that metric is better: true for val:accuracy, false for val:val_loss.
    higher_is_better: bool
    # Number of checkpoints to keep of the steps that save_period divides: the best by metric_name, the newer of equals.
    # One whose metric is absent or NaN ranks below all others. The newest checkpoint stays beside them, whatever its
    # step. 0 or more; null keeps all of these steps; recommended 3.
    keep_top_k: NotRequired[Annotated[NonNegativeInt | None, IfAbsent(None)]]
    # Steps between checkpoints. 1 or more; recommended a multiple of the validation period.
    save_period: PositiveInt
    # Steps between further checkpoints, for runs that may fail: after a failure, fewer steps are lost. keep_top_k ranks
    # only those that save_period divides, too; of the others, ft_keep_latest_k are kept. 1 or more. Null: none.
    ft_save_period: NotRequired[Annotated[PositiveInt | None, IfAbsent(None)]]
    # Number of newest checkpoints to keep besides those of keep_top_k, whatever their step and metric. 0 or more;
    # recommended 1 or 2 with ft_save_period. Null: the newest, or all if keep_top_k is null.
    ft_keep_latest_k: NotRequired[Annotated[NonNegativeInt | None, IfAbsent(None)]]
    # Save optimizer state too, without which a run cannot resume. Recommended: true.
    save_optimizer: NotRequired[Annotated[bool, IfAbsent(True)]]
    # What a run does when the newest checkpoint is damaged, that is, differs from what was written: error (the run ends
    # and names the file) or previous (the run sets it aside and resumes from the newest intact one). Recommended:
    # error.
    on_damaged: NotRequired[Annotated[Literal["error", "previous"], IfAbsent("error")]]
    # Seconds that the current step and its checkpoint may take after SIGTERM or SIGHUP; then the run stops where it is.
    # Above 0; recommended 10 less than the scheduler waits before it kills the process (Slurm's KillWait, Kubernetes'
    # terminationGracePeriodSeconds); null for no limit.
    grace_period_s: NotRequired[Annotated[PositiveFloat | None, IfAbsent(None)]]
    # Time after which the run saves a checkpoint and ends, even if steps are left: days:hours:minutes:seconds from its
    # first step, such as 00:03:45:00 for a Slurm job of four hours; restarts by cluster.max_restarts are included. The
    # run ends a step earlier if the longest step so far with its validation, a checkpoint that is being written, and
    # the longest checkpoint so far would not be done by then. The same command resumes it. Null: never.
    checkpoint_must_save_by: NotRequired[Annotated[NonEmptyStr | None, IfAbsent(None)]]
