"""Chooses the length of packed rows where the recipe says `auto`: as many tokens as fit on a GPU."""

import bisect
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from nemo_offload_rl.config.megatron import data_parallel_size, split_devices
from nemo_offload_rl.config.schema import MasterConfig
from nemo_offload_rl.config.schema.policy import has_logprob_batches, row_multiple, sequence_multiple
from nemo_offload_rl.memory.units import round_up, show_gib
from nemo_offload_rl.plan.activations import (
    AUTO,
    LOGPROB_TOKENS,
    TRAIN_TOKENS,
    RowTokensKey,
    activation_facts,
    stated_row_tokens,
    with_busy_experts,
    with_tokens,
)
from nemo_offload_rl.plan.architecture import UnknownArchitectureError
from nemo_offload_rl.plan.generation import POLICY_OVERHEAD_BYTES, engine_bytes_beside_policy
from nemo_offload_rl.plan.host_budget import HostBudgetError
from nemo_offload_rl.plan.plan import activation_settings
from nemo_offload_rl.plan.planner import PlannedRun, Planner
from nemo_offload_rl.plan.saved_tensors import ActivationFacts
from nemo_offload_rl.plan.training_memory import forward_pass_bytes, training_pass_bytes
from nemo_offload_rl.plan.values import value_at, with_values
from nemo_offload_rl.residency.table import Phase

MOST_TOKENS = 32768
"""Longer rows do not train faster: rows of 8,192 tokens of a 1.5 B model trained at 94% of the speed of 16,384 on an
H200."""

MARGIN = 1.1
"""Factor on the estimate of a pass: what torch's allocator reserves was 1.06 to 1.09 times what it allocates
on an H200, and an estimate is within 3% of that (docs/results/plan_accuracy.md)."""

# The number chosen is a multiple of this, unless it is one of the two limits.
_STEP = 1024
_SECTION = "policy.sequence_packing"
_PASSES: Mapping[RowTokensKey, str] = {TRAIN_TOKENS: "training", LOGPROB_TOKENS: "log-prob passes"}


def with_row_tokens(config: MasterConfig, planner: Planner) -> tuple[MasterConfig, list[str]]:
    """Replaces `auto` in policy.sequence_packing by a number of tokens.

    Args:
        config: a validated recipe, resolved for the ranks' machine; not modified.
        planner: plans it; its hosts must have memory for the activations of the rows that are offloaded.

    Returns:
        The config with numbers, and a line for the user for each of them; the config itself if rows are not packed or
        no key is `auto`.

    Raises:
        ValueError: not even a row of the longest sequence fits, or the model cannot be split as the recipe says.
        HostBudgetError: a rank needs more host memory than the recipe's limit, with the shortest rows.
    """
    keys = open_keys(config)
    if not keys:
        return config, []
    try:
        if planner.gpu_bytes is not None:
            return _chosen(config, keys, planner, planner.gpu_bytes)
        unknown = "no GPU's memory is known here"
    except UnknownArchitectureError:
        unknown = "the model's sizes are not known before it is built"
    group_size = planner.spec.group_size
    tokens = {key: stated_row_tokens(config["policy"], key, group_size) for key in keys}
    lines = [
        f"packed rows of {_PASSES[key]} have up to {number:,} tokens, max_total_sequence_length times the "
        f"micro-batch size, since {unknown}; {_SECTION}.{key} sets another number"
        for key, number in tokens.items()
    ]
    return with_tokens(config, tokens), lines


def with_context_ranks(config: MasterConfig, planner: Planner) -> tuple[MasterConfig, list[str]]:
    """Says where context parallelism only costs time, since the longest row fits a GPU and there are enough of them.

    Args:
        config: a validated recipe, resolved for the ranks' machine.
        planner: plans it.

    Returns:
        The config itself, and at most one line for the user.
    """
    policy, size = config["policy"], config["policy"]["megatron_cfg"]["context_parallel_size"]
    if size == 1 or planner.gpu_bytes is None:
        return config, []
    whole = with_values(config, {"policy.megatron_cfg.context_parallel_size": 1})
    multiple, cfg = sequence_multiple(whole["policy"]), whole["policy"]["megatron_cfg"]
    tokens = planner.spec.group_size * round_up(policy["max_total_sequence_length"], multiple)
    whole = with_tokens(whole, {TRAIN_TOKENS: tokens, LOGPROB_TOKENS: tokens})
    ranks = split_devices(config["cluster"], policy).policy_ranks
    shares = data_parallel_size(ranks, cfg["tensor_model_parallel_size"], cfg["pipeline_model_parallel_size"])
    samples = 1 if policy["sequence_packing"]["enabled"] else policy["train_micro_batch_size"]
    if not shares or policy["train_global_batch_size"] % (shares * samples):
        return config, []
    try:
        room = _Room(whole, planner, planner.gpu_bytes, planner.run(whole))
        if not room.fits(TRAIN_TOKENS, tokens):
            return config, []
    except (UnknownArchitectureError, HostBudgetError):
        return config, []
    line = (
        f"policy.megatron_cfg.context_parallel_size is {size}, but rows of {tokens:,} tokens fit a GPU of "
        f"{show_gib(planner.gpu_bytes)} GiB whole; with 1 its ranks train on rows of their own, and do not wait for "
        "one another's keys and values"
    )
    return config, [line]


