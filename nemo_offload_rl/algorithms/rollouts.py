"""Generates rollouts: prompts, the policy's answers, and their rewards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

import torch

from nemo_offload_rl.data.batch import BatchedData, response_batch, response_logprobs
from nemo_offload_rl.data.problem import Conversation
from nemo_offload_rl.data.prompts import PromptFormat
from nemo_offload_rl.environments import Case, Judge
from nemo_offload_rl.generation.interface import GenerationInterface, GenerationRequest, SamplingParams
from nemo_offload_rl.metrics.timer import Timer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class Rollouts:
    """Holds sampled answers and their rewards, the answers to one prompt next to each other.

    Attributes:
        batch: P x N rows with input_ids, input_lengths, token_mask, sample_mask and generation_logprobs; of engines
            whose weights change meanwhile also num_updates, for each token the changes since its generation began.
        rewards: float32 [P, N].
        truncated: bool [P x N], true where the answer was cut off at its length limit.
        num_unjudged: number of answers that could not be judged and therefore have reward 0.
        cases: P x N, the prompts and answers that the reward judged.
    """

    batch: BatchedData
    rewards: torch.Tensor
    truncated: torch.Tensor
    num_unjudged: int = 0
    cases: tuple[Case, ...] = ()

    @property
    def num_prompts(self) -> int:
        """Number of prompts, P."""
        return self.rewards.shape[0]

    @property
    def response_tokens(self) -> torch.Tensor:
        """Number of tokens of each answer, including its stop token: float32 [P x N]."""
        return self.batch["token_mask"].sum(dim=1)

    @property
    def mean_response_tokens(self) -> float:
        """Mean number of tokens of an answer, including its stop token."""
        return float(self.response_tokens.mean())

    def select_prompts(self, prompts: torch.Tensor) -> Self:
        """Returns the rollouts of some prompts, given by their indices (int64 [K])."""
        num_generations = self.rewards.shape[1]
        rows = (prompts[:, None] * num_generations + torch.arange(num_generations)).flatten()
        return replace(
            self,
            batch=self.batch.select(rows),
            rewards=self.rewards[prompts],
            truncated=self.truncated[rows],
            cases=tuple(self.cases[row] for row in rows.tolist()) if self.cases else (),
        )

    @classmethod
    def concat(cls, parts: Sequence[Rollouts], pad_token_id: int) -> Self:
        """Joins the rollouts of several batches into one."""
        return cls(
            batch=BatchedData.concat([part.batch for part in parts], pad_values={"input_ids": pad_token_id}),
            rewards=torch.cat([part.rewards for part in parts]),
            truncated=torch.cat([part.truncated for part in parts]),
            num_unjudged=sum(part.num_unjudged for part in parts),
            cases=tuple(case for part in parts for case in part.cases),
        )


@dataclass(frozen=True)
class RolloutMaker:
    """Generates answers and judges them.

    Attributes:
        generation: the engine; the caller keeps its weights up to date.
        prompt_format: turns problems into prompts.
        tokenizer: turns answers into text.
        reward: judges an answer's text.
    """

    generation: GenerationInterface
    prompt_format: PromptFormat
    tokenizer: PreTrainedTokenizerFast
    reward: Judge

    def __call__(
        self,
        problems: Sequence[Conversation],
        num_generations: int,
        sampling: SamplingParams,
        step: int,
        timer: Timer,
        num_sampled: Counter[tuple[int, ...]],
        on_answers: Callable[[], None] = lambda: None,
    ) -> Rollouts:
        """Samples ``num_generations`` answers to each problem.

        Args:
            problems: the P problems.
            num_generations: the number N of answers per problem.
            sampling: the sampling parameters of the engine.
            step: the step of the run; with the sample's id and the prompt it determines the sampled tokens.
            timer: records the phases ``sampling`` and ``rewards``; of engines whose weights change meanwhile also
                ``held_for_weights``, a part of ``sampling``.
            num_sampled: number of answers to each prompt (its tokens) sampled so far in this step, to which these are
                added; a prompt that occurs again gets other samples.
            on_answers: called when all answers have been generated, before they are judged.

        Raises:
            RewardError: the reward of an answer is not a finite number, or its function raises.
        """
        prompts = [prompt for prompt in self.prompt_format.prompts(problems) for _ in range(num_generations)]
        prompt_ids = [prompt.prompt_ids for prompt in prompts]
        sample_ids = _next_sample_ids(prompt_ids, num_sampled)
        with timer.phase("sampling"):
            output = self.generation.generate(GenerationRequest(prompt_ids, sample_ids, step, sampling))
        if output.num_updates is not None:
            timer.add("held_for_weights", output.held_s)
        on_answers()
        with timer.phase("rewards"):
            texts = self.tokenizer.batch_decode(output.output_ids, skip_special_tokens=True)
            asked = [problem for problem in problems for _ in range(num_generations)]
            cases = tuple(
                Case(problem.context[-1].content, text, problem.answer)
                for problem, text in zip(asked, texts, strict=True)
            )
            judged = self.reward.judge_all(cases)
        batch = response_batch(prompt_ids, output.output_ids, self.prompt_format.pad_token_id)
        batch["sample_mask"] *= torch.tensor([float(prompt.fits) for prompt in prompts])
        batch["generation_logprobs"] = response_logprobs(batch, output.logprobs)
        if output.num_updates is not None:
            batch["num_updates"] = response_logprobs(batch, output.num_updates)
        return Rollouts(
            batch=batch,
            rewards=torch.tensor(judged.rewards).view(len(problems), num_generations),
            truncated=torch.tensor([reason == "length" for reason in output.finish_reasons]),
            num_unjudged=judged.num_unjudged,
            cases=cases,
        )

    def shutdown(self) -> None:
        """Ends the processes of rewards."""
        self.reward.shutdown()


def _next_sample_ids(prompt_ids: Sequence[Sequence[int]], num_sampled: Counter[tuple[int, ...]]) -> list[int]:
    """Numbers the samples of each prompt from those on that were sampled before, and counts them."""
    sample_ids = []
    for prompt in map(tuple, prompt_ids):
        sample_ids.append(num_sampled[prompt])
        num_sampled[prompt] += 1
    return sample_ids
