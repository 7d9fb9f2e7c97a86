"""The section `logger`: where the run writes its metrics."""

from typing import Annotated, NotRequired, TypedDict

from pydantic import Field, with_config

from nemo_offload_rl.config.schema.value_types import (
    STRICT,
    IfAbsent,
    NonEmptyStr,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)


@with_config(STRICT)
class WandbConfig(TypedDict):
    """Section `logger.wandb`, read only with wandb_enabled."""

    # Project that the run belongs to.
    project: NonEmptyStr
    # Name of the run.
    name: NonEmptyStr
    # User or team that owns the project. Absent: the default of the user's wandb account.
    entity: NotRequired[NonEmptyStr]


@with_config(STRICT)
class GpuMonitoringConfig(TypedDict):
    """Section `logger.gpu_monitoring`, read only with monitor_gpus."""

    # Seconds between two readings of a GPU. Above 0; recommended 10.
    collection_interval: NotRequired[Annotated[PositiveFloat, IfAbsent(10)]]
    # Seconds between two collections of the nodes' readings by the driver; a step's metrics contain the readings
    # collected by then. Above 0; recommended the value of collection_interval.
    flush_interval: NotRequired[Annotated[PositiveFloat, IfAbsent(10)]]


@with_config(STRICT)
class ProfileConfig(TypedDict):
    """Section `logger.profile`: records chosen steps, in files below profile/ in the run folder."""

    # The first and the last step to record: [first, last]. Recommended: [3, 4], since the first steps are slower.
    steps: Annotated[list[PositiveInt], Field(min_length=2, max_length=2)]
    # Ranks of the policy that record. Recommended: [0].
    ranks: NotRequired[Annotated[list[NonNegativeInt], Field(min_length=1), IfAbsent([0])]]
    # Write torch.profiler's trace of each step, for Perfetto: one file for each rank, and one with the driver's phases.
    # Recommended: true.
    trace: NotRequired[Annotated[bool, IfAbsent(True)]]
    # Write a snapshot of torch's CUDA allocator after each step, with its history of allocations, for
    # https://docs.pytorch.org/memory_viz; also when a step runs out of memory. Off without a GPU. Recommended: false.
    memory: NotRequired[Annotated[bool, IfAbsent(False)]]
    # Mark the driver's phases and the ranks' verbs by NVTX ranges, for Nsight Systems. Off without a GPU. Recommended:
    # false.
    nvtx: NotRequired[Annotated[bool, IfAbsent(False)]]


@with_config(STRICT)
class LoggerConfig(TypedDict):
    """Section `logger`."""

    # Folder of the run folders, each with metrics.jsonl, the log, the pictures and the page of the run.
    log_dir: NonEmptyStr
    # Also write TensorBoard files to the run folder. Recommended: true.
    tensorboard_enabled: bool
    # Also send metrics to Weights & Biases; needs the extra `wandb`. Recommended: false.
    wandb_enabled: bool
    # Weights & Biases. Absent: allowed while wandb_enabled is false.
    wandb: NotRequired[WandbConfig]
    # Record utilization, memory, power and temperature of each GPU of each node in the metrics, read through NVML
    # during the run. Needs the package nvidia-ml-py, which the extra `te` installs. Recommended: true.
    monitor_gpus: NotRequired[Annotated[bool, IfAbsent(False)]]
    # Number of answers of each GRPO validation that are printed, logged and written to TensorBoard's texts: half of
    # them have the highest rewards, the other half the lowest. 0 or more; recommended 4.
    num_val_samples_to_print: NotRequired[Annotated[NonNegativeInt, IfAbsent(0)]]
    # How often GPUs are read. Absent: every 10 seconds.
    gpu_monitoring: NotRequired[Annotated[GpuMonitoringConfig, IfAbsent({})]]
    # Profiles of chosen steps. Null: none, at no cost.
    profile: NotRequired[Annotated[ProfileConfig | None, IfAbsent(None)]]
