"""Lists the settings that `plan.fit` chooses from, as values by the paths of their keys."""

from collections.abc import Sequence
from typing import Any

import yaml

from nemo_offload_rl.config.algorithms import AlgorithmSpec
from nemo_offload_rl.config.megatron import LAYER_INPUT, megatron_field
from nemo_offload_rl.config.megatron import MLP_TILES_KEY as TILES
from nemo_offload_rl.config.megatron import OFFLOAD_MODULES_KEY as MODULES
from nemo_offload_rl.config.rules.base import MEGATRON, OFFLOADING
from nemo_offload_rl.config.rules.modules import GRANULARITY, KEPT_ATTENTION, RECOMPUTING
from nemo_offload_rl.config.schema import MasterConfig
from nemo_offload_rl.config.schema.megatron import MegatronConfig
from nemo_offload_rl.config.schema.policy import has_logprob_batches
from nemo_offload_rl.memory.units import round_up
from nemo_offload_rl.plan.activations import TRAIN_TOKENS, RowTokensKey, stated_row_tokens
from nemo_offload_rl.plan.row_tokens import row_limits, validation_key
from nemo_offload_rl.plan.values import Values, value_at

CHUNKS = f"{MEGATRON}.use_fused_linear_logprobs"
_METHOD, _SEGMENT = f"{MEGATRON}.recompute_method", f"{MEGATRON}.recompute_num_layers"
_FRACTION = f"{MEGATRON}.activation_offload_fraction"
_SEGMENTS = (1, 2, 4)
_FRACTIONS = (1.0, 0.75, 0.5)
# What a setting belongs to.
_SWITCHES = {
    GRANULARITY: RECOMPUTING,
    _METHOD: RECOMPUTING,
    _SEGMENT: RECOMPUTING,
    MODULES: OFFLOADING,
    _FRACTION: OFFLOADING,
}
_OF_ATTENTION, _OF_EXPERTS = ("qkv_linear", "core_attn", "attn_proj"), ("expert_fc1", "moe_act")


def activation_options(cfg: MegatronConfig, *, has_experts: bool) -> list[Values]:
    """Returns what may be recomputed and offloaded.

    These are: as the recipe says; nothing; whole layers recomputed; the same with their inputs offloaded, without
    and with attention; and modules offloaded without recomputation.

    Args:
        cfg: the recipe's `policy.megatron_cfg` section.
        has_experts: whether the model has experts.
    """
    off: dict[str, Any] = {OFFLOADING: False}
    on: dict[str, Any] = {OFFLOADING: True}
    full: dict[str, Any] = {RECOMPUTING: True, GRANULARITY: "full"}
    if megatron_field(cfg, "recompute_method") == "block":
        full[_METHOD] = "uniform"
    of_recipe = megatron_field(cfg, "recompute_num_layers") or 1
    segments: list[dict[str, Any]] = [{} if number == of_recipe else {_SEGMENT: number} for number in _SEGMENTS]
    fractions: list[dict[str, Any]] = [{_FRACTION: fraction} for fraction in _FRACTIONS]
    inputs, kept = full | on | {MODULES: [LAYER_INPUT]}, full | on | {MODULES: [LAYER_INPUT, KEPT_ATTENTION]}
    moved = [_OF_ATTENTION[:1], _OF_ATTENTION[1:], _OF_ATTENTION]
    if has_experts:
        moved += [_OF_EXPERTS, (*_OF_ATTENTION, *_OF_EXPERTS)]
    return [
        {},
        off | {RECOMPUTING: False},
        *(full | off | segment for segment in segments),
        *(inputs | segment | fraction for segment in segments for fraction in fractions),
        *(kept | segments[0] | fraction for fraction in fractions),
        *(on | {RECOMPUTING: False, MODULES: list(modules)} | fraction for modules in moved for fraction in fractions),
    ]


def logits_options() -> list[Values]:
    """Returns logits as the recipe says, whole and in chunks."""
    return [{}, {CHUNKS: False}, {CHUNKS: True}]


def tile_options(*, has_experts: bool) -> list[Values]:
    """Returns MLPs as the recipe says, whole and in tiles."""
    return [{}] if has_experts else [{}, {TILES: None}, {TILES: "auto"}]


def row_options(config: MasterConfig, of: RowTokensKey, spec: AlgorithmSpec, *, is_open: bool) -> list[Values]:
    """Returns the row lengths of a pass to choose from, the longest first: the recipe's, and shorter ones.

    Args:
        config: the recipe, with numbers for packed rows.
        of: `TRAIN_TOKENS` or `LOGPROB_TOKENS`, which stand for the micro-batch sizes where rows are padded.
        spec: the recipe's algorithm.
        is_open: whether the recipe leaves the length of packed rows to the plan; rows may then be longer than the
            plan's choice for the recipe as it is.
    """
    policy = config["policy"]
    packing, key = policy["sequence_packing"], row_key(of)
    if packing["enabled"] and of in packing:
        stated = stated_row_tokens(policy, of, spec.group_size)
        least, most, multiple = row_limits(config, spec.group_size)
        longest = most if is_open else stated
        halves = [longest >> times for times in range(longest.bit_length())]
        tokens = {round_up(number, multiple) for half in halves for number in (half, half * 3 // 4)}
        numbers = {stated, *(number for number in tokens | {least} if least <= number <= longest)}
    elif (samples_key := _samples_key(config, of, spec)) is not None:
        key, stated = samples_key, value_at(config, samples_key)
        numbers = {number for number in range(1, stated + 1) if stated % number == 0}
    else:
        return [{}]
    return [{} if number == stated else {key: number} for number in sorted(numbers, reverse=True)]


def _samples_key(config: MasterConfig, of: RowTokensKey, spec: AlgorithmSpec) -> str | None:
    """Returns the key of a pass's samples in a padded micro-batch; None where rows are packed or it has no such key."""
    if config["policy"]["sequence_packing"]["enabled"]:
        return None
    if of == TRAIN_TOKENS:
        return "policy.train_micro_batch_size"
    return "policy.logprob_batch_size" if has_logprob_batches(config["policy"]) else validation_key(config, spec.name)


def is_left_open(config: MasterConfig, key: str) -> bool:
    """Returns whether a recipe leaves a setting open: its value is null or false, or what it belongs to is off."""
    return not value_at(config, key) or not value_at(config, _SWITCHES.get(key, key))


def row_key(of: RowTokensKey) -> str:
    """Returns the path of a key of packed rows."""
    return f"policy.sequence_packing.{of}"


def as_overrides(values: Values) -> list[str]:
    """Returns values as overrides of a recipe that may not have their keys."""
    return [f"++{key}={_shown(value)}" for key, value in values.items()]


def from_overrides(overrides: Sequence[str]) -> Values:
    """Returns the values of overrides that `as_overrides` or `plan.optimizer_ways` wrote."""
    pairs = (override.lstrip("+").split("=", maxsplit=1) for override in overrides)
    return {key: yaml.safe_load(value) for key, value in pairs}


def _shown(value: Any) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{','.join(value)}]"
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
