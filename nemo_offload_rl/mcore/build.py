"""Builds the training state of one rank: model chunks in DDP, the optimizer, the learning-rate schedule.

Detects steps that change no parameter.
"""

import contextlib
import functools
import gc
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.utils import get_model_config
from torch.utils.hooks import RemovableHandle

from nemo_offload_rl.config.megatron import tokens_of_tile
from nemo_offload_rl.config.schema.policy import PolicyConfig
from nemo_offload_rl.hf_config import generation_config
from nemo_offload_rl.mcore.model.model_config import (
    has_pretrained_weights,
    make_bridge,
    make_ddp_config,
    make_optimizer_config,
    make_provider,
)
from nemo_offload_rl.mcore.model.tiled_mlp import tile_mlps
from nemo_offload_rl.mcore.optimizer.init_optimizer_state import init_optimizer_state
from nemo_offload_rl.mcore.patches.layer_state import weigh_by_tokens
from nemo_offload_rl.mcore.patches.optimizers import (
    add_gradients_on_this_stream,
    build_optimizer,
    masters_without_memory,
)
from nemo_offload_rl.mcore.random_weights import RandomWeights
from nemo_offload_rl.mcore.weights import check_weights

_NUM_STEPS = 10
"""First steps of a worker that are checked: phases and a resumed checkpoint come before the first or between them."""
_PATIENCE = 3
"""Unchanged steps in a row that raise: a small learning rate may by chance change no sampled bf16 value in one step."""
_MOST_PARAMETERS, _MOST_ELEMENTS = 16, 65_536
_LEAST_NORM = 1e-6
"""A smaller gradient is not checked: Adam's epsilon may leave bf16 parameters unchanged, as with equal advantages."""


class UnchangedParametersError(RuntimeError):
    """Says that steps with gradients have changed no parameter."""


