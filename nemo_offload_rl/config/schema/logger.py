"""The section `logger`: where metrics go."""

from typing import NotRequired, TypedDict

from pydantic import with_config

from nemo_offload_rl.config.schema.value_types import STRICT, NonEmptyStr


@with_config(STRICT)
class WandbConfig(TypedDict):
    """Section `logger.wandb`, read only with wandb_enabled."""

    # Project that the run belongs to.
    project: NonEmptyStr
    # Name of the run.
    name: NonEmptyStr


@with_config(STRICT)
class LoggerConfig(TypedDict):
    """Section `logger`."""

    # Folder of the run folders, each with metrics.jsonl, the log and the picture of the run.
    log_dir: NonEmptyStr
    # Also write TensorBoard files, into the run folder. Recommended: true.
    tensorboard_enabled: bool
    # Also send metrics to Weights & Biases; needs the extra `wandb`. Recommended: false.
    wandb_enabled: bool
    # Weights & Biases. Absent: wandb_enabled is false.
    wandb: NotRequired[WandbConfig]
