"""Runs cycles of refit, generation and training without log-probs."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil
import ray
import torch

from nemo_offload_rl.data.batch import BatchedData, response_batch
from nemo_offload_rl.generation.interface import GenerationOutput, GenerationRequest, SamplingParams

WARM_UP = 10
"""Cycles before the first that counts: buffers grow, kernels are compiled."""
MOST_ROWS = 32
"""Rows of the optimizer step of one of many cycles, unless a micro-batch has more."""


@dataclass(frozen=True)
class Lengths:
    """Gives the sizes of one cycle.

    Attributes:
        num_prompts: rows of the generation request.
        prompt_tokens: tokens of each of its prompts.
        new_tokens: that each of them gets.
        row_tokens: tokens of each row that is trained on.
    """

    num_prompts: int
    prompt_tokens: int
    new_tokens: int
    row_tokens: int


class Cycles:
    """Drives the parts of a GRPO run by themselves.

    Args:
        algorithm: a `GRPO` that is built.
        vocab_size: of its model.
        max_tokens: of a sequence.
    """

    def __init__(self, algorithm: Any, *, vocab_size: int, max_tokens: int) -> None:
        self._weights = algorithm._weights
        self._loss_fn = algorithm._loss_fn
        self._sizes = algorithm._batch_sizes
        self._vocab_size = vocab_size
        self._max_tokens = max_tokens
        self._num_requests = 0
        self.generation = algorithm._generation
        self.policy = algorithm._policy

    def prepare(self, lengths: Lengths) -> tuple[GenerationRequest, BatchedData]:
        """Creates what a cycle generates from and trains on: the rows of one optimizer step."""
        return self._request(lengths, temperature=1.0), self._batch(lengths, self._sizes.train_global)

    def prepare_short(self, lengths: Lengths) -> tuple[GenerationRequest, BatchedData]:
        """Creates the same with few rows, so that many cycles take only minutes."""
        micro = self._sizes.train_micro
        return self._request(lengths, temperature=1.0), self._batch(lengths, max(1, MOST_ROWS // micro) * micro)

    def run(
        self, request: GenerationRequest, batch: BatchedData, while_asleep: Callable[[], None] | None = None
    ) -> dict[str, Any]:
        """Refits, generates and trains; returns what `train` returns.

        Args:
            request: what is generated.
            batch: what is trained on.
            while_asleep: called while the engine sleeps and nothing else has moved; if not given, the policy's state
                comes back during the release, as in a GRPO step.
        """
        self._weights.mark_stale()
        self._weights.refresh()
        self.generation.generate(request)
        if while_asleep is None:
            self.policy.start_return(self.generation.start_finish_generation(), logprobs=False)
        self.generation.finish_generation()
        if while_asleep is not None:
            while_asleep()
        mbs = self._sizes.train_micro
        result: dict[str, Any] = self.policy.train(batch, self._loss_fn, gbs=batch.size, mbs=mbs)
        return result

    def greedy(self, lengths: Lengths) -> GenerationOutput:
        """Returns the most likely tokens under the current policy."""
        self._weights.mark_stale()
        self._weights.refresh()
        output: GenerationOutput = self.generation.generate(self._request(lengths, temperature=0.0))
        self.generation.finish_generation()
        return output

    def varying(self, number: int) -> Lengths:
        """Returns the lengths of a cycle by its number."""
        choose = random.Random(number)
        prompt = choose.randint(1, self._max_tokens // 2)
        row = choose.randint(self._max_tokens // 4 + 1, self._max_tokens)
        return Lengths(choose.randint(1, 64), prompt, choose.randint(1, self._max_tokens // 4), row)

    def _request(self, lengths: Lengths, *, temperature: float) -> GenerationRequest:
        self._num_requests += 1
        choose = random.Random(lengths.num_prompts)
        prompts = [
            [choose.randrange(self._vocab_size) for _ in range(lengths.prompt_tokens)]
            for _ in range(lengths.num_prompts)
        ]
        sampling = SamplingParams(
            max_new_tokens=lengths.new_tokens, temperature=temperature, top_p=1.0, top_k=None, stop_token_ids=(), seed=0
        )
        return GenerationRequest(prompts, list(range(lengths.num_prompts)), self._num_requests, sampling)

    def _batch(self, lengths: Lengths, num_rows: int) -> BatchedData:
        choose = torch.Generator().manual_seed(lengths.row_tokens)
        middle = max(1, lengths.row_tokens // 2)
        rows = torch.randint(self._vocab_size, (num_rows, lengths.row_tokens), generator=choose).tolist()
        batch = response_batch([row[:middle] for row in rows], [row[middle:] for row in rows], 0)
        for name in ("generation_logprobs", "prev_logprobs", "reference_policy_logprobs"):
            batch[name] = batch["token_mask"] * -math.log(self._vocab_size)
        batch["advantages"] = torch.randn((num_rows, 1), generator=choose) * batch["token_mask"]
        return batch

    def processes(self) -> dict[str, psutil.Process]:
        """Returns the first rank of the policy and of the engine."""
        actors = {"policy": self.policy._actors[0], "engine": self.generation.receivers[0].actor}
        places = {name: ray.get(actor.process.remote()) for name, actor in actors.items()}
        return {name: psutil.Process(pid) for name, (_, pid) in places.items()}
