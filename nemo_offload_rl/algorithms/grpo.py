"""Implements GRPO, which samples answers, compares their rewards, and moves the policy towards the better answers."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from nemo_offload_rl.algorithms.advantages import GroupAdvantages, RewardScaling, unscaled
from nemo_offload_rl.algorithms.group_sampling import GroupSampler, GroupSettings
from nemo_offload_rl.algorithms.importance_sampling import sequence_prob_errors
from nemo_offload_rl.algorithms.losses import ClippedPGLoss
from nemo_offload_rl.algorithms.reward_shaping import OverlongPenalty, RewardShaping, StopProperlyPenalty
from nemo_offload_rl.algorithms.rollout_queue import RolloutQueue, in_flight_updates
from nemo_offload_rl.algorithms.rollouts import RolloutMaker, Rollouts
from nemo_offload_rl.algorithms.saved_rollouts import NoEngine, ReplayedRollouts, RolloutFolder, made_with, sampled_with
from nemo_offload_rl.algorithms.validation import num_in_whole_batches
from nemo_offload_rl.config.algorithms import ALGORITHMS
from nemo_offload_rl.config.schema.algorithm_sections import GRPOConfig
from nemo_offload_rl.data.batch import BatchedData
from nemo_offload_rl.data.loader import DataPosition, ProblemLoader
from nemo_offload_rl.data.problem import Conversation
from nemo_offload_rl.environments import Judge, make_math_reward, make_python_reward, make_reward
from nemo_offload_rl.environments.rewards import PYTHON
from nemo_offload_rl.generation.interface import GenerationInterface, SamplingParams
from nemo_offload_rl.metrics.names import memory_metrics
from nemo_offload_rl.metrics.samples import JudgedAnswer, best_and_worst
from nemo_offload_rl.metrics.timer import Timer
from nemo_offload_rl.run.algorithm import Algorithm, Policy
from nemo_offload_rl.run.answer_sampling import check_words, make_sampling
from nemo_offload_rl.run.setup import (
    Preparation,
    check_rows,
    fields_from,
    make_prompt_format,
    make_schedule,
    padding_notes,
    read_data,
    read_tokenizer,
    validation_notes,
)
from nemo_offload_rl.run.weight_sync import NoWeightSync, WeightSync

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from nemo_offload_rl.config.schema import GRPOMasterConfig
    from nemo_offload_rl.config.schema.policy import GRPOPolicyConfig
    from nemo_offload_rl.placement.cluster import Cluster

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BatchSizes:
    """Counts the rows of an optimizer step (over all ranks), of a training micro-batch, and of a log-prob one."""

    train_global: int
    train_micro: int
    logprob: int


@dataclass(frozen=True)
class ValidationSampling:
    """Holds the problems of a validation, and how answers to them are sampled.

    Attributes:
        problems: the validation problems; may be empty.
        num_generations: number of answers sampled per problem.
        batch_size: problems of one generation request.
        sampling: the sampling parameters of the engine.
        num_shown: number of answers shown to the user.
    """

    problems: Sequence[Conversation]
    num_generations: int
    batch_size: int
    sampling: SamplingParams
    num_shown: int = 0


class GRPO(Algorithm):
    """Trains one policy with GRPO, on the answers of any generation engine and with any reward.

    Args:
        policy: the policy to train.
        generation: the engines that sample the answers; none where rollouts are replayed.
        weights: sends the policy's weights to the generation engine.
        prompts: the training data.
        sample: samples the rollouts of a step, or has sampled them ahead.
        validation: the problems and sampling of a validation.
        advantages: maps scaled and shaped rewards [P, N] to advantages of the same shape.
        loss_fn: the loss of the rollouts.
        batch_sizes: sizes of the policy's batches and micro-batches.
        overlong_filtering: whether to leave answers that were cut off out of the loss.
        sequence_error_limit: difference of sampler and policy probabilities (``sequence_prob_errors``) above which an
            answer is left out of the loss; None for no limit.
        prob_error_limit: train/token_mult_prob_error above which a step logs a warning; None for no warning.
        save_optimizer: whether checkpoints include the optimizer's state.
    """

    def __init__(
        self,
        *,
        policy: Policy,
        generation: GenerationInterface | NoEngine,
        weights: WeightSync | NoWeightSync,
        prompts: ProblemLoader[Conversation],
        sample: GroupSampler | RolloutQueue,
        validation: ValidationSampling,
        advantages: Callable[[torch.Tensor], torch.Tensor],
        loss_fn: ClippedPGLoss,
        batch_sizes: BatchSizes,
        overlong_filtering: bool,
        sequence_error_limit: float | None,
        prob_error_limit: float | None,
        save_optimizer: bool,
    ) -> None:
        super().__init__(policy, prompts, save_optimizer=save_optimizer)
        self._generation = generation
        self._weights = weights
        self._sample = sample
        self._validation = validation
        self._advantages = advantages
        self._loss_fn = loss_fn
        self._batch_sizes = batch_sizes
        self._overlong_filtering = overlong_filtering
        self._sequence_error_limit = sequence_error_limit
        self._needs_prev_logprobs = loss_fn.needs_prev_logprobs or sequence_error_limit is not None
        self._prob_error_limit = prob_error_limit

    def step(self, step: int, timer: Timer) -> dict[str, float]:
        """Samples a batch and trains on it; see ``Algorithm``."""
        if self._sample.needs_weights(step - 1):
            with self._sample.updating_weights(step - 1, timer), timer.phase("refit"):
                self._weights.refresh()
        rollouts, metrics = self._sample(step, timer, self._leave_generation)
        with timer.phase("finish_generation"):
            self._generation.finish_generation()

        batch = rollouts.batch
        if self._overlong_filtering:
            batch["sample_mask"] = batch["sample_mask"] * ~rollouts.truncated
        advantages = self._advantages(self._sample.shaped_rewards(rollouts))
        batch["advantages"] = advantages.view(-1, 1) * batch["token_mask"]
        self._add_logprobs(batch, timer)
        metrics |= self._leave_out_by_error(batch)

        sizes = self._batch_sizes
        metrics |= self._train(batch, self._loss_fn, timer, gbs=sizes.train_global, mbs=sizes.train_micro)
        self._weights.mark_stale()
        self._warn_of_prob_error(step, metrics["train/token_mult_prob_error"])
        with timer.phase("metrics"):
            memory = self._sample.memory_stats()
        return metrics | memory_metrics("generation", memory)

    def _leave_generation(self) -> None:
        """Has the engines free the GPU and the policy's state copied back while rewards and advantages are computed."""
        has_passes = self._needs_prev_logprobs or self._loss_fn.needs_reference_logprobs
        self._policy.start_return(self._generation.start_finish_generation(), logprobs=has_passes)

    def _warn_of_prob_error(self, step: int, error: float) -> None:
        if self._prob_error_limit is not None and error > self._prob_error_limit:
            logger.warning(
                "Step %d: train/token_mult_prob_error is %.3f, above grpo.token_mult_prob_error_limit (%g): the "
                "engine's probabilities of the sampled tokens differ from the policy's; set policy.verify_refit=true "
                "to find weights that differ.",
                step,
                error,
                self._prob_error_limit,
            )

    def _leave_out_by_error(self, batch: BatchedData) -> dict[str, float]:
        """Leaves answers out of the loss whose probabilities differ too much between sampler and policy."""
        if self._sequence_error_limit is None:
            return {}
        errors, before = sequence_prob_errors(batch), batch["sample_mask"]
        batch["sample_mask"] = before * (errors <= self._sequence_error_limit)
        return {
            "train/max_seq_mult_prob_error": float(errors.max()),
            "train/num_masked_seqs_by_logprob_error": float((before - batch["sample_mask"]).sum()),
        }

    def _add_logprobs(self, batch: BatchedData, timer: Timer) -> None:
        """Adds the log-probs before the update: the policy's and the reference policy's, where they are needed."""
        mbs = self._batch_sizes.logprob
        if self._needs_prev_logprobs:
            with timer.phase("logprobs"):
                batch["prev_logprobs"] = self._policy.get_logprobs(batch, mbs=mbs)["logprobs"]
        if self._loss_fn.needs_reference_logprobs:
            with timer.phase("reference_logprobs"):
                reference = self._policy.get_reference_policy_logprobs(batch, mbs=mbs)
                batch["reference_policy_logprobs"] = reference["reference_logprobs"]

    def validate(self, step: int) -> dict[str, float]:
        """Samples answers to the validation problems.

        Returns:
            ``validation/accuracy``, the mean reward, ``validation/full_reward``, the share of answers with a reward of
            1 or more, the number of answers that could not be judged, and the mean length of an answer; with several
            answers per problem also ``validation/pass_k``, the share of problems with at least one answer whose reward
            is above 0. Empty without validation problems.
        """
        problems, size = self._validation.problems, self._validation.batch_size
        num_generations, sampling = self._validation.num_generations, self._validation.sampling
        if not problems:
            return {}
        num_sampled: Counter[tuple[int, ...]] = Counter()
        with self._sample.updating_weights(step, Timer(), drains=True):
            self._weights.refresh()
            parts = [
                self._sample.rollout(
                    problems[start : start + size], num_generations, sampling, step, Timer(), num_sampled
                )
                for start in range(0, len(problems), size)
            ]
        self._generation.finish_generation()
        rollouts = Rollouts.concat(parts, self._sample.rollout.prompt_format.pad_token_id)
        self.validation_answers = _judged_answers(rollouts, self._validation.num_shown)
        metrics = {
            "validation/accuracy": float(rollouts.rewards.mean()),
            "validation/full_reward": float((rollouts.rewards >= 1).float().mean()),
            "validation/num_unjudged_answers": float(rollouts.num_unjudged),
            "validation/mean_gen_tokens_per_sample": rollouts.mean_response_tokens,
        }
        if num_generations > 1:
            metrics |= {"validation/pass_k": float((rollouts.rewards > 0).any(dim=1).float().mean())}
        return metrics

    @property
    def position(self) -> DataPosition:
        """The position of the next step in the training data; see ``Algorithm``."""
        return self._sample.position

    @position.setter
    def position(self, position: DataPosition) -> None:
        self._data.position = position

    def abandon_step(self) -> None:
        """Frees the engines' GPU memory, which saving the policy may need."""
        self._generation.finish_generation()

    def _save_own_files(self, folder: Path) -> None:
        self._sample.save_unused(folder)

    def load(self, folder: Path, step: int, num_skipped: int) -> None:
        """Loads the policy from a checkpoint folder; see ``Algorithm``."""
        super().load(folder, step, num_skipped)
        self._sample.load_unused(folder, step)
        self._weights.mark_stale()

    def stop(self) -> None:
        """Ends the processes of rewards, and what they have started; see ``Algorithm``."""
        self._sample.close()
        self._sample.rollout.shutdown()

    def shutdown(self) -> None:
        """Ends the processes of rewards, generation and policy."""
        self.stop()
        self._generation.shutdown()
        self._sample.join()
        super().shutdown()


