"""Rules between two keys that differ only in the keys: a row for each in NEEDS, BOUNDS and READ_ONLY_WITH."""

import operator
from functools import partial
from typing import Any

from nemo_offload_rl.config.megatron import GRAPH_IMPL_KEY as GRAPHS
from nemo_offload_rl.config.megatron import GRAPH_MODULES_KEY, MLP_TILES_KEY
from nemo_offload_rl.config.problems import show, show_choices
from nemo_offload_rl.config.rules import base
from nemo_offload_rl.config.rules.base import RuleResult, note, rule

_OFF: tuple[Any, ...] = (None, False, 0, "none", [])
SET, _WANDB = "a value", "a section, such as '++logger.wandb={project: my_project, name: my_run}'"
_ANY = (SET, _WANDB)
"""In NEEDS: any value but null."""
_LOSS, _CAPACITY = "loss_fn", f"{base.MEGATRON}.moe_expert_capacity_factor"
_DELAY = f"{base.MEGATRON}.delay_offload_until_cuda_graph"
_OFFLOAD_LIMIT = "policy.activation_offload.host_memory_limit_gib"
_PORT, _SCALING = "cluster.master_port_range", "grpo.reward_scaling"

# A key, and what another key must be while this one is on.
NEEDS: tuple[tuple[str, str, Any], ...] = (
    (f"{base.DDP}.overlap_param_gather", base.DISTRIBUTED, True),
    (base.PRECISION_AWARE, base.DISTRIBUTED, True),
    (base.PRECISION_AWARE, f"{base.OPTIMIZER}.optimizer", "adam"),
    # megatron-core's other optimizers ignore the switch; the CPU's kernel is AdamW's; only it makes these copies.
    (base.CPU_OPTIMIZER, base.DISTRIBUTED, True),
    (base.CPU_OPTIMIZER, f"{base.OPTIMIZER}.decoupled_weight_decay", (True, None)),
    (f"{base.OPTIMIZER}.overlap_cpu_optimizer_d2h_h2d", base.CPU_OPTIMIZER, True),
    # The static inputs of graphs are bfloat16 and silently round others.
    (GRAPHS, "policy.precision", "bfloat16"),
    (GRAPHS, f"{base.MEGATRON}.fp32_residual_connection", (False, None)),
    # Delayed copies wait for the replay of a graph.
    (_DELAY, base.OFFLOADING, True),
    (_DELAY, GRAPHS, "transformer_engine"),
    # With the op fuser the MLP is another class, which was never compared in tiles.
    (MLP_TILES_KEY, f"{base.MEGATRON}.use_transformer_engine_op_fuser", (False, None)),
    (f"{base.MEGATRON}.moe_pad_expert_input_to_capacity", _CAPACITY, SET),
    ("cluster.max_restarts", "checkpointing.enabled", True),
    ("cluster.max_restarts", "checkpointing.save_optimizer", True),
    (f"{_PORT}_low", f"{_PORT}_high", SET),
    (f"{_PORT}_high", f"{_PORT}_low", SET),
    ("logger.wandb_enabled", "logger.wandb", _WANDB),
    ("grpo.skip_reference_policy_logprobs_calculation", f"{_LOSS}.reference_policy_kl_penalty", 0),
    (f"{_LOSS}.sequence_level_importance_ratios", f"{_LOSS}.token_level_loss", False),
    (f"{_LOSS}.disable_ppo_ratio", f"{_LOSS}.force_on_policy_ratio", False),
    (f"{_LOSS}.disable_ppo_ratio", f"{_LOSS}.sequence_level_importance_ratios", False),
    # As in NeMo-RL: CISPO weights single tokens by their clipped ratio.
    (f"{_LOSS}.use_cispo", f"{_LOSS}.token_level_loss", True),
    (f"{_LOSS}.use_cispo", f"{_LOSS}.ratio_clip_c", None),
    (f"{_LOSS}.use_cispo", f"{_LOSS}.disable_ppo_ratio", False),
    (f"{_LOSS}.use_cispo", f"{_LOSS}.force_on_policy_ratio", False),
    (f"{_LOSS}.use_cispo", f"{_LOSS}.sequence_level_importance_ratios", False),
    (f"{_LOSS}.truncated_importance_sampling_type", f"{_LOSS}.use_importance_sampling_correction", True),
    (f"{_LOSS}.truncated_importance_sampling_type", f"{_LOSS}.truncated_importance_sampling_ratio", SET),
    (f"{_LOSS}.truncated_importance_sampling_ratio", f"{_LOSS}.truncated_importance_sampling_type", SET),
    (f"{_LOSS}.truncated_importance_sampling_ratio_min", f"{_LOSS}.truncated_importance_sampling_type", SET),
)