def open_keys(config: MasterConfig) -> list[RowTokensKey]:
    """Returns the keys that leave the length of packed rows open; none where rows are not packed."""
    packing = config["policy"]["sequence_packing"]
    return [key for key in _PASSES if packing["enabled"] and key in packing and packing[key] == AUTO]


def resolve_auto(config: MasterConfig, resolved: MasterConfig) -> MasterConfig:
    """Returns a copy of `config` in which the numbers that it leaves open are taken from `resolved`."""
    packing = resolved["policy"]["sequence_packing"]
    return with_tokens(config, {key: packing[key] for key in open_keys(config)})


def restore_auto(written: MasterConfig, config: MasterConfig) -> MasterConfig:
    """Returns a checkpoint's recipe with `auto` for the numbers that this run's recipe leaves open."""
    keys = open_keys(config)
    return with_tokens(written, dict.fromkeys(keys, AUTO)) if keys else written


def _chosen(
    config: MasterConfig, keys: Sequence[RowTokensKey], planner: Planner, gpu_bytes: int
) -> tuple[MasterConfig, list[str]]:
    candidates = _candidates(config, planner.spec.group_size)
    tokens, lines = dict.fromkeys(keys, candidates[0]), []
    room = _Room(config, planner, gpu_bytes, planner.run(with_tokens(config, tokens)))
    for key in keys:
        tokens[key] = room.most_tokens(key, candidates)
        lines.append(room.line(key, tokens[key]))
    return with_tokens(config, tokens), lines


def _candidates(config: MasterConfig, group_size: int) -> list[int]:
    """Returns the numbers of tokens of a row to choose from, in ascending order."""
    least, most, multiple = row_limits(config, group_size)
    step = math.lcm(multiple, _STEP)
    return sorted({least, *range(round_up(least + 1, step), most, step), most})


def row_limits(config: MasterConfig, group_size: int) -> tuple[int, int, int]:
    """Returns the least and the most tokens that a packed row should have, and what they are a multiple of.

    The least is that of the longest sample, the most `MOST_TOKENS`, or all of a rank's samples of an optimizer step.
    """
    policy = config["policy"]
    cfg = policy["megatron_cfg"]
    tensor = cfg["tensor_model_parallel_size"]
    multiple = math.lcm(row_multiple(policy), tensor if cfg["sequence_parallel"] else 1)
    sample = group_size * round_up(policy["max_total_sequence_length"], sequence_multiple(policy))
    ranks = split_devices(config["cluster"], policy).policy_ranks
    shared = tensor * cfg["pipeline_model_parallel_size"] * cfg["context_parallel_size"]
    samples = policy["train_global_batch_size"] // (data_parallel_size(ranks, shared) or 1)
    least = round_up(sample, multiple)
    return least, max(least, min(MOST_TOKENS, round_up(sample * samples, multiple))), multiple