def _judged_answers(rollouts: Rollouts, num: int) -> list[JudgedAnswer]:
    rewards = rollouts.rewards.flatten().tolist()
    chosen = [(rollouts.cases[row], rewards[row]) for row in best_and_worst(rewards, num)]
    return [JudgedAnswer(case.prompt, case.response, case.answer, reward) for case, reward in chosen]


def prepare(config: GRPOMasterConfig) -> Preparation:
    """Reads a GRPO recipe's data, tokenizer and reward; see ``setup.Preparation``.

    Raises:
        DataError: the data, a template or the tokenizer cannot be used.
        RewardError: the reward cannot be used.
    """
    section, policy_config = config["grpo"], config["policy"]
    train, validation = read_data(config["data"], section["seed"])
    groups = GroupSettings(**fields_from(GroupSettings, section))
    larger = "" if groups.batch_multiplier == 1 else " x grpo.batch_multiplier"
    train.require(groups.prompts_per_batch, f"grpo.num_prompts_per_step{larger}")
    tokenizer = read_tokenizer(policy_config["tokenizer"], trust_remote_code=policy_config["trust_remote_code"])
    prompts = make_prompt_format(config["data"], tokenizer, policy_config)
    num_validation = num_in_whole_batches(section["max_val_samples"], section["val_batch_size"])
    notes = [
        *padding_notes(prompts),
        *check_rows(partial(prompts.check_rows, with_answers=False), train.problems, validation),
        *validation_notes(config["data"], len(validation), num_validation, "grpo.max_val_samples"),
    ]
    to_save, to_replay = (_rollout_folder(config, key, train.problems, tokenizer) for key in _DEBUG)
    notes += to_save.check_to_save() if to_save is not None else []
    notes += to_replay.check_to_replay() if to_replay is not None else []
    reward = _make_reward(config) if to_replay is None else None
    loss_fn = ClippedPGLoss(**fields_from(ClippedPGLoss, config["loss_fn"]))
    check_words(policy_config["generation"], tokenizer, prompts.outside)
    steps_per_epoch = train.batches_per_epoch(groups.prompts_per_batch)
    schedule = make_schedule(
        section, config["checkpointing"], steps_per_epoch=steps_per_epoch, num_validation=len(validation)
    )
    if to_replay is not None:  # a validation needs an engine
        schedule = replace(
            schedule, val_period=0, val_at_start=False, val_at_end=False, target=None, last_replayed=to_replay.steps[-1]
        )
        validation = ()

    ahead = section["async_grpo"]
    is_off_policy = ahead["enabled"] and ahead["max_trajectory_age_steps"] > 0

    def build(fitted_policy: GRPOPolicyConfig, cluster: Cluster) -> GRPO:
        from nemo_offload_rl.generation import make_generation
        from nemo_offload_rl.refit import make_transport
        from nemo_offload_rl.worker.group import PolicyWorkerGroup

        sampling, validation_sampling = make_sampling(fitted_policy, tokenizer, section["seed"])
        start_policy = partial(
            PolicyWorkerGroup,
            fitted_policy,
            cluster,
            seed=section["seed"],
            init_reference_model=ALGORITHMS["grpo"].has_reference(config),
        )
        generation: GenerationInterface | NoEngine
        weights: WeightSync | NoWeightSync
        rollout: RolloutMaker | ReplayedRollouts
        if to_replay is not None:
            policy, generation, weights = start_policy(), NoEngine(), NoWeightSync()
            rollout = ReplayedRollouts(to_replay, prompts)
            policy.wait_until_ready()  # as a refit does, so that the first step is not longer than others
        else:
            engines = generation = make_generation(fitted_policy, cluster, in_flight_updates(ahead))
            policy = start_policy(before_build=engines.wait_until_ready if engines.capabilities.built_alone else None)
            # Wait for the engine before the first export, which needs GPU memory, too; if the engine failed while the
            # policy was being built, the run ends here.
            engines.wait_until_ready()
            verify = fitted_policy["verify_refit"]
            transport = make_transport(engines.capabilities.refit_transport, engines.receivers, verify=verify)
            weights = WeightSync(policy, engines, transport, verify=verify)
            assert reward is not None
            rollout = RolloutMaker(engines, prompts, tokenizer, reward)
        sampler = GroupSampler(
            train,
            rollout,
            sampling,
            groups,
            _make_reward_scaling(section),
            _make_reward_shaping(section),
            generation.memory_stats,
            **({} if to_save is None else {"save": to_save.save}),
        )
        sample: GroupSampler | RolloutQueue = sampler
        if ahead["enabled"]:
            sample = RolloutQueue(
                sampler,
                max_age=ahead["max_trajectory_age_steps"],
                last_step=schedule.max_num_steps,
                num_epochs=schedule.max_num_epochs,
                in_flight=ahead["in_flight_weight_updates"],
                sampled_with=sampled_with(config, train.problems, tokenizer),
            )
        return GRPO(
            policy=policy,
            generation=generation,
            weights=weights,
            prompts=train,
            sample=sample,
            validation=ValidationSampling(
                problems=validation[:num_validation],
                num_generations=section["val_num_generations_per_prompt"],
                batch_size=section["val_batch_size"],
                sampling=validation_sampling,
                num_shown=config["logger"]["num_val_samples_to_print"],
            ),
            advantages=_make_advantages(section),
            loss_fn=loss_fn,
            batch_sizes=BatchSizes(
                train_global=fitted_policy["train_global_batch_size"],
                train_micro=fitted_policy["train_micro_batch_size"],
                logprob=fitted_policy["logprob_batch_size"],
            ),
            overlong_filtering=section["overlong_filtering"],
            sequence_error_limit=section["seq_logprob_error_threshold"],
            prob_error_limit=None if is_off_policy else section["token_mult_prob_error_limit"],
            save_optimizer=config["checkpointing"]["save_optimizer"],
        )

    return Preparation(build, schedule, tokenizer, notes)


