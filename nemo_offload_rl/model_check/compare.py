"""Builds a twin with transformers and with Megatron, and compares what they compute."""

import contextlib
import copy
import dataclasses
import io
import os
import textwrap
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnBackend
from torch import Tensor

from nemo_offload_rl.config.schema.policy import PolicyConfig
from nemo_offload_rl.data.batch import BatchedData
from nemo_offload_rl.hf_config import hf_config
from nemo_offload_rl.mcore import distributed
from nemo_offload_rl.mcore.batches import MicroBatch, packed_microbatches, padded_microbatches
from nemo_offload_rl.mcore.build import load_weights
from nemo_offload_rl.mcore.logprob.forward import model_logprobs
from nemo_offload_rl.mcore.model.bridge_import import auto_bridge, have_transformer_engine
from nemo_offload_rl.mcore.model.model_config import (
    bridge_of_config,
    has_pretrained_weights,
    make_bridge,
    make_provider,
)
from nemo_offload_rl.mcore.patches.layer_state import weigh_by_tokens
from nemo_offload_rl.mcore.random_weights import as_in_files
from nemo_offload_rl.model_check.alone import alone
from nemo_offload_rl.model_check.result import CheckResult, Difference
from nemo_offload_rl.model_check.twin import ROW_LENGTH, twin_config

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


_SMALL_GRADIENT = 1e-3
"""Smallest norm that a gradient's difference is divided by, relative to the norm by the mean square of all gradients.

Some gradients are zero except for rounding, such as that of a bias of keys without rope.
"""

_PLAIN = (bool, int, float, str, list, tuple, dict, type(None))
"""Types of the fields of Megatron's config that can be compared; the others are functions, layer specs and dtypes."""


class UnbuildableError(ValueError):
    """Says that the model cannot be built with Megatron, or its twin with transformers."""


def check(policy: PolicyConfig) -> CheckResult:
    """Runs `compare`; the result also has the device, the layer spec and the seconds of each stage."""
    stages: dict[str, float] = {}
    differences = compare(policy, stages)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    layers = "Transformer Engine" if have_transformer_engine() else "local"
    return CheckResult(tuple(differences), device, layers, stages)


@contextlib.contextmanager
def _timed(stages: dict[str, float] | None, name: str) -> Iterator[None]:
    """Adds the seconds that this context takes to the stage of this name."""
    start = time.perf_counter()
    yield
    if stages is not None:
        stages[name] = (stages[name] if name in stages else 0.0) + time.perf_counter() - start


def compare(policy: PolicyConfig, stages: dict[str, float] | None = None) -> list[Difference]:
    """Compares a small twin of the policy's model, computed by transformers and by Megatron.

    The caller's process must not have a process group yet.

    Args:
        policy: a recipe's policy section.
        stages: receives the seconds of each stage; None to skip this.

    Returns:
        One entry for each kind of batches.

    Raises:
        UnbuildableError: one of the libraries refuses the twin.
        ValueError: the Hugging Face config is invalid.
    """
    with _timed(stages, "config"):
        config = hf_config(policy)
        twin = twin_config(config)
    if has_pretrained_weights(policy):
        with _timed(stages, "Megatron-Bridge"), _refusals("Megatron cannot compute this model"):
            check_is_built_of(config, make_bridge(policy, copy.deepcopy(config)))
    section = alone(policy, twin.to_dict())
    with _timed(stages, "Megatron-Bridge"), _refusals("Megatron cannot compute this model"):
        make_provider(section, bridge_of_config(copy.deepcopy(twin)))  # refuses a family before its twin is built
    return compare_configs(section, reference=twin, built=twin, stages=stages)


def check_is_built_of(config: Any, bridge: Any) -> None:
    """Checks that the worker's bridge builds the model of a config, of which the twin is a small copy.

    Args:
        config: the `PretrainedConfig` of the policy's model, with its overrides.
        bridge: the `AutoBridge` of the worker, which has weights besides.

    Raises:
        UnbuildableError: Megatron's config of the model follows from something else.
    """
    wanted, found = (
        each.to_megatron_provider(load_weights=False) for each in (bridge_of_config(copy.deepcopy(config)), bridge)
    )
    other = [
        f"{field.name} {getattr(found, field.name)!r} instead of {getattr(wanted, field.name)!r}"
        for field in dataclasses.fields(wanted)
        if isinstance(getattr(wanted, field.name), _PLAIN) and getattr(found, field.name) != getattr(wanted, field.name)
    ]
    if other:
        raise UnbuildableError(
            f"The worker would train another model than its Hugging Face config with policy.hf_config_overrides "
            f"describes: {', '.join(other)}"
        )


def compare_configs(
    section: PolicyConfig, *, reference: Any, built: Any, stages: dict[str, float] | None = None
) -> list[Difference]:
    """Compares the transformers model of one config with the Megatron model of another.

    Args:
        section: a policy section from `alone`.
        reference: the `PretrainedConfig` of the transformers model, as small as a twin's.
        built: the `PretrainedConfig` of the Megatron model.
        stages: as for `compare`.
    """
    found = _compare_once(section, reference, built, stages, seed=0)
    if all(difference.is_rounding for difference in found):
        return found
    # If two experts have nearly equal scores, rounding decides; this hardly happens again with other weights.
    again = _compare_once(section, reference, built, stages, seed=1)
    return min(found, again, key=lambda differences: max(difference.logprob for difference in differences))


