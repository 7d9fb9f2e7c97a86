"""The schema of recipes: one TypedDict for each section, one comment for each key, and no defaults."""

from typing import NotRequired, TypedDict

from pydantic import with_config

from nemo_offload_rl.config.schema.algorithm_sections import (
    DPOConfig,
    GRPOConfig,
    LossConfig,
    SFTConfig,
    WarmStartConfig,
)
from nemo_offload_rl.config.schema.data import DataConfig, EnvConfig, PreferenceDataConfig, SFTDataConfig
from nemo_offload_rl.config.schema.policy import GRPOPolicyConfig, PolicyConfig
from nemo_offload_rl.config.schema.run import CheckpointingConfig, ClusterConfig, LoggerConfig
from nemo_offload_rl.config.schema.value_types import STRICT


@with_config(STRICT)
class GRPOMasterConfig(TypedDict):
    """A GRPO recipe."""

    # The algorithm.
    grpo: GRPOConfig
    # The policy-gradient loss.
    loss_fn: LossConfig
    # The model that GRPO trains and samples from.
    policy: GRPOPolicyConfig
    # Problems and their reference answers.
    data: DataConfig
    # The environments that judge answers, one section each; `data.default.env_name` names the one in use.
    env: dict[str, EnvConfig]
    # Nodes and GPUs of the run.
    cluster: ClusterConfig
    # Where the run writes its metrics.
    logger: LoggerConfig
    # What the run saves, and when.
    checkpointing: CheckpointingConfig
    # An SFT run that comes first. Absent: GRPO starts from policy.model_name itself.
    warm_start: NotRequired[WarmStartConfig]


@with_config(STRICT)
class SFTMasterConfig(TypedDict):
    """An SFT recipe."""

    # The algorithm.
    sft: SFTConfig
    # The model that is trained.
    policy: PolicyConfig
    # Problems and their answers.
    data: SFTDataConfig
    # Nodes and GPUs of the run.
    cluster: ClusterConfig
    # Where the run writes its metrics.
    logger: LoggerConfig
    # What the run saves, and when.
    checkpointing: CheckpointingConfig


@with_config(STRICT)
class DPOMasterConfig(TypedDict):
    """A DPO recipe."""

    # The algorithm.
    dpo: DPOConfig
    # The model that is trained; its initial weights are the reference.
    policy: PolicyConfig
    # Pairs of a chosen and a rejected answer.
    data: PreferenceDataConfig
    # Nodes and GPUs of the run.
    cluster: ClusterConfig
    # Where the run writes its metrics.
    logger: LoggerConfig
    # What the run saves, and when.
    checkpointing: CheckpointingConfig
    # An SFT run that comes first. Absent: DPO starts from policy.model_name itself.
    warm_start: NotRequired[WarmStartConfig]


MasterConfig = DPOMasterConfig | GRPOMasterConfig | SFTMasterConfig

__all__ = ["DPOMasterConfig", "GRPOMasterConfig", "MasterConfig", "PolicyConfig", "SFTMasterConfig"]