_DEBUG: tuple[Literal["save_rollouts", "replay_rollouts"], ...] = ("save_rollouts", "replay_rollouts")


def _rollout_folder(
    config: GRPOMasterConfig,
    key: Literal["save_rollouts", "replay_rollouts"],
    problems: Sequence[Conversation],
    tokenizer: PreTrainedTokenizerFast,
) -> RolloutFolder | None:
    path = config["grpo"]["debug"][key]
    return None if path is None else RolloutFolder(Path(path), made_with(config, problems, tokenizer))


def _make_reward(config: GRPOMasterConfig) -> Judge:
    default = config["data"]["default"]
    assert default is not None, "a rule requires its env_name"
    environment = config["env"][default["env_name"]]
    implementation = environment["math_verify_impl"]
    if implementation is not None:
        return make_math_reward(implementation, environment["num_workers"], environment["time_limit_s"])
    if environment["reward"] == PYTHON:
        return make_python_reward(
            environment["reward_function"], environment["num_workers"], environment["time_limit_s"]
        )
    return make_reward(environment["reward"])


def _make_advantages(section: GRPOConfig) -> GroupAdvantages:
    return GroupAdvantages(
        leave_one_out=section["use_leave_one_out_baseline"],
        normalize=section["normalize_rewards"],
        clip_low=section["advantage_clip_low"],
        clip_high=section["advantage_clip_high"],
    )


def _make_reward_scaling(section: GRPOConfig) -> Callable[[torch.Tensor], torch.Tensor]:
    if "reward_scaling" not in section or not section["reward_scaling"]["enabled"]:
        return unscaled
    return RewardScaling(**fields_from(RewardScaling, section["reward_scaling"]))


def _make_reward_shaping(section: GRPOConfig) -> RewardShaping | None:
    if "reward_shaping" not in section or not section["reward_shaping"]["enabled"]:
        return None
    shaping = section["reward_shaping"]
    factor = shaping["stop_properly_penalty_coef"]
    if factor is not None:
        return StopProperlyPenalty(factor)
    buffer, penalty = shaping["overlong_buffer_length"], shaping["overlong_buffer_penalty"]
    longest = shaping["max_response_length"]
    assert buffer is not None and penalty is not None and longest is not None, "validation asks for them"
    return OverlongPenalty(buffer, penalty, longest)