def _compare_once(
    section: PolicyConfig, reference: Any, built: Any, stages: dict[str, float] | None, *, seed: int
) -> list[Difference]:
    data = rows(reference.vocab_size, seed)
    every_row = [list(range(data.size))]
    batches = {
        "padded": padded_microbatches(data, data.size)[0],
        "packed": packed_microbatches(data, every_row, divisible_by=1, row_divisible_by=1)[0],
    }
    with _timed(stages, "transformers"), _refusals("transformers cannot compute a small model with this one's flags"):
        wanted = reference_of(copy.deepcopy(reference), data, seed=seed)
    with one_rank() as device, _refusals("Megatron cannot compute this model"):
        with _timed(stages, "Megatron-Bridge"):
            auto_bridge()
        with _timed(stages, "model"):
            bridge, provider, model = _megatron_model(section, copy.deepcopy(built))
            load_weights(bridge, [model], wanted.weights)
        if any(type(module) is DotProductAttention for module in model.modules()):
            del batches["packed"]  # megatron-core's own attention, such as that of gemma4 on a CPU, asserts it away
        passes = {}
        for name, batch in batches.items():
            with _timed(stages, name):
                passes[name] = _backward(model, batch, provider.vocab_size, device)
        with _timed(stages, "gradients"):
            return [
                _difference(name, wanted, logprobs, _exported(bridge, model, gradients))
                for name, (logprobs, gradients) in passes.items()
            ]


@contextlib.contextmanager
def _refusals(sentence: str) -> Iterator[None]:
    """Turns the exceptions that libraries raise for configs they do not support, nearly any, into UnbuildableError."""
    kinds = (
        ArithmeticError,
        AssertionError,
        AttributeError,
        ImportError,  # a kernel library that the family needs is missing
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
    )
    try:
        yield
    except UnbuildableError:
        raise
    except kinds as error:
        kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
        said = textwrap.shorten(str(error), width=400, placeholder=" ...")
        raise UnbuildableError(f"{sentence}: {kind}{said}") from error


def _megatron_model(section: PolicyConfig, twin: Any) -> tuple[Any, Any, torch.nn.Module]:
    bridge = bridge_of_config(twin)
    provider = make_provider(section, bridge)
    # The only attention backend of Transformer Engine that computes in float32, padded and packed.
    provider.attention_backend = AttnBackend.unfused
    with contextlib.redirect_stdout(io.StringIO()):  # Megatron-Bridge prints the parameter count
        chunks = provider.provide_distributed_model(
            wrap_with_ddp=False, use_cpu_initialization=provider.use_cpu_initialization
        )
    weigh_by_tokens(chunks)
    return bridge, provider, chunks[0]


def _backward(
    model: torch.nn.Module, batch: MicroBatch, vocab_size: int, device: torch.device
) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Returns log-probs [n, S] of a micro-batch on the CPU, and the gradients of their loss by the model's names."""
    for parameter in model.parameters():
        parameter.grad = None
    logprobs = model_logprobs(model, batch, vocab_size=vocab_size, device=device)
    loss_of(logprobs).backward()
    return logprobs.detach().cpu(), {name: parameter.grad for name, parameter in model.named_parameters()}


@torch.no_grad()
def _exported(bridge: Any, model: torch.nn.Module, gradients: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """Returns the model's gradients with the names and shapes of checkpoint weights; overwrites the model's weights.

    The bridge exports weights by maps that are linear up to a constant, such as the 1 of norms that store their weight
    minus 1. So the gradients replace the weights, and the export of zeros is subtracted.
    """
    for parameter in model.parameters():
        parameter.zero_()
    constant = {name: tensor.clone().cpu() for name, tensor in bridge.export_hf_weights([model], show_progress=False)}
    for name, parameter in model.named_parameters():
        if (gradient := gradients[name]) is not None:
            parameter.copy_(gradient)
    exported = {name: tensor.clone().cpu() for name, tensor in bridge.export_hf_weights([model], show_progress=False)}
    return {name: tensor - constant[name] for name, tensor in exported.items()}


def _difference(name: str, wanted: Reference, logprobs: Tensor, gradients: Mapping[str, Tensor]) -> Difference:
    worst = float((logprobs - wanted.logprobs).abs().max())
    return Difference(name, worst, *_largest(wanted.gradients, gradients))


def _largest(wanted: Mapping[str, Tensor], got: Mapping[str, Tensor]) -> tuple[float, str]:
    """Returns the largest relative difference of a parameter's gradient, and the parameter's name.

    A parameter that Megatron's model does not have counts as a gradient of zero.
    """
    squares = sum(float(gradient.double().square().sum()) for gradient in wanted.values())
    count = sum(gradient.numel() for gradient in wanted.values())
    worst, where = 0.0, ""
    for name, gradient in wanted.items():
        usual = (squares / count * gradient.numel()) ** 0.5
        other = got[name] if name in got else torch.zeros_like(gradient)
        off = float((gradient - other).double().norm() / max(float(gradient.norm()), _SMALL_GRADIENT * usual))
        if not off <= worst:  # also true for NaN
            worst, where = off, name
    return worst, where


@contextlib.contextmanager
def one_rank() -> Iterator[torch.device]:
    """Creates a process group of only this process, without a port; restores the environment at the end.

    megatron-core sets Transformer Engine's attention backend in the environment for the first model, and rejects the
    backend of another one.
    """
    environment = dict(os.environ)
    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        os.environ.pop(name, None)
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    torch.distributed.init_process_group(
        "nccl" if on_gpu else "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        distributed.mpu.initialize_model_parallel()
        distributed.model_parallel_cuda_manual_seed(0, te_rng_tracker=False, force_reset_rng=True)
        yield device
    finally:
        distributed.destroy()
        os.environ.clear()
        os.environ.update(environment)
