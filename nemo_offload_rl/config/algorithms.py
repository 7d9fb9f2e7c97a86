"""The registry of algorithms: one spec for each, read by validation, the planner and the run."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from nemo_offload_rl.config.schema import DPOMasterConfig, GRPOMasterConfig, SFTMasterConfig
from nemo_offload_rl.residency.table import Phase


@dataclass(frozen=True)
class AlgorithmSpec:
    """Describes an algorithm to validation, the planner and the run.

    Attributes:
        name: the section that identifies its recipes.
        module: the module with ``prepare(config) -> run.setup.Preparation``; imported when a run is prepared.
        schema: the TypedDict that its recipes are checked against.
        phases: the phases of a step, in order; the planner follows them.
        validation_metrics: names of the metrics that its ``validate`` measures; recipes write ``val:NAME``.
        computes_logprobs: whether a step has log-prob passes outside of training, with their own micro-batch size.
        has_reference: whether a validated recipe keeps reference weights.
        group_size: rows of a sample: consecutive rows of a batch that belong together, such as a chosen and a rejected
            answer, and are never separated; 1 where each row is a sample. Batch sizes in recipes count samples.
        scores_policy: whether log-prob passes of a validated recipe's step are of the policy, too, and not of the
            reference alone.
    """

    name: str
    module: str
    schema: type
    phases: tuple[Phase, ...]
    validation_metrics: tuple[str, ...]
    computes_logprobs: bool
    has_reference: Callable[[Mapping[str, Any]], bool]
    group_size: int
    scores_policy: Callable[[Mapping[str, Any]], bool] = lambda config: True


def _grpo_scores_policy(config: Mapping[str, Any]) -> bool:
    checks_sampler = config["grpo"]["seq_logprob_error_threshold"] is not None
    return checks_sampler or not config["loss_fn"]["force_on_policy_ratio"]


_SPECS = (
    AlgorithmSpec(
        name="grpo",
        module="nemo_offload_rl.algorithms.grpo",
        schema=GRPOMasterConfig,
        phases=(Phase.LOGPROB, Phase.TRAIN, Phase.REFIT, Phase.GENERATE),
        validation_metrics=("accuracy", "full_reward", "num_unjudged_answers", "mean_gen_tokens_per_sample", "pass_k"),
        computes_logprobs=True,
        has_reference=lambda config: bool(config["loss_fn"]["reference_policy_kl_penalty"] != 0),
        group_size=1,
        scores_policy=_grpo_scores_policy,
    ),
    AlgorithmSpec(
        name="sft",
        module="nemo_offload_rl.algorithms.sft",
        schema=SFTMasterConfig,
        phases=(Phase.TRAIN, Phase.LOGPROB),  # training in a step, log-probs in a validation
        validation_metrics=("val_loss", "answer_probability"),
        computes_logprobs=False,
        has_reference=lambda config: False,
        group_size=1,
    ),
    AlgorithmSpec(
        name="dpo",
        module="nemo_offload_rl.algorithms.dpo",
        schema=DPOMasterConfig,
        phases=(Phase.LOGPROB, Phase.TRAIN),
        validation_metrics=(
            "loss",
            "accuracy",
            "preference_loss",
            "sft_loss",
            "rewards_chosen_mean",
            "rewards_rejected_mean",
            "rewards_margin_mean",
            "logprobs_chosen_mean",
            "logprobs_rejected_mean",
            "num_overlong_pairs",
        ),
        computes_logprobs=True,
        has_reference=lambda config: True,
        group_size=2,
        scores_policy=lambda config: False,  # training computes its log-probs
    ),
)
ALGORITHMS: Mapping[str, AlgorithmSpec] = MappingProxyType({spec.name: spec for spec in _SPECS})
