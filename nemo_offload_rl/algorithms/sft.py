"""Implements SFT, which trains on known answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from nemo_offload_rl.algorithms.losses import NLLLoss
from nemo_offload_rl.algorithms.validation import evaluate_batches, in_batches
from nemo_offload_rl.data.batch import BatchedData, response_batch
from nemo_offload_rl.data.loader import ProblemLoader
from nemo_offload_rl.data.problem import Conversation
from nemo_offload_rl.data.prompts import PromptFormat
from nemo_offload_rl.metrics.timer import Timer
from nemo_offload_rl.run.algorithm import Algorithm, Policy
from nemo_offload_rl.run.setup import (
    Preparation,
    check_rows,
    make_answer_format,
    make_schedule,
    padding_notes,
    read_data,
    read_tokenizer,
    validation_notes,
)

if TYPE_CHECKING:
    from nemo_offload_rl.config.schema import SFTMasterConfig
    from nemo_offload_rl.config.schema.policy import PolicyConfig
    from nemo_offload_rl.placement.cluster import Cluster


@dataclass(frozen=True)
class ValidationData:
    """Holds the problems whose loss validation measures.

    Attributes:
        problems: the validation problems; may be empty.
        global_batch_size: rows of a batch, over all ranks.
        micro_batch_size: rows of one forward pass on a rank.
    """

    problems: Sequence[Conversation]
    global_batch_size: int
    micro_batch_size: int


class SFT(Algorithm):
    """Trains one policy on known answers (supervised fine-tuning).

    Args:
        policy: the policy to train.
        example_format: turns problems into prompts and answers.
        examples: the training data.
        validation: the validation data.
        train_global_batch_size: rows of an optimizer step, over all ranks.
        train_micro_batch_size: rows of a micro-batch.
        only_unmask_final: whether only the last message of a conversation is trained.
        save_optimizer: whether checkpoints include the optimizer's state.
    """

    def __init__(
        self,
        *,
        policy: Policy,
        example_format: PromptFormat,
        examples: ProblemLoader[Conversation],
        validation: ValidationData,
        train_global_batch_size: int,
        train_micro_batch_size: int,
        only_unmask_final: bool,
        save_optimizer: bool,
    ) -> None:
        super().__init__(policy, examples, save_optimizer=save_optimizer)
        self._batch = partial(example_batch, example_format, only_unmask_final=only_unmask_final)
        self._validation_batches = [
            self._batch(part) for part in in_batches(validation.problems, validation.global_batch_size)
        ]
        self._validation_mbs = validation.micro_batch_size
        self._loss_fn = NLLLoss()
        self._gbs = train_global_batch_size
        self._mbs = train_micro_batch_size

    def step(self, step: int, timer: Timer) -> dict[str, float]:
        """Trains on the next global batch; see ``Algorithm``."""
        with timer.phase("data"):
            batch = self._batch(self._data.next_batch(self._gbs))
        return self._train(batch, self._loss_fn, timer, gbs=self._gbs, mbs=self._mbs)

    def validate(self, step: int) -> dict[str, float]:
        """Returns the validation answers' loss per token, and the mean probability of a whole answer."""
        if not self._validation_batches:
            return {}
        result = evaluate_batches(
            self._policy,
            self._validation_batches,
            self._loss_fn,
            mbs=self._validation_mbs,
            loss_is_mean_of="valid_toks",
        )
        return {
            "validation/val_loss": result["loss"],
            "validation/answer_probability": result["metrics"]["answer_probability"],
        }


def example_batch(
    example_format: PromptFormat, problems: Sequence[Conversation], *, only_unmask_final: bool = False
) -> BatchedData:
    """Makes a training batch of prompts and answers; rows beyond the format's limit are left out of the loss.

    The assistant's earlier messages are trained, too, in conversations with `trains_all_answers`, unless only the final
    message is to be.
    """
    examples = example_format.examples(problems)
    batch = response_batch(
        [example.prompt_ids for example in examples],
        [example.answer_ids for example in examples],
        example_format.pad_token_id,
    )
    batch["sample_mask"] *= torch.tensor([float(example.fits) for example in examples])
    for row, example in enumerate([] if only_unmask_final else examples):
        for positions in example.trained_in_prompt:
            batch["token_mask"][row, positions.start : positions.stop] = 1
    return batch


def prepare(config: SFTMasterConfig) -> Preparation:
    """Reads an SFT recipe's data and tokenizer; see ``setup.Preparation``.

    Raises:
        DataError: the data, a template or the tokenizer cannot be used.
    """
    section, data, policy_config = config["sft"], config["data"], config["policy"]
    train, validation = read_data(data, section["seed"])
    train.require(policy_config["train_global_batch_size"], "policy.train_global_batch_size")
    tokenizer = read_tokenizer(policy_config["tokenizer"], trust_remote_code=policy_config["trust_remote_code"])
    examples = make_answer_format(data, tokenizer, policy_config)
    notes = [
        *padding_notes(examples),
        *check_rows(partial(examples.check_rows, with_answers=True), train.problems, validation),
    ]
    num_validation = section["val_batches"] * section["val_global_batch_size"] or len(validation)
    notes += validation_notes(data, len(validation), num_validation, "sft.val_batches")
    steps_per_epoch = train.batches_per_epoch(policy_config["train_global_batch_size"])
    schedule = make_schedule(
        section, config["checkpointing"], steps_per_epoch=steps_per_epoch, num_validation=len(validation)
    )

    def build(fitted_policy: PolicyConfig, cluster: Cluster) -> SFT:
        from nemo_offload_rl.worker.group import PolicyWorkerGroup

        policy = PolicyWorkerGroup(fitted_policy, cluster, seed=section["seed"], init_reference_model=False)
        sft = SFT(  # tokenizes the validation data while the ranks are built
            policy=policy,
            example_format=examples,
            examples=train,
            validation=ValidationData(
                problems=validation[:num_validation],
                global_batch_size=section["val_global_batch_size"],
                micro_batch_size=section["val_micro_batch_size"],
            ),
            train_global_batch_size=fitted_policy["train_global_batch_size"],
            train_micro_batch_size=fitted_policy["train_micro_batch_size"],
            only_unmask_final=section["only_unmask_final"],
            save_optimizer=config["checkpointing"]["save_optimizer"],
        )
        policy.wait_until_ready()
        return sft

    return Preparation(build, schedule, tokenizer, notes)
