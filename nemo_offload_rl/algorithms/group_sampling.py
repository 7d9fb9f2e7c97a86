"""Samples the rollouts of a step: of every prompt or, with dynamic sampling, only of prompts that give a gradient."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from nemo_offload_rl.algorithms.advantages import informative_groups
from nemo_offload_rl.algorithms.reward_shaping import RewardShaping
from nemo_offload_rl.algorithms.rollouts import RolloutMaker, Rollouts
from nemo_offload_rl.algorithms.saved_rollouts import ReplayedRollouts
from nemo_offload_rl.data.loader import DataPosition, ProblemLoader
from nemo_offload_rl.data.problem import Conversation, DataError
from nemo_offload_rl.generation.interface import SamplingParams
from nemo_offload_rl.metrics.timer import Timer


@dataclass(frozen=True)
class GroupSettings:
    """Holds settings of the recipe's ``grpo`` section, under the same names."""

    num_prompts_per_step: int
    num_generations_per_prompt: int
    use_dynamic_sampling: bool
    dynamic_sampling_max_gen_batches: int
    batch_multiplier: float

    @property
    def prompts_per_batch(self) -> int:
        """Prompts of one generation batch; equal to a step's without dynamic sampling."""
        return int(self.num_prompts_per_step * self.batch_multiplier)


@dataclass(frozen=True)
class GroupSampler:
    """Draws prompts and samples answers to them until a step's batch is full.

    Attributes:
        prompts: the training data.
        rollout: generates answers and judges them, or returns saved ones.
        sampling: the sampling parameters of the engine.
        settings: the recipe's settings.
        scale: maps rewards [P, N] to the scaled rewards from which advantages are computed and which dynamic sampling
            compares, since scaling may make different rewards equal.
        shape: changes scaled rewards by the length of answers; None to leave them unchanged.
        memory_stats: returns the engines' memory in GiB, by name.
        save: called with the step and its generation batches, before anything is computed from them.
    """

    prompts: ProblemLoader[Conversation]
    rollout: RolloutMaker | ReplayedRollouts
    sampling: SamplingParams
    settings: GroupSettings
    scale: Callable[[torch.Tensor], torch.Tensor]
    shape: RewardShaping | None
    memory_stats: Callable[[], dict[str, float]]
    save: Callable[[int, Sequence[Rollouts]], None] = lambda step, batches: None

    def __call__(
        self,
        step: int,
        timer: Timer,
        on_last_answers: Callable[[], None] = lambda: None,
        num_updates: Callable[[], int] = lambda: 0,
    ) -> tuple[Rollouts, dict[str, float]]:
        """Samples the rollouts of ``num_prompts_per_step`` prompts; also returns metrics of all sampled rollouts.

        Dynamic sampling (DAPO, https://arxiv.org/abs/2503.14476) drops prompts whose answers all got the same reward
        after scaling, and samples further batches in their place; each has ``batch_multiplier`` times the prompts of a
        step.

        Args:
            step: the step of the run.
            timer: records the phases of rollouts.
            on_last_answers: called once, when no more answers will be generated: before the last answers are judged,
                or after it where only their rewards show that they were the last.
            num_updates: returns how often weights in flight have come since the step's first answers began.

        Raises:
            DataError: dynamic sampling found too few prompts in the batches that it may sample.
        """
        settings, pad_token_id = self.settings, self.rollout.prompt_format.pad_token_id
        # NeMo-RL fails after one batch more than its key says.
        max_batches = settings.dynamic_sampling_max_gen_batches + 1 if settings.use_dynamic_sampling else 1
        sampled: list[Rollouts] = []
        kept: list[Rollouts] = []
        num_sampled: Counter[tuple[int, ...]] = Counter()
        while sum(rollouts.num_prompts for rollouts in kept) < settings.num_prompts_per_step:
            if len(sampled) == max_batches:
                raise DataError(
                    f"{max_batches} generation batches of step {step} did not give {settings.num_prompts_per_step} "
                    "prompts whose answers got different rewards: raise grpo.dynamic_sampling_max_gen_batches, take "
                    "problems of another difficulty, or set grpo.use_dynamic_sampling=false."
                )
            is_last = len(sampled) + 1 == max_batches
            before = num_updates()  # an engine counts those since its call began
            rollouts = self._sample(step, timer, num_sampled, on_answers=on_last_answers if is_last else _nothing)
            if "num_updates" in rollouts.batch:
                rollouts.batch["num_updates"] += before * rollouts.batch["token_mask"]
            sampled.append(rollouts)
            useful = self._informative(rollouts) | (not settings.use_dynamic_sampling)
            kept.append(rollouts.select_prompts(useful.nonzero().flatten()))
        if len(sampled) < max_batches:
            on_last_answers()
        with timer.phase("rewards"):
            self.save(step, sampled)
        batch = Rollouts.concat(kept, pad_token_id).select_prompts(torch.arange(settings.num_prompts_per_step))
        metrics = self._metrics(Rollouts.concat(sampled, pad_token_id), len(sampled))
        trained = self.shaped_rewards(batch)
        if settings.use_dynamic_sampling:
            metrics["train/filtered_reward"] = float(trained.mean())
        if self.shape is not None:
            metrics["train/reward_shaping"] = float((trained - self.scale(batch.rewards)).mean())
        return batch, metrics

    @property
    def position(self) -> DataPosition:
        """Where the next step starts in the training data."""
        return self.prompts.position

    def needs_weights(self, version: int) -> bool:
        """Returns whether engines need a refit, or waking up, before this version of the weights can sample."""
        del version
        return True

    def updating_weights(self, version: int, timer: Timer, *, drains: bool = False) -> AbstractContextManager[None]:
        """Returns a context in which engines may get other weights: nothing is sampled beside it."""
        del version, timer, drains
        return nullcontext()

    def close(self) -> None:
        """Does nothing: nothing is sampled in the background."""

    def join(self) -> None:
        """Does nothing."""

    def save_unused(self, folder: Path) -> None:
        """Does nothing: no rollouts wait for their step."""

    def load_unused(self, folder: Path, step: int) -> None:
        """Does nothing: each step samples its own rollouts, also those that another run had sampled ahead."""

    def shaped_rewards(self, rollouts: Rollouts) -> torch.Tensor:
        """Returns the scaled and shaped rewards [P, N] from which advantages are computed."""
        scaled = self.scale(rollouts.rewards)
        return scaled if self.shape is None else self.shape(scaled, rollouts)

    def _sample(
        self, step: int, timer: Timer, num_sampled: Counter[tuple[int, ...]], on_answers: Callable[[], None]
    ) -> Rollouts:
        problems = self.prompts.next_batch(self.settings.prompts_per_batch)
        num_generations = self.settings.num_generations_per_prompt
        return self.rollout(problems, num_generations, self.sampling, step, timer, num_sampled, on_answers)

    def _informative(self, rollouts: Rollouts) -> torch.Tensor:
        return informative_groups(self.scale(rollouts.rewards))

    def _metrics(self, rollouts: Rollouts, num_batches: int) -> dict[str, float]:
        return {
            "train/reward": float(self.shaped_rewards(rollouts).mean()),
            "train/environment_reward": float(rollouts.rewards.mean()),
            "train/num_unjudged_answers": float(rollouts.num_unjudged),
            "train/informative_prompts": float(self._informative(rollouts).float().mean()),
            "train/truncation_rate": float(rollouts.truncated.float().mean()),
            "train/mean_gen_tokens_per_sample": rollouts.mean_response_tokens,
            "train/num_generation_batches": float(num_batches),
        }


def _nothing() -> None:
    """Does nothing, since further answers may be generated."""
