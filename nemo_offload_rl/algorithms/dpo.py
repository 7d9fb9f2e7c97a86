"""Implements DPO, which moves the policy towards chosen answers and away from rejected ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from nemo_offload_rl.algorithms.losses import DPOLoss
from nemo_offload_rl.algorithms.validation import evaluate_batches, in_batches
from nemo_offload_rl.config.algorithms import ALGORITHMS
from nemo_offload_rl.data.batch import BatchedData
from nemo_offload_rl.data.loader import ProblemLoader
from nemo_offload_rl.data.pair_batch import check_pairs, num_left_out, pair_batch
from nemo_offload_rl.data.preferences import PreferencePair
from nemo_offload_rl.data.prompts import PromptFormat
from nemo_offload_rl.metrics.timer import Timer
from nemo_offload_rl.run.algorithm import Algorithm, Policy
from nemo_offload_rl.run.setup import (
    Preparation,
    check_rows,
    fields_from,
    make_answer_format,
    make_schedule,
    padding_notes,
    read_pairs,
    read_tokenizer,
    validation_notes,
)

if TYPE_CHECKING:
    from nemo_offload_rl.config.schema import DPOMasterConfig
    from nemo_offload_rl.config.schema.policy import PolicyConfig
    from nemo_offload_rl.placement.cluster import Cluster


@dataclass(frozen=True)
class PairBatchSizes:
    """Counts the pairs of an optimizer step and of a validation batch (over all ranks), and of their micro-batches."""

    train_global: int
    train_micro: int
    validation_global: int
    validation_micro: int


class DPO(Algorithm):
    """Trains one policy with DPO; the reference policy is the policy before the first step.

    Args:
        policy: the policy to train; it keeps its reference weights.
        answer_format: turns prompts and answers into tokens.
        pairs: the training data.
        validation: the pairs of a validation; may be empty.
        loss_fn: the loss of the pairs.
        batch_sizes: sizes of the policy's batches and micro-batches.
        save_optimizer: whether checkpoints include the optimizer's state.
    """

    def __init__(
        self,
        *,
        policy: Policy,
        answer_format: PromptFormat,
        pairs: ProblemLoader[PreferencePair],
        validation: Sequence[PreferencePair],
        loss_fn: DPOLoss,
        batch_sizes: PairBatchSizes,
        save_optimizer: bool,
    ) -> None:
        super().__init__(policy, pairs, save_optimizer=save_optimizer)
        self._format = answer_format
        self._validation_batches = [
            pair_batch(answer_format, part) for part in in_batches(validation, batch_sizes.validation_global)
        ]
        self._loss_fn = loss_fn
        self._batch_sizes = batch_sizes

    def step(self, step: int, timer: Timer) -> dict[str, float]:
        """Trains on the next global batch of pairs; see ``Algorithm``."""
        sizes = self._batch_sizes
        with timer.phase("data"):
            batch = pair_batch(self._format, self._data.next_batch(sizes.train_global))
        with timer.phase("reference_logprobs"):
            self._add_reference_logprobs(batch, sizes.train_micro)
        metrics = self._train(batch, self._loss_fn, timer, gbs=sizes.train_global, mbs=sizes.train_micro)
        return metrics | {"train/num_overlong_pairs": float(num_left_out(batch))}

    def validate(self, step: int) -> dict[str, float]:
        """Returns the loss on the validation pairs, and its metrics.

        The first validation computes the pairs' reference log-probs, which never change.
        """
        batches, mbs = self._validation_batches, self._batch_sizes.validation_micro
        if not batches:
            return {}
        for batch in batches:
            if "reference_policy_logprobs" not in batch:
                self._add_reference_logprobs(batch, mbs)
        result = evaluate_batches(self._policy, batches, self._loss_fn, mbs=mbs, loss_is_mean_of="valid_seqs")
        means = result["metrics"]
        return {
            "validation/loss": result["loss"],
            "validation/accuracy": means["accuracy"],
            "validation/preference_loss": means["preference_loss"],
            "validation/sft_loss": means["sft_loss"],
            "validation/rewards_chosen_mean": means["rewards_chosen_mean"],
            "validation/rewards_rejected_mean": means["rewards_rejected_mean"],
            "validation/rewards_margin_mean": means["rewards_margin_mean"],
            "validation/logprobs_chosen_mean": means["logprobs_chosen_mean"],
            "validation/logprobs_rejected_mean": means["logprobs_rejected_mean"],
            "validation/num_overlong_pairs": float(sum(map(num_left_out, batches))),
        }

    def _add_reference_logprobs(self, batch: BatchedData, mbs: int) -> None:
        reference = self._policy.get_reference_policy_logprobs(batch, mbs=mbs)
        batch["reference_policy_logprobs"] = reference["reference_logprobs"]


def prepare(config: DPOMasterConfig) -> Preparation:
    """Reads a DPO recipe's data and tokenizer; see ``setup.Preparation``.

    Raises:
        DataError: the data, a template or the tokenizer cannot be used.
    """
    section, data, policy_config = config["dpo"], config["data"], config["policy"]
    train, validation = read_pairs(data, section["seed"])
    train.require(policy_config["train_global_batch_size"], "policy.train_global_batch_size")
    tokenizer = read_tokenizer(policy_config["tokenizer"], trust_remote_code=policy_config["trust_remote_code"])
    answers = make_answer_format(data, tokenizer, policy_config)
    notes = [*padding_notes(answers), *check_rows(partial(check_pairs, answers), train.problems, validation)]
    num_validation = section["val_batches"] * section["val_global_batch_size"] or len(validation)
    notes += validation_notes(data, len(validation), num_validation, "dpo.val_batches")
    loss_fn = DPOLoss(**fields_from(DPOLoss, section))
    steps_per_epoch = train.batches_per_epoch(policy_config["train_global_batch_size"])
    schedule = make_schedule(
        section, config["checkpointing"], steps_per_epoch=steps_per_epoch, num_validation=len(validation)
    )

    def build(fitted_policy: PolicyConfig, cluster: Cluster) -> DPO:
        from nemo_offload_rl.worker.group import PolicyWorkerGroup

        spec = ALGORITHMS["dpo"]
        policy = PolicyWorkerGroup(
            fitted_policy,
            cluster,
            seed=section["seed"],
            init_reference_model=spec.has_reference(config),
            group_size=spec.group_size,
        )
        dpo = DPO(  # tokenizes the validation data while the ranks are built
            policy=policy,
            answer_format=answers,
            pairs=train,
            validation=validation[:num_validation],
            loss_fn=loss_fn,
            batch_sizes=PairBatchSizes(
                train_global=fitted_policy["train_global_batch_size"],
                train_micro=fitted_policy["train_micro_batch_size"],
                validation_global=section["val_global_batch_size"],
                validation_micro=section["val_micro_batch_size"],
            ),
            save_optimizer=config["checkpointing"]["save_optimizer"],
        )
        policy.wait_until_ready()
        return dpo

    return Preparation(build, schedule, tokenizer, notes)
