"""The section `checkpointing`: what is saved, when, and what is kept."""

from typing import Literal, NotRequired, TypedDict

from pydantic import with_config

from nemo_offload_rl.config.schema.value_types import STRICT, NonEmptyStr, PositiveFloat, PositiveInt


@with_config(STRICT)
class CheckpointingConfig(TypedDict):
    """Section `checkpointing`."""

    # Save checkpoints. Recommended: true.
    enabled: bool
    # Folder of the checkpoints; a run that finds some there resumes from the latest.
    checkpoint_dir: NonEmptyStr
    # Metric by which checkpoints are ranked, such as val:accuracy; null ranks them by age.
    metric_name: NonEmptyStr | None
    # Whether a larger value of that metric is better: true for val:accuracy, false for val:val_loss.
    higher_is_better: bool
    # Checkpoints that are kept; null keeps all. 1 or more; recommended 3.
    keep_top_k: PositiveInt | None
    # Steps between checkpoints. 1 or more; recommended a multiple of the validation period.
    save_period: PositiveInt
    # Save optimizer state too, without which a run cannot resume. Recommended: true.
    save_optimizer: bool
    # What follows where the newest checkpoint is not as it was written: error (the run ends and names the file) or
    # previous (it is set aside, and the run goes on from the newest that is whole). Recommended: error. Absent: error.
    on_damaged: NotRequired[Literal["error", "previous"]]
    # Seconds that a step and its checkpoint may take once SIGTERM or SIGHUP asks the run to end; then it stops where it
    # is. Above 0; recommended 10 less than the scheduler waits before it kills (Slurm's KillWait, Kubernetes'
    # terminationGracePeriodSeconds); null: as long as they take. Absent: as null.
    grace_period_s: NotRequired[PositiveFloat | None]
    # When the run saves and ends, whatever is left of it: days:hours:minutes:seconds from its first step on, such as
    # 00:03:45:00 for a Slurm job of four hours; restarts by cluster.max_restarts count in. It ends a step sooner where
    # the longest step so far, with its validation, a checkpoint that is being written, and the longest checkpoint so
    # far would not be done by then. The same command goes on. Null or absent: never.
    checkpoint_must_save_by: NotRequired[NonEmptyStr | None]