class ParameterWatch:
    """Compares a sample of the parameters before and after each of the first steps.

    Up to 16 matrices of all sizes, with up to 65,536 elements each, are copied and compared on their device. Norms'
    weights are left out: a small learning rate does not change a bf16 number near 1.

    Args:
        parameters: this rank's parameters; those that are not trained are left out.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        matrices = sorted((one for one in trained if one.ndim > 1), key=torch.Tensor.numel) or trained
        self._parameters = matrices[:: -(-len(matrices) // _MOST_PARAMETERS) or 1]
        self._num_left = _NUM_STEPS
        self._num_unchanged = 0
        self._before: list[torch.Tensor] = []

    def before_step(self) -> None:
        """Copy the sample."""
        self._before = [sample.clone() for sample in self._samples()] if self._num_left else []

    def after_step(self, grad_norm: float, learning_rates: Sequence[float], device: torch.device) -> None:
        """Compare the sample with its copy, on all ranks together; collective.

        Args:
            grad_norm: norm of the whole gradient, the same on every rank.
            learning_rates: learning rates of the optimizer's groups on this rank.
            device: where the model computes.

        Raises:
            UnchangedParametersError: on every rank, if the last three steps with gradients and a learning rate have
                changed nothing on any rank.
        """
        if not self._num_left or grad_norm < _LEAST_NORM:
            return
        self._num_left -= 1
        before, self._before = self._before, []
        changed = torch.zeros((), dtype=torch.float64, device=device)
        for sample, was in zip(self._samples(), before, strict=True):
            changed += (sample != was).any()
        found = torch.stack([changed, changed.new_tensor(max(learning_rates, default=0.0))])
        torch.distributed.all_reduce(found, op=torch.distributed.ReduceOp.MAX)
        num_changed, learning_rate = found.tolist()
        if num_changed or not learning_rate:
            self._num_unchanged = 0
            return
        self._num_unchanged += 1
        if self._num_unchanged == _PATIENCE:
            dtype = str(self._parameters[0].dtype).removeprefix("torch.") if self._parameters else "float32"
            raise UnchangedParametersError(
                f"The last {_PATIENCE} training steps changed none of the sampled parameters. The gradient's norm is "
                f"{grad_norm:.3g} and the learning rate {learning_rate:.3g}: the learning rate is too small for "
                f"{dtype} parameters, or it does not reach the optimizer; raise policy.megatron_cfg.optimizer.lr, or "
                "if it is not small, report this."
            )

    def _samples(self) -> list[torch.Tensor]:
        flat = [parameter.detach().view(-1) for parameter in self._parameters]
        return [one[:: -(-one.numel() // _MOST_ELEMENTS) or 1] for one in flat]


@dataclass
class TrainingState:
    """Holds one rank's part of the model and its training."""

    bridge: Any
    """The `AutoBridge` that converts names and weights between Hugging Face and Megatron."""
    config: Any
    """The model's config (a `GPTModelProvider`, which is a `TransformerConfig`)."""
    model: list[Any]
    """The model chunks, one a virtual pipeline stage, each wrapped in DistributedDataParallel."""
    optimizer: MegatronOptimizer | None
    scheduler: OptimizerParamScheduler | None
    generation_config: Mapping[str, Any] | None
    """The contents of the model's generation_config.json, which exports and checkpoints repeat; None without one."""
    vocab_size: int
    """Number of real tokens; the embedding may be padded beyond it."""
    gradient_hooks: list[RemovableHandle]
    """Hooks by which autograd notifies DistributedDataParallel of each gradient."""
    watch: ParameterWatch
    """Raises if the first steps change no parameter."""
    before_update: Callable[[], None] = lambda: None
    """Called in each step after the backward pass, before the gradients' norm is computed."""

    def parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield every parameter of this rank, with a name that is unique over the model chunks."""
        for index, chunk in enumerate(self.model):
            for name, parameter in chunk.named_parameters():
                yield f"{index}.{name}", parameter

    def close(self) -> None:
        """Remove the gradient hooks, so that the garbage collector can free the model; training is over.

        megatron-core's optimizer keeps views of fp32 parameters, whose autograd graphs keep the nodes with the hooks,
        and these keep the model and its process groups: a cycle through C++, which the collector does not see.
        """
        for hook in self.gradient_hooks:
            hook.remove()


def build(
    policy: PolicyConfig,
    hf_config: Any,
    *,
    seed: int,
    init_optimizer: bool,
    streamed: bool = False,
) -> TrainingState:
    """Build the policy of this rank; the process groups must exist.

    Args:
        policy: the recipe's policy section.
        hf_config: the model's Hugging Face config.
        seed: seed of random weights (`policy.hf_config`), the same on every rank.
        init_optimizer: False for a policy that is only evaluated.
        streamed: leave it to the offloader to make masters and moments, in host memory.

    Raises:
        ValueError: megatron-core's own checks refuse the configs.
    """
    bridge = make_bridge(policy, hf_config)
    provider = make_provider(policy, bridge)
    hooks: list[Callable[[list[Any]], Any]] = []
    if has_pretrained_weights(policy):
        hooks.append(functools.partial(check_weights, bridge, f"policy.model_name {policy['model_name']!r}"))
        hooks.append(bridge.load_hf_weights)
    else:
        hooks.append(functools.partial(_init_random_weights, bridge, seed=seed))
    if policy["megatron_cfg"]["freeze_moe_router"]:
        hooks.append(_freeze_router)
    with contextlib.redirect_stdout(io.StringIO()):  # Megatron-Bridge prints the parameter count
        model = provider.provide_distributed_model(
            ddp_config=make_ddp_config(policy),
            overlap_param_gather_with_optimizer_step=False,
            use_cpu_initialization=provider.use_cpu_initialization,
            pre_wrap_hook=hooks,
        )
    _settle_dtypes(model)
    weigh_by_tokens(model)
    gradient_hooks = add_gradients_on_this_stream(model)
    config = get_model_config(model[0])
    tile_mlps(model, tokens_of_tile(policy["megatron_cfg"]["mlp_tile_tokens"], config.hidden_size))
    optimizer = scheduler = None
    if init_optimizer:
        with masters_without_memory() if streamed else contextlib.nullcontext():
            optimizer = build_optimizer(make_optimizer_config(policy), model)
        if not streamed:
            init_optimizer_state(optimizer)
        scheduler = make_scheduler(policy, optimizer)
        config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    ddp = model[0].ddp_config
    if ddp.overlap_grad_reduce:
        config.no_sync_func = _one_or_all([chunk.no_sync for chunk in model])
    watch = ParameterWatch(parameter for chunk in model for parameter in chunk.parameters())
    return TrainingState(
        bridge,
        config,
        model,
        optimizer,
        scheduler,
        generation_config(policy),
        provider.vocab_size,
        gradient_hooks,
        watch,
    )


def make_scheduler(policy: PolicyConfig, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """Returns the learning-rate and weight-decay schedule of the recipe, counted in calls of `train` as in NeMo-RL.

    Lengths are NeMo-RL's (`megatron.bridge.training.config`): weight decay changes over the whole run, also where the
    learning rate decays over another number of steps, and a warm-up as long as the decay ends one sample before it.

    Args:
        policy: the recipe's policy section, with the run's length (`run.setup.with_run_length`) if there is a run.
        optimizer: the optimizer whose parameter groups the schedule sets.

    Raises:
        ValueError: the schedule's length is left to a run, and there is none.
    """
    section, optim = policy["megatron_cfg"]["scheduler"], policy["megatron_cfg"]["optimizer"]
    decay = section["lr_decay_iters"]
    warmup: float = section["lr_warmup_iters"]
    if decay is None:
        raise ValueError(
            "policy.megatron_cfg.scheduler.lr_decay_iters is null, which a run replaces by its number of steps; for a "
            "worker without a run, set it to a number of calls of train."
        )
    # No recipe has this key, which a run adds. A worker without a run has no length but that of the decay.
    run_length = section.get("run_length") or decay
    if warmup >= decay:  # in a short run: a rule requires a longer lr_decay_iters
        warmup = decay - 1 / policy["train_global_batch_size"]
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=section["lr_warmup_init"],
        max_lr=optim["lr"],
        min_lr=optim["min_lr"],
        lr_warmup_steps=warmup,
        lr_decay_steps=decay,
        lr_decay_style=section["lr_decay_style"],
        start_wd=section["start_weight_decay"],
        end_wd=section["end_weight_decay"],
        wd_incr_steps=run_length,
        wd_incr_style=section["weight_decay_incr_style"],
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=section["override_opt_param_scheduler"],
    )
    scheduler.step(increment=0)
    return scheduler


def _one_or_all(functions: list[Any]) -> Any:
    """Returns functions as megatron-core's schedules take them: one without virtual stages, else the list."""
    return functions[0] if len(functions) == 1 else functions


