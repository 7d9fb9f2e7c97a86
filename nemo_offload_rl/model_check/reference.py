"""Computes the twin with transformers: random weights, log-probs, gradients."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nemo_offload_rl.data.batch import BatchedData
from nemo_offload_rl.mcore.build import as_in_files
from nemo_offload_rl.model_check.twin import ROW_LENGTH

_NUM_ROWS = 3
_GAIN = 1.5
"""Scale of random matrices relative to 1/sqrt(inputs); with a smaller one, nearly uniform attention hides errors."""
_SPREAD = 0.3
"""Standard deviation of norms' weights, around their initial value, and of biases."""


@dataclass(frozen=True)
class Reference:
    """Holds the results of the transformers model, which Megatron's model has to match.

    Attributes:
        weights: the weights with the names and shapes of checkpoint files.
        logprobs: float32 [n, S], as `mcore.step.logprobs_of`.
        gradients: gradients of `loss_of(logprobs)` with respect to the parameters, named and shaped as `weights`.
    """

    weights: Mapping[str, Tensor]
    logprobs: Tensor
    gradients: Mapping[str, Tensor]


def rows(vocab_size: int, seed: int) -> BatchedData:
    """Returns random rows of unequal lengths, right-padded; the longest has `ROW_LENGTH` tokens."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocab_size, (_NUM_ROWS, ROW_LENGTH), generator=generator)
    lengths = torch.tensor([ROW_LENGTH - 11 * row for row in range(_NUM_ROWS)])
    real = torch.arange(ROW_LENGTH)[None] < lengths[:, None]
    return BatchedData(input_ids=torch.where(real, ids, 0), input_lengths=lengths)


def loss_of(logprobs: Tensor) -> Tensor:
    """Returns a mean of weighted log-probs: every token has a different weight, so that no gradient cancels out."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(logprobs.shape, generator=generator).to(logprobs.device)
    return (weights * logprobs).sum() / logprobs.shape[0]


def reference_of(config: Any, data: BatchedData, *, seed: int) -> Reference:
    """Builds the transformers model of a config with random weights, and runs it forward and backward in float32.

    It runs on the CPU, whose kernels need no loading and do not use TF32.

    Args:
        config: the twin's `PretrainedConfig`.
        data: the rows.
        seed: the seed of the weights.
    """
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            config, trust_remote_code=False, dtype=torch.float32, attn_implementation="eager"
        )
        _randomize(model)
    weights = {name: tensor.clone() for name, tensor in as_in_files(model, model.state_dict()).items()}
    model.eval()
    logits = model(data["input_ids"], use_cache=False).logits
    logprobs = _own_logprobs(logits.float(), data)
    loss_of(logprobs).backward()
    gradients = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in model.named_parameters()  # a tied output layer has the embedding's gradient
    }
    return Reference(weights, logprobs.detach(), as_in_files(model, gradients))


@torch.no_grad()
def _randomize(model: torch.nn.Module) -> None:
    """Gives every weight a random value that affects the result: transformers starts biases at 0 and norms at 1."""
    for parameter in model.parameters():
        noise = torch.randn_like(parameter)
        if parameter.dim() >= 2:
            parameter.copy_(noise * (_GAIN / parameter.shape[-1] ** 0.5))
        else:
            parameter.add_(noise, alpha=_SPREAD)
    kept = model.state_dict()
    for name, buffer in model.named_buffers():
        if name in kept and buffer.is_floating_point():  # such as the expert biases of routers
            buffer.add_(torch.randn_like(buffer), alpha=_SPREAD)


def _own_logprobs(logits: Tensor, data: BatchedData) -> Tensor:
    """Returns the log-probs [n, S] of the rows' own tokens from logits [n, S, V]; entry 0 and padding are 0."""
    values = logits[:, :-1].log_softmax(-1).gather(-1, data["input_ids"][:, 1:, None]).squeeze(-1)
    values = torch.nn.functional.pad(values, (1, 0))
    columns = torch.arange(values.shape[1])[None]
    return torch.where((columns > 0) & (columns < data["input_lengths"][:, None]), values, 0.0)
