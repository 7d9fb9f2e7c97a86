"""What is worth saying of a valid recipe."""

from typing import Any

from nemo_offload_rl.config.model_kind import model_kind
from nemo_offload_rl.config.rules.base import MEGATRON, MODEL, OPTIMIZER, PP, TP, Verdict, note


@note(f"{MEGATRON}.sequence_parallel", TP)
def sequence_parallel_counts_with_tensor_parallel(enabled: bool, tp: int) -> Verdict:
    """megatron-core refuses it alone; NeMo-RL's recipes have it on."""
    return f"is off, since {TP} is 1" if enabled and tp == 1 else None


@note(f"{OPTIMIZER}.clip_grad", "policy.max_grad_norm")
def clip_grad_is_what_counts(clip: float, norm: float) -> Verdict:
    """Only the optimizer's setting is read."""
    return None if clip == norm else f"{clip} is what counts; policy.max_grad_norm ({norm}) is only there to refer to"


@note("policy.train_global_batch_size", "grpo.num_prompts_per_step", "grpo.num_generations_per_prompt")
def several_updates_are_off_policy(gbs: int, prompts: int, generations: int) -> Verdict:
    """Later optimizer steps train on samples of an older policy."""
    updates = prompts * generations // gbs
    return (
        f"{gbs} makes {updates} optimizer steps of a GRPO step's {prompts * generations} samples"
        if updates > 1
        else None
    )


@note("policy.residency.verify", "policy.use_pinned_optimizer_offload?")
def tensor_by_tensor_is_not_verified(verify: bool, pinned: bool | None) -> Verdict:
    """Checksums are of ranges, in which optimizer state then is not."""
    if not verify or pinned:
        return None
    key = "policy.use_pinned_optimizer_offload"
    return f"compares no optimizer state, which moves tensor by tensor; with {key}: true it does"


@note(f"{MEGATRON}.offload_modules", f"{MEGATRON}.fine_grained_activation_offloading")
def offload_modules_count_with_offloading(modules: list[str] | None, enabled: bool) -> Verdict:
    """The list alone moves nothing."""
    switch = f"{MEGATRON}.fine_grained_activation_offloading"
    return f"has no effect, since {switch} is false" if modules and not enabled else None


@note(f"{MEGATRON}.delta_offload_bytes_across_pp_ranks?", PP)
def pipeline_ranks_differ_with_a_pipeline(delta: int | None, pp: int) -> Verdict:
    """The first stage offloads all that the recipe says."""
    return f"has no effect, since {PP} is 1" if delta and pp == 1 else None


@note(f"{MEGATRON}.delay_offload_until_cuda_graph?", *MODEL)
def delayed_offload_is_of_experts(delay: bool | None, *model: Any) -> Verdict:
    """megatron-core delays the copies of mixture-of-experts layers only."""
    return "has no effect on a dense model" if delay and model_kind(*model).has_experts is False else None


@note(f"{MEGATRON}.cuda_graph_modules", f"{MEGATRON}.cuda_graph_impl")
def graph_modules_count_with_graphs(modules: list[str], impl: str) -> Verdict:
    """The list alone captures nothing."""
    return f"has no effect, since {MEGATRON}.cuda_graph_impl is none" if modules and impl == "none" else None


@note(
    "checkpointing.save_period",
    "checkpointing.enabled",
    "checkpointing.metric_name",
    "grpo.val_period?",
    "sft.val_period?",
)
def checkpoints_are_saved_with_their_metric(
    save: int, enabled: bool, metric: str | None, grpo_period: int | None, sft_period: int | None
) -> Verdict:
    """A checkpoint between validations has no fresh metric."""
    period = grpo_period or sft_period or 0
    if not enabled or metric is None or not metric.startswith("val:") or (period and save % period == 0):
        return None
    return f"{save} is no multiple of val_period ({period}), so some checkpoints are saved without {metric}"
