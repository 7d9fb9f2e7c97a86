"""Implements the baseline of overhead.py: a GRPO step in one process, in plain torch and transformers.

It runs the passes of the framework's step and no more: sample with a KV cache, compute log-probs of the policy before
the update, run forward and backward in micro-batches, step a clipped AdamW, and copy the weights to the sampler's
model.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM


class PlainGRPO:
    """Trains one policy with one sampler, each a Hugging Face model with random weights, on the CPU in fp32.

    Args:
        policy: The recipe's section `policy`: model, batch sizes, optimizer, generation.
        num_generations: Samples of each prompt.
        ratio_clip: How far the probability ratio may go below and above 1.
        eos_token_id: Ends a sample.
        seed: Of the weights and of sampling.
    """

    def __init__(
        self,
        policy: Mapping[str, Any],
        num_generations: int,
        ratio_clip: tuple[float, float],
        eos_token_id: int,
        seed: int,
    ) -> None:
        torch.manual_seed(seed)
        self._policy_config = policy
        self._num_generations = num_generations
        self._ratio_clip = ratio_clip
        self._eos = eos_token_id
        settings = dict(policy["hf_config"])
        config = AutoConfig.for_model(settings.pop("model_type"), **settings)
        self.policy = AutoModelForCausalLM.from_config(config)
        self.sampler = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
        self._copy_weights()
        optimizer = policy["megatron_cfg"]["optimizer"]
        self._clip_grad = optimizer["clip_grad"]
        self.optimizer = torch.optim.AdamW(
            self.policy.parameters(),
            lr=optimizer["lr"],
            betas=(optimizer["adam_beta1"], optimizer["adam_beta2"]),
            eps=optimizer["adam_eps"],
            weight_decay=optimizer["weight_decay"],
        )

    def step(self, prompts: torch.Tensor, answers: Sequence[Sequence[int]]) -> dict[str, float]:
        """Samples, rewards exact answers, and trains on them.

        Args:
            prompts: int64 [num_prompts, prompt_length], without padding.
            answers: The token ids of each prompt's answer, end of sequence included.

        Returns:
            Seconds of each pass and of the whole step.
        """
        clock = _Clock()
        repeated = prompts.repeat_interleave(self._num_generations, dim=0)
        batch_size = self._policy_config["generation_batch_size"]
        responses = torch.cat([self._sample(rows) for rows in repeated.split(batch_size)])
        clock.stop("generation")

        mask = self._response_mask(responses)
        advantages = self._advantages(responses, mask, answers)
        input_ids = torch.cat([repeated, responses], dim=1)
        clock.stop("rewards and advantages")

        with torch.no_grad():
            passes = input_ids.split(self._policy_config["logprob_batch_size"])
            previous = torch.cat([self._logprobs(rows, prompts.shape[1]) for rows in passes])
        clock.stop("log-probs")

        for rows in torch.arange(len(input_ids)).split(self._policy_config["train_global_batch_size"]):
            self._train(input_ids[rows], mask[rows], advantages[rows], previous[rows], prompts.shape[1])
        clock.stop("training")

        self._copy_weights()
        clock.stop("weight copy")
        return clock.seconds | {"whole step": sum(clock.seconds.values())}

    @torch.no_grad()
    def _sample(self, prompts: torch.Tensor) -> torch.Tensor:
        """Samples at temperature 1: int64 [B, max_new_tokens], end of sequence repeated after the first."""
        sampled: list[torch.Tensor] = []
        done = torch.zeros(len(prompts), dtype=torch.bool)
        inputs, cache = prompts, None
        for _ in range(self._policy_config["generation"]["max_new_tokens"]):
            out = self.sampler(inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
            probabilities = out.logits[:, -1].softmax(dim=-1)
            token = probabilities.multinomial(1)[:, 0].masked_fill(done, self._eos)
            sampled.append(token)
            done |= token == self._eos
            if bool(done.all()):
                break
            inputs, cache = token[:, None], out.past_key_values
        missing = self._policy_config["generation"]["max_new_tokens"] - len(sampled)
        return torch.stack(sampled + missing * [sampled[-1]], dim=1)

    def _response_mask(self, responses: torch.Tensor) -> torch.Tensor:
        """Returns float32 [B, R]: 1 up to and including the first end of sequence."""
        ended_before = (responses == self._eos).cumsum(dim=1) - (responses == self._eos).long()
        return (ended_before == 0).float()

    def _advantages(
        self, responses: torch.Tensor, mask: torch.Tensor, answers: Sequence[Sequence[int]]
    ) -> torch.Tensor:
        """Returns float32 [B]: exact-match rewards, normalised in each prompt's group."""
        right = [
            row[: int(length)] == list(answers[index // self._num_generations])
            for index, (row, length) in enumerate(zip(responses.tolist(), mask.sum(dim=1), strict=True))
        ]
        rewards = torch.tensor(right, dtype=torch.float32).view(-1, self._num_generations)
        spread = rewards.std(dim=1, keepdim=True)
        return ((rewards - rewards.mean(dim=1, keepdim=True)) / (spread + 1e-6)).flatten()

    def _logprobs(self, input_ids: torch.Tensor, prompt_length: int) -> torch.Tensor:
        """Returns float32 [B, R]: log-probs of the response's tokens."""
        logits = self.policy(input_ids, use_cache=False).logits[:, prompt_length - 1 : -1].float()
        return -cross_entropy(logits.transpose(1, 2), input_ids[:, prompt_length:], reduction="none")

    def _train(
        self,
        input_ids: torch.Tensor,
        mask: torch.Tensor,
        advantages: torch.Tensor,
        previous: torch.Tensor,
        prompt_length: int,
    ) -> None:
        low, high = self._ratio_clip
        num_tokens = mask.sum()
        self.optimizer.zero_grad(set_to_none=True)
        for rows in torch.arange(len(input_ids)).split(self._policy_config["train_micro_batch_size"]):
            ratio = (self._logprobs(input_ids[rows], prompt_length) - previous[rows]).exp()
            gain = advantages[rows, None]
            objective = torch.minimum(gain * ratio, gain * ratio.clamp(1 - low, 1 + high))
            (-(objective * mask[rows]).sum() / num_tokens).backward()
        torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self._clip_grad)
        self.optimizer.step()

    @torch.no_grad()
    def _copy_weights(self) -> None:
        for theirs, ours in zip(self.sampler.parameters(), self.policy.parameters(), strict=True):
            theirs.copy_(ours)


class _Clock:
    """Splits the time since its creation into phases."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def stop(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase] = now - self._last
        self._last = now
