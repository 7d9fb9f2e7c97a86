"""The sections of a run as a whole: `cluster`, `logger` and `checkpointing`."""

from typing import Annotated, Literal, NotRequired, TypedDict

from pydantic import Field, with_config

from nemo_offload_rl.config.schema.value_types import (
    STRICT,
    IfAbsent,
    NonEmptyStr,
    NonNegativeInt,
    Port,
    PositiveFloat,
    PositiveInt,
)


@with_config(STRICT)
class ClusterConfig(TypedDict):
    """Section `cluster`."""

    # GPUs of each node; without GPUs, the ranks (processes) of each node. 1 or more.
    gpus_per_node: PositiveInt
    # Number of nodes. 1 or more.
    num_nodes: PositiveInt
    # Lowest port for the rendezvous of the ranks, and of an engine's processes. 1024 to 65535. Absent: any free port.
    master_port_range_low: NotRequired[Port]
    # Highest port for the rendezvous of the ranks, and of an engine's processes. 1024 to 65535. Absent: any free port.
    master_port_range_high: NotRequired[Port]
    # Number of consecutive nodes that must be in one NVLink domain, according to their Ray label nvidia.com/gpu.clique.
    # 1 or more, a divisor of num_nodes; null and 1 require nothing.
    segment_size: NotRequired[Annotated[PositiveInt | None, IfAbsent(None)]]
    # How many times a run restarts by itself from its newest checkpoint after it lost a process or a node; above 0 it
    # needs checkpointing.enabled and checkpointing.save_optimizer. 0 or more.
    max_restarts: NotRequired[Annotated[NonNegativeInt, IfAbsent(0)]]


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