@dataclasses.dataclass(frozen=True)
class _Room:
    """Finds the longest rows that fit on a GPU, and whose offloaded activations fit on its host.

    Attributes:
        config: the recipe.
        planner: plans it.
        gpu_bytes: memory of the smallest GPU.
        run: the plan with the shortest rows; training state does not depend on the row length.
    """

    config: MasterConfig
    planner: Planner
    gpu_bytes: int
    run: PlannedRun

    def most_tokens(self, key: RowTokensKey, candidates: Sequence[int]) -> int:
        """Returns the largest number of tokens per row that fits.

        Raises:
            ValueError: the longest sample does not fit.
        """
        first_too_long = bisect.bisect_left(candidates, True, key=lambda tokens: not self.fits(key, tokens))
        if first_too_long:
            return candidates[first_too_long - 1]
        missing = self._missing_bytes(key, candidates[0], margin=1.0)
        if missing <= 0:
            return candidates[0]
        raise ValueError(
            f"{_SECTION}.{key} is auto, but a GPU of {show_gib(self.gpu_bytes)} GiB lacks an estimated "
            f"{show_gib(missing)} GiB for rows of {candidates[0]:,} tokens, as long as the longest sample, in "
            f"{_PASSES[key]}; take an option that nemo-offload-rl plan prints, or give a number of tokens if the "
            "estimate is too high."
        )

    def line(self, key: RowTokensKey, tokens: int) -> str:
        """Returns the line that tells the user of a choice."""
        where = _PASSES[key]
        state, pass_bytes = max(zip(self._state_bytes(key), self._pass_bytes(key, tokens), strict=True), key=sum)
        return (
            f"packed rows of {where} have up to {tokens:,} tokens: they take an estimated {show_gib(pass_bytes)} of "
            f"the GPU's {show_gib(self.gpu_bytes)} GiB, and training state takes {show_gib(state)} GiB; "
            f"{_SECTION}.{key} sets another number"
        )

    def fits(self, key: RowTokensKey, tokens: int) -> bool:
        """Returns whether rows of this length fit."""
        if self._missing_bytes(key, tokens, margin=MARGIN) > 0:
            return False
        if key != TRAIN_TOKENS or self.run.plan.activations is None:
            return True
        try:
            longer = self.planner.plan(with_tokens(self.config, {key: tokens}))
            assert longer is not None, "the plan of the shortest rows was made"
            longer.check_hosts(self.planner.hosts)
        except HostBudgetError:
            return False
        return True

    def _missing_bytes(self, key: RowTokensKey, tokens: int, *, margin: float) -> int:
        """Returns the GPU memory that is missing; 0 or less if the rows fit."""
        passes = zip(self._state_bytes(key), self._pass_bytes(key, tokens), strict=True)
        needed = max(state + int(margin * nbytes) for state, nbytes in passes)
        engine = self.run.engine
        graphs = 0 if engine is None else engine.refit_graph_bytes
        beside = engine_bytes_beside_policy(self.config["policy"], engine, self.gpu_bytes)
        return needed + POLICY_OVERHEAD_BYTES + beside + graphs - self.gpu_bytes

    def _state_bytes(self, key: RowTokensKey) -> list[int]:
        """Returns the bytes of training state on the GPU, for one rank of each pipeline stage."""
        if key == LOGPROB_TOKENS:
            return [rank.logprob_state_bytes for rank in self.run.plan.ranks]
        return [sum(rank.gpu_bytes[Phase.TRAIN].values()) for rank in self.run.plan.ranks]

    def _pass_bytes(self, key: RowTokensKey, tokens: int) -> tuple[int, ...]:
        pass_bytes = logprob_bytes if key == LOGPROB_TOKENS else training_bytes
        return pass_bytes(with_tokens(self.config, {key: tokens}), self.planner)


def training_bytes(config: MasterConfig, planner: Planner) -> tuple[int, ...]:
    """Returns the GPU memory of a training step's longest micro-batch, for one rank of each pipeline stage.

    Args:
        config: a validated recipe, with numbers for packed rows.
        planner: knows the model and the algorithm.
    """
    policy = config["policy"]
    facts = _busy_facts(config, planner)
    return training_pass_bytes(planner.hf_config, policy, facts, activation_settings(policy))


def logprob_bytes(config: MasterConfig, planner: Planner) -> tuple[int, ...]:
    """Returns the GPU memory of the longest micro-batch of log-prob passes and, where rows are padded, of validation.

    Takes the arguments of `training_bytes`.
    """
    policy = config["policy"]
    packing = policy["sequence_packing"]
    passes = config  # without a key of their own, passes that compute log-probs have the rows of training
    if packing["enabled"] and LOGPROB_TOKENS in packing:
        passes = with_tokens(config, {TRAIN_TOKENS: packing[LOGPROB_TOKENS]})
    elif not packing["enabled"] and has_logprob_batches(policy):
        passes = with_values(config, {"policy.train_micro_batch_size": policy["logprob_batch_size"]})
    elif (key := validation_key(config, planner.algorithm)) is not None:
        samples = max(policy["train_micro_batch_size"], value_at(config, key))
        passes = with_values(config, {"policy.train_micro_batch_size": samples})
    return forward_pass_bytes(planner.hf_config, passes["policy"], _busy_facts(passes, planner))


def validation_key(config: MasterConfig, algorithm: str) -> str | None:
    """Returns the key of the samples in a padded micro-batch of validation; None without such micro-batches.

    Args:
        config: a validated recipe.
        algorithm: the section that marks it.
    """
    sections: Mapping[str, Any] = config
    section, key = sections[algorithm], "val_micro_batch_size"
    validates = any(section[name] for name in ("val_period", "val_at_start", "val_at_end"))
    if not validates or key not in section or config["policy"]["sequence_packing"]["enabled"]:
        return None
    return f"{algorithm}.{key}"


def _busy_facts(config: MasterConfig, planner: Planner) -> list[ActivationFacts]:
    """Returns the activation sizes of each pipeline stage, with `EXPERT_LOAD_FACTOR` times the average expert load."""
    world_size = split_devices(config["cluster"], config["policy"]).policy_ranks
    group_size = planner.spec.group_size
    stages = activation_facts(planner.hf_config, config["policy"], world_size=world_size, group_size=group_size)
    return [with_busy_experts(facts) for facts in stages]
