"""Notes on valid recipes, mostly about keys that have no effect."""

from typing import Any

from nemo_offload_rl.config.algorithms import AlgorithmSpec
from nemo_offload_rl.config.model.model_kind import model_kind
from nemo_offload_rl.config.rules.base import MEGATRON, MODEL, OPTIMIZER, PACKING, PP, SPEC, Verdict, note
from nemo_offload_rl.config.rules.memory import RECOMPUTATION, recomputed_modules

_MOMENTUM_OF_EVERY_RECIPE = 0.9
ACTIVATION_OFFLOAD = "policy.activation_offload"
MODEL_NAME, TOKENIZER = "policy.model_name", "policy.tokenizer.name"
_STATE_IN_TRAIN = "policy.residency.table.train.optimizer_state"


@note(f"{OPTIMIZER}.clip_grad", "policy.max_grad_norm")
def clip_grad_is_what_counts(clip: float, norm: float | None) -> Verdict:
    """Notes that clip_grad differs from max_grad_norm, since the optimizer reads only clip_grad."""
    if norm is None or clip == norm:
        return None
    clipping = f"{clip} is the norm that gradients are clipped to" if clip else f"{clip} switches clipping off"
    return f"{clipping}; policy.max_grad_norm ({norm}) has an effect only where another key refers to it"


@note("policy.trust_remote_code", MODEL_NAME, TOKENIZER)
def code_of_the_model_runs(trusts: bool, model: str, tokenizer: str) -> Verdict:
    """Notes that code which others wrote runs in this run's processes."""
    names = " and ".join(dict.fromkeys([model, tokenizer]))
    return f"is true: code in the files of {names} runs with your rights, where they have some" if trusts else None


@note(f"{OPTIMIZER}.optimizer")
def sgd_has_no_moments(optimizer: str) -> Verdict:
    """Notes that Adam's keys, which every recipe has, have no effect with sgd."""
    return None if optimizer == "adam" else "is sgd, with which adam_beta1, adam_beta2 and adam_eps have no effect"


@note(f"{OPTIMIZER}.sgd_momentum", f"{OPTIMIZER}.optimizer")
def adam_has_no_momentum(momentum: float, optimizer: str) -> Verdict:
    """Notes that momentum has no effect with Adam, unless it is megatron-core's default of 0.9, as in every recipe."""
    is_wish = optimizer == "adam" and momentum != _MOMENTUM_OF_EVERY_RECIPE
    return f"{momentum} has no effect, since {OPTIMIZER}.optimizer is adam" if is_wish else None


@note("policy.train_global_batch_size", "grpo.num_prompts_per_step", "grpo.num_generations_per_prompt")
def several_updates_are_off_policy(gbs: int, prompts: int, generations: int) -> Verdict:
    """Notes that the later optimizer steps of a GRPO step train on samples of an older policy."""
    updates = prompts * generations // gbs
    return (
        f"{gbs} means {updates} optimizer steps per GRPO step of {prompts * generations} samples; all but the first "
        "are off-policy"
        if updates > 1
        else None
    )


@note(f"{MEGATRON}.freeze_config?")
def text_models_have_nothing_to_freeze(parts: dict[str, Any] | None) -> Verdict:
    """Notes that freeze_config has no effect: a rule, or the worker, refuses models that have such parts."""
    return "has no effect on a text-only model, as in NeMo-RL: all of its weights are trained" if parts else None


@note(f"{MEGATRON}.offload_modules", f"{MEGATRON}.fine_grained_activation_offloading")
def offload_modules_count_with_offloading(modules: list[str] | None, enabled: bool) -> Verdict:
    """Notes that offload_modules has no effect while offloading is off."""
    switch = f"{MEGATRON}.fine_grained_activation_offloading"
    return f"has no effect, since {switch} is false" if modules and not enabled else None


@note(f"{MEGATRON}.delta_offload_bytes_across_pp_ranks?", PP, f"{MEGATRON}.fine_grained_activation_offloading")
def pipeline_ranks_differ_with_a_pipeline(delta: int | None, pp: int, enabled: bool) -> Verdict:
    """Notes that the delta has no effect without a pipeline or offloading: the first stage offloads all that it may."""
    if not delta or (pp > 1 and enabled):
        return None
    why = f"{PP} is 1" if pp == 1 else f"{MEGATRON}.fine_grained_activation_offloading is false"
    return f"has no effect, since {why}"


@note(f"{MEGATRON}.delay_offload_until_cuda_graph?", f"{MEGATRON}.offload_modules", *MODEL)
def delayed_offload_is_of_experts(delay: bool | None, modules: list[str] | None, *model: Any) -> Verdict:
    """Notes where delayed copies have no effect: megatron-core delays only those of experts that are not fused."""
    if not delay:
        return None
    if model_kind(*model).has_experts is False:
        return "has no effect on a dense model"
    if not {"expert_fc1", "moe_act"} & set(modules or []):
        return f"has no effect, since {MEGATRON}.offload_modules has neither expert_fc1 nor moe_act"
    return None