def _freeze_router(chunks: list[Any]) -> list[Any]:
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if ".router." in name:
                parameter.requires_grad_(False)
    return chunks


def _settle_dtypes(chunks: list[Any]) -> None:
    """Make routers convert their expert bias back to fp32 now, which they would do in their next forward pass.

    Float16Module has made it bf16. A buffer that gets other memory after the offloader moved it into a flat
    buffer would have no reference weights.
    """
    for chunk in chunks:
        for module in chunk.modules():
            if hasattr(module, "_maintain_float32_expert_bias"):
                module._maintain_float32_expert_bias()


def _init_random_weights(bridge: Any, chunks: list[Any], *, seed: int) -> list[Any]:
    """Fills a model with random weights, equal on ranks that split it differently."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    load_weights(bridge, chunks, RandomWeights(bridge.hf_pretrained, seed, device))
    gc.collect()  # cycles in the bridge keep the last weights: 2.3 GiB of an 8 B model, before host memory is pinned
    if on_gpu:
        torch.cuda.empty_cache()
    return chunks


def load_weights(bridge: Any, chunks: list[Any], weights: Mapping[str, torch.Tensor]) -> list[Any]:
    """Load weights from memory, named and shaped as in files, into model chunks.

    Args:
        bridge: an `AutoBridge` made from a config alone.
        chunks: the model's chunks.
        weights: all of the model's weights, by name.
    """
    from megatron.bridge.models.hf_pretrained.causal_lm import PreTrainedCausalLM
    from megatron.bridge.models.hf_pretrained.state import StateDict, StateSource

    names = sorted(weights)

    class Source(StateSource):
        def get_all_keys(self) -> list[str]:
            return names

        def load_tensors(self, keys: list[str]) -> dict[str, torch.Tensor]:
            return {name: weights[name] for name in keys}

    class WeightsInMemory(PreTrainedCausalLM):
        state = property(lambda _: StateDict(Source()))

    source = WeightsInMemory()
    source.config = bridge.hf_pretrained
    loader = type(bridge)(source)
    with contextlib.redirect_stdout(io.StringIO()):  # a progress bar
        loader.load_hf_weights(check_weights(loader, "The model in memory", chunks))
    return chunks