_HOLDS = {"at most": operator.le, "below": operator.lt, "at least": operator.ge}
# A key, and how its value compares with another key's.
BOUNDS: tuple[tuple[str, str, str], ...] = (
    # megatron-core's scheduler asserts these, but after the model is built.
    (f"{base.OPTIMIZER}.min_lr", "at most", f"{base.OPTIMIZER}.lr"),
    (f"{base.OPTIMIZER}.decoupled_min_lr", "at most", f"{base.OPTIMIZER}.decoupled_lr"),
    (f"{base.SCHEDULER}.lr_warmup_init", "at most", f"{base.OPTIMIZER}.lr"),
    (f"{base.SCHEDULER}.lr_warmup_iters", "below", f"{base.SCHEDULER}.lr_decay_iters"),
    ("data.max_input_seq_length", "at most", base.LENGTH),
    ("policy.generation.max_new_tokens", "at most", base.LENGTH),
    ("policy.generation.vllm_cfg.max_model_len", "at least", base.LENGTH),
    (_OFFLOAD_LIMIT, "at most", "policy.residency.host_memory_limit_gib"),
    (f"{_PORT}_low", "at most", f"{_PORT}_high"),
    ("grpo.advantage_clip_low", "below", "grpo.advantage_clip_high"),
    (f"{_SCALING}.source_min", "below", f"{_SCALING}.source_max"),
    (f"{_SCALING}.target_min", "at most", f"{_SCALING}.target_max"),
    (f"{_LOSS}.truncated_importance_sampling_ratio_min", "at most", f"{_LOSS}.truncated_importance_sampling_ratio"),
)

# A key that has no effect unless another key has this value.
READ_ONLY_WITH: tuple[tuple[str, str, Any], ...] = (
    (f"{base.MEGATRON}.offload_modules", base.OFFLOADING, True),
    (f"{base.MEGATRON}.delta_offload_bytes_across_pp_ranks", base.OFFLOADING, True),
    ("policy.activation_offload.strict", base.OFFLOADING, True),
    (GRAPH_MODULES_KEY, GRAPHS, "transformer_engine"),
    (f"{base.OPTIMIZER}.optimizer_offload_fraction", base.CPU_OPTIMIZER, True),
    ("policy.offload_optimizer_for_refit", "policy.generation.colocated.enabled", (True, None)),
    ("grpo.reward_shaping.overlong_buffer_penalty", "grpo.reward_shaping.stop_properly_penalty_coef", None),
)


def _is(value: Any, wanted: Any) -> bool:
    return value is not None if wanted in _ANY else value in (wanted if isinstance(wanted, tuple) else (wanted,))


def _shown(wanted: Any) -> str:
    return wanted if wanted in _ANY else show_choices(wanted) if isinstance(wanted, tuple) else show(wanted)


def needs(other: str, wanted: Any, value: Any, found: Any) -> RuleResult:
    """Refuses a key that is on without what it needs of another one."""
    if value in _OFF or _is(found, wanted):
        return None
    return f"is {show(value)}, which needs {other} to be {_shown(wanted)}; found {show(found)}: change either"


def bounds(how: str, other: str, value: Any, bound: Any) -> RuleResult:
    """Refuses a number on the wrong side of another one."""
    if value is None or bound is None or _HOLDS[how](value, bound):
        return None
    return f"is {show(value)}, but must be {how} {other} ({show(bound)}); change either"


def read_only_with(other: str, wanted: Any, value: Any, found: Any) -> RuleResult:
    """Notes a key that has no effect, since another one switches off what it is for."""
    return None if value in _OFF or _is(found, wanted) else f"has no effect, since {other} is {show(found)}"


for _key, _other, _wanted in NEEDS:
    rule(f"{_key}?", f"{_other}?")(partial(needs, _other, _wanted))
for _key, _how, _other in BOUNDS:
    rule(f"{_key}?", f"{_other}?")(partial(bounds, _how, _other))
for _key, _other, _wanted in READ_ONLY_WITH:
    note(f"{_key}?", f"{_other}?")(partial(read_only_with, _other, _wanted))