@note(
    f"{MEGATRON}.attention_backend?",
    "policy.precision",
    f"{MEGATRON}.offload_modules",
    f"{MEGATRON}.fine_grained_activation_offloading",
    f"{ACTIVATION_OFFLOAD}.host_memory_limit_gib?",
)
def scores_of_attention_are_not_planned(
    backend: str | None, precision: str, modules: list[str] | None, enabled: bool, limit: float | None
) -> Verdict:
    """Notes that the host memory computed for core_attn has no room for attention scores.

    They have tokens x tokens elements for each head.
    """
    is_unfused = backend == "unfused" or precision == "float32"
    if not is_unfused or not enabled or "core_attn" not in (modules or []) or limit is not None:
        return None
    why = "is unfused" if backend == "unfused" else "is not fused with policy.precision float32"
    return (
        f"{why}, so that attention saves its scores for the backward pass; the host memory computed for activations "
        "has no room for them, and they stay on the GPU: to offload them, set "
        f"{ACTIVATION_OFFLOAD}.host_memory_limit_gib"
    )


@note(
    f"{MEGATRON}.attention_backend?",
    PACKING,
    "policy.train_micro_batch_size",
    SPEC,
    f"{MEGATRON}.offload_modules",
    f"{MEGATRON}.fine_grained_activation_offloading",
    f"{ACTIVATION_OFFLOAD}.host_memory_limit_gib?",
)
def outputs_of_flash_attention_are_planned_once(
    backend: str | None,
    packs: bool,
    samples: int,
    spec: AlgorithmSpec,
    modules: list[str] | None,
    enabled: bool,
    limit: float | None,
) -> Verdict:
    """Notes that the plan counts the attention output once although attn_proj saves a copy.

    flash-attn works on [batch, sequence], and what attn_proj saves of several padded rows is a copy.
    """
    rows = samples * spec.group_size
    is_copied = backend == "flash" and rows > 1 and not packs
    if not is_copied or not enabled or "attn_proj" not in (modules or []) or limit is not None:
        return None
    return (
        f"is flash, so that attn_proj saves a copy of the attention output in micro-batches of {rows} padded rows; the "
        "host memory computed for activations has room for one of the two, and the other stays on the GPU: to offload "
        f"both, set {ACTIVATION_OFFLOAD}.host_memory_limit_gib, or set this to auto"
    )


@note(f"{MEGATRON}.recompute_modules", *RECOMPUTATION[:2], *MODEL)
def dense_models_recompute_no_experts(
    modules: list[str] | None, enabled: bool, granularity: str | None, *model: Any
) -> Verdict:
    """Notes that recomputing experts has no effect on a dense model, in recipes for both kinds of models."""
    recomputed = recomputed_modules(enabled, granularity, modules)
    absent = [name for name in ("moe", "shared_experts") if name in recomputed]
    if not absent or model_kind(*model).has_experts is not False:
        return None
    verb = "has" if len(absent) == 1 else "have"
    return f"has {' and '.join(absent)}, which {verb} no effect on a dense model"


@note(f"{ACTIVATION_OFFLOAD}.strict?", f"{MEGATRON}.fine_grained_activation_offloading")
def strictness_counts_with_offloading(strict: bool | None, enabled: bool) -> Verdict:
    """Notes that strict has no effect while offloading is off."""
    switch = f"{MEGATRON}.fine_grained_activation_offloading"
    return f"has no effect, since {switch} is false" if strict and not enabled else None


@note(f"{MEGATRON}.cuda_graph_modules", f"{MEGATRON}.cuda_graph_impl")
def graph_modules_count_with_graphs(modules: list[str], impl: str) -> Verdict:
    """Notes that cuda_graph_modules has no effect while graphs are off."""
    return f"has no effect, since {MEGATRON}.cuda_graph_impl is none" if modules and impl == "none" else None


@note(
    "checkpointing.save_period",
    "checkpointing.enabled",
    "checkpointing.metric_name",
    "grpo.val_period?",
    "sft.val_period?",
    "dpo.val_period?",
)
def checkpoints_are_saved_with_their_metric(
    save: int, enabled: bool, metric: str | None, *periods: int | None
) -> Verdict:
    """Notes that a checkpoint between validations has no current validation metric."""
    period = next((period for period in periods if period is not None), 0)
    if not enabled or metric is None or not metric.startswith("val:") or (period and save % period == 0):
        return None
    return f"{save} is not a multiple of val_period ({period}), so some checkpoints are saved without {metric}"


@note(
    f"{MEGATRON}.checkpoint.async_save?",
    f"{_STATE_IN_TRAIN}?",
    "checkpointing.enabled",
    "checkpointing.save_optimizer",
)
def steps_of_streamed_state_wait_for_files(
    beside: bool | None, state: str | None, enabled: bool, with_optimizer: bool
) -> Verdict:
    """Notes that training does not go on beside a save of streamed state, whose host memory the step writes."""
    if not beside or state != "streamed" or not enabled or not with_optimizer:
        return None
    return (
        f"is true, but {_STATE_IN_TRAIN} is streamed, so that the next training step waits until a checkpoint's files "
        "are written from the host memory that it changes; only what comes before it, such as generation, runs beside "
        f"the save; to train on meanwhile, set {_STATE_IN_TRAIN} to gpu, if the GPU has room"
    )


@note("policy.use_pinned_optimizer_offload?", f"{_STATE_IN_TRAIN}?")
def streamed_state_is_copied_faster_pinned(pinned: bool | None, state: str | None) -> Verdict:
    """Notes that each step streams state through staging buffers if its host memory is not page-locked."""
    if pinned is not False or state != "streamed":
        return None
    return (
        f"is false, but {_STATE_IN_TRAIN} is streamed, so that each step copies all optimizer state from and to "
        "pageable host memory through staging buffers, which is several times slower; set it to true, unless the host "
        "cannot page-lock that much memory"
    )
