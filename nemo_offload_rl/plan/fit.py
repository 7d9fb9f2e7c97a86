"""Finds the overrides with which a recipe fits a GPU and its host at the fewest predicted seconds of a step."""

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_offload_rl.config.megatron import MLP_TILES_KEY as TILES
from nemo_offload_rl.config.megatron import split_devices
from nemo_offload_rl.config.model.families import check_model
from nemo_offload_rl.config.rules.base import CPU_OPTIMIZER, OFFLOADING, OPTIMIZER
from nemo_offload_rl.config.rules.residency import STATE_IN_TRAIN
from nemo_offload_rl.config.schema import MasterConfig
from nemo_offload_rl.config.schema.policy import has_generation
from nemo_offload_rl.memory.units import show_gib
from nemo_offload_rl.plan.activations import (
    AUTO,
    LOGPROB_TOKENS,
    TRAIN_TOKENS,
    RowTokensKey,
    activation_facts,
    slab_bytes,
)
from nemo_offload_rl.plan.architecture import UnknownArchitectureError
from nemo_offload_rl.plan.colocation import with_kv_cache_bytes, with_resident_state
from nemo_offload_rl.plan.decisions import Machine, check_fits, decide, without_replayed_engine
from nemo_offload_rl.plan.fit_options import (
    CHUNKS,
    activation_options,
    as_overrides,
    is_left_open,
    logits_options,
    row_key,
    row_options,
    tile_options,
)
from nemo_offload_rl.plan.host_budget import HostBudgetError, usable_bytes
from nemo_offload_rl.plan.optimizer_ways import Host, PlannedWay, Way, planned_way, ways
from nemo_offload_rl.plan.plan import activation_settings
from nemo_offload_rl.plan.planner import PlannedRun, Planner
from nemo_offload_rl.plan.row_tokens import (
    MARGIN,
    logprob_bytes,
    open_keys,
    row_limits,
    training_bytes,
    validation_key,
)
from nemo_offload_rl.plan.saved_tensors import ActivationFacts
from nemo_offload_rl.plan.step_time import logprob_seconds, optimizer_seconds, read_flop_model, training_seconds
from nemo_offload_rl.plan.values import Values, value_at, with_values
from nemo_offload_rl.residency.table import Phase

# `policy.activation_memory: auto` adds nothing to a recipe that fits for fewer seconds than this share of a step, since
# predictions are no more exact than that.
_LEAST_GAIN = 0.03
_TRAIN_ROWS = (row_key(TRAIN_TOKENS), "policy.train_micro_batch_size")
Load = Callable[[Sequence[str]], MasterConfig]
"""Loads and validates the recipe with further overrides; raises a ValueError where they are not allowed."""


@dataclass(frozen=True)
class Fit:
    """Holds the result of a search.

    Attributes:
        overrides: what makes the recipe fit, or, where nothing does, what comes nearest; empty for the recipe itself.
        seconds: predicted seconds of a step with them: training on `train_global_batch_size` samples of the greatest
            length, their log-prob passes, and the optimizer's step.
        missing_gpu_bytes: GPU memory that is missing; 0 where the GPU's is enough.
        missing_host_bytes: host memory that is missing; 0 where the host's is enough, or the GPU's is not.
        free_gpu_bytes: GPU memory that is left in the fullest phase; 0 where it does not fit.
    """

    overrides: tuple[str, ...]
    seconds: float
    missing_gpu_bytes: int = 0
    missing_host_bytes: int = 0
    free_gpu_bytes: int = 0

    @property
    def fits(self) -> bool:
        """Whether the recipe fits with the overrides."""
        return not self.missing_gpu_bytes and not self.missing_host_bytes

    def lines(self, gpu_bytes: int, host: Host) -> list[str]:
        """Returns the lines for the user: a sentence, and the overrides."""
        size, step = f"a GPU of {show_gib(gpu_bytes)} GiB", f"{self.seconds:.3g} s a step"
        if self.fits and not self.overrides:
            return [f"The recipe fits {size} as it is, and no setting is expected to be faster: {step}."]
        if self.fits:
            return [f"The recipe fits {size} with these overrides, by prediction the fastest: {step}.", *self._listed]
        lacks, otherwise = f"{size}, which lacks {show_gib(self.missing_gpu_bytes)} GiB", ""
        if self.missing_host_bytes:
            otherwise = host.otherwise
            lacks = f"{host.name}, which lacks {show_gib(self.missing_host_bytes)} GiB of host memory"
        nearest = (
            "with these overrides, which come nearest:" if self.overrides else "as the recipe is, which is nearest."
        )
        return [f"No settings make the recipe fit {lacks} {nearest}", *self._listed, *filter(None, [otherwise])]

    @property
    def _listed(self) -> list[str]:
        return [f"    {override}" for override in self.overrides]


def cheapest_fit(load: Load, planner: Planner) -> Fit:
    """Returns the overrides with the fewest predicted seconds of a step with which a recipe fits; of equals the fewest.

    It combines what is recomputed and offloaded, tiles, logits in chunks, row lengths up to the recipe's, and the ways
    to keep optimizer state on the GPU or stream it. None of them changes a result, except for the order of sums and,
    with experts, auxiliary losses, which are those of a micro-batch. The CPU optimizer, which rounds differently, is
    neither turned on nor off.

    With `policy.activation_memory: auto` it keeps what the recipe sets: it only turns on what is off, streams optimizer
    state that the recipe puts nowhere, and chooses the length of rows that is `auto`.

    Args:
        load: loads the recipe.
        planner: knows the model, the algorithm, the machine's rates, the hosts, and the GPU's memory, which must be
            known.

    Raises:
        UnknownArchitectureError: the model's sizes are not known.
        ValueError: the recipe is refused for a reason that the search cannot mend.
    """
    assert planner.gpu_bytes is not None, "the memory of a GPU is not known"
    return _Search(load, planner).run()


def missing_gpu_bytes(config: MasterConfig, run: PlannedRun, planner: Planner) -> int:
    """Returns the GPU memory that a recipe lacks in its fullest phase; 0 or less if it fits.

    Args:
        config: the recipe, with numbers for packed rows.
        run: its plan.
        planner: knows the model and the GPU's memory.
    """
    way = planned_way(config["policy"], Way("", ()), run, planner.rates.cpu_params_per_s)
    return _missing_gpu(run, way, training_bytes(config, planner), logprob_bytes(config, planner), planner.gpu_bytes)


def _missing_gpu(
    run: PlannedRun, way: PlannedWay, training: Sequence[int], logprobs: Sequence[int], gpu_bytes: int | None
) -> int:
    assert gpu_bytes is not None, "the memory of a GPU is not known"
    needed = []
    for rank, of_training, of_logprobs in zip(run.plan.ranks, training, logprobs, strict=True):
        needed.append(sum(rank.gpu_bytes[Phase.TRAIN].values()) + int(MARGIN * of_training))
        needed.append(rank.logprob_state_bytes + int(MARGIN * of_logprobs))
    return dataclasses.replace(way, state_bytes=0, activation_bytes=max(needed)).missing_bytes(gpu_bytes)


@dataclass(frozen=True)
class _State:
    """Plans one way to keep optimizer state, without offloaded activations."""

    way: Way
    run: PlannedRun
    planned: PlannedWay
    optimizer_s: float


@dataclass(frozen=True)
class _Training:
    """Plans one combination of settings of training: what is recomputed and offloaded, logits, tiles, and rows."""

    parts: tuple[Values, ...]
    config: MasterConfig
    seconds: float
    stages: Sequence[ActivationFacts]
    planner: Planner

    @property
    def values(self) -> dict[str, Any]:
        """The values of all parts."""
        return {key: value for part in self.parts for key, value in part.items()}

    @functools.cached_property
    def passes(self) -> tuple[int, ...]:
        """GPU memory of the longest micro-batch, by pipeline stage."""
        return training_bytes(self.config, self.planner)

    @functools.cached_property
    def slabs(self) -> list[int]:
        """Host memory of a rank's offloaded activations, by pipeline stage."""
        offloaded = activation_settings(self.config["policy"])
        return [0 if offloaded is None else slab_bytes(facts, offloaded) for facts in self.stages]


class _Search:
    """Looks at combinations in the order of their predicted seconds, on one loaded config that it edits."""

    def __init__(self, load: Load, planner: Planner) -> None:
        self._load, self._planner, self._rates = load, planner, planner.rates
        self._machine = Machine(has_gpus=True, gpu_bytes=planner.gpu_bytes, hosts=planner.hosts)
        self._spec = planner.spec
        self._written, _ = without_replayed_engine(load(()))
        self._only_adds = self._written["policy"]["activation_memory"] == AUTO
        self._rows = self._resolved_rows()
        self._config = with_values(self._written, self._rows)
        self._flops = read_flop_model(planner.hf_config, self._config["policy"])
        self._logprob_lengths = self._lengths(LOGPROB_TOKENS)
        self._passes: dict[Any, tuple[float, tuple[int, ...]]] = {}
        self._allowed: dict[tuple[str, ...], bool] = {(): True}

    def run(self) -> Fit:
        """Returns the first combination that fits, or the one that lacks least."""
        refusal: ValueError | None = None
        nearest: tuple[bool, int, Fit] | None = None
        for seconds, state, training, rows in self._in_order():
            gpu, host = self._missing_gpu(state, training, rows), self._missing_host(state, training)
            lacks = (True, gpu) if gpu > 0 else (False, host)
            if (max(gpu, host) > 0 and nearest is not None and lacks >= nearest[:2]) or not self._allows(training):
                continue
            overrides = self._overrides(state, training, rows)
            if max(gpu, host) <= 0:
                try:
                    gpu = self._missing_when_checked(overrides)
                except ValueError as error:
                    refusal = refusal or error
                    continue
                if gpu <= 0:
                    return Fit(overrides, seconds, free_gpu_bytes=-gpu)
                lacks = (True, gpu)
            if nearest is None or lacks < nearest[:2]:
                nearest = (*lacks, Fit(overrides, seconds, max(0, gpu), host if gpu <= 0 else 0))
        if refusal is not None:
            raise refusal
        assert nearest is not None, "there is at least the recipe itself"
        return nearest[2]

    def _in_order(self) -> list[tuple[float, _State, _Training, Values]]:
        """Returns combinations with their predicted seconds: the fastest first, of equals that of the fewest keys.

        Longer rows take more memory: where the shortest do not fit, no others are looked at.
        """
        states, lengths = self._states(), self._lengths(TRAIN_TOKENS)
        combined = []
        for parts in self._settings():
            shortest = self._training((*parts, lengths[-1]))
            if shortest is None:
                continue
            all_lengths: list[_Training] = []
            for state in states:
                rows = self._logprob_rows(state, shortest)
                trainings = [shortest]
                if self._missing_gpu(state, shortest, rows) <= 0 and self._missing_host(state, shortest) <= 0:
                    longer = (self._training((*parts, more)) for more in lengths[:-1])
                    all_lengths = all_lengths or [shortest, *(one for one in longer if one is not None)]
                    trainings = all_lengths
                combined += [
                    (one.seconds + self._logprobs(one, rows)[0] + state.optimizer_s, state, one, rows)
                    for one in trainings
                ]
        return sorted(combined, key=lambda one: self._rank(*one))

    def _rank(self, seconds: float, state: _State, training: _Training, rows: Values) -> tuple[float, int]:
        number = len(state.way.overrides) + len(training.values) + len(rows)
        return seconds * (1 - _LEAST_GAIN if self._only_adds and not number else 1), number

    def _logprob_rows(self, state: _State, training: _Training) -> Values:
        """Returns the longest rows of log-prob passes that fit, or those that lack least."""
        nothing = [0] * len(training.passes)
        lacking = []
        for rows in self._logprob_lengths:  # the longest, and so the fastest, first
            _, logprobs = self._logprobs(training, rows)
            missing = _missing_gpu(state.run, state.planned, nothing, logprobs, self._planner.gpu_bytes)
            lacking.append((missing, rows))
            if missing <= 0:
                break
        return min(lacking, key=lambda one: one[0])[1]

    def _logprobs(self, training: _Training, rows: Values) -> tuple[float, tuple[int, ...]]:
        """Returns the seconds of log-prob passes, and their GPU memory by pipeline stage."""
        # What is recomputed and offloaded does not matter to a pass that saves nothing, nor do rows of training where
        # it has rows of its own.
        has_own = len(self._logprob_lengths) > 1 and validation_key(self._config, self._planner.algorithm) is None
        keys = [CHUNKS, TILES, *(() if has_own else _TRAIN_ROWS)]
        found = (*(value_at(training.config, key) for key in keys), *rows.values())
        if found not in self._passes:
            config = with_values(training.config, rows)
            seconds = logprob_seconds(self._flops, config, self._spec, self._rates)
            self._passes[found] = seconds, logprob_bytes(config, self._planner)
        return self._passes[found]

    def _states(self) -> list[_State]:
        """Returns the plans of the ways to keep optimizer state that the recipe allows and that round alike."""
        others = [way for way in ways(self._written["policy"]) if way.overrides and not _rounds_otherwise(way)]
        if self._only_adds:
            others = [Way("streamed", (f"++{STATE_IN_TRAIN}=streamed",))] if _may_stream(self._written) else []
        states, errors = [], []
        for way in (Way("as the recipe says", ()), *others):
            try:
                config, _ = without_replayed_engine(self._load(way.overrides))
                config = with_values(config, self._rows)
                config, _ = with_resident_state(config, self._planner)
                config, _ = with_kv_cache_bytes(config, self._planner)
                config = with_values(config, {OFFLOADING: False})
                run = self._planner.run(config)
            except UnknownArchitectureError:
                raise
            except ValueError as error:
                errors.append(error)
            else:
                planned = planned_way(config["policy"], way, run, self._rates.cpu_params_per_s)
                seconds = (optimizer_seconds(rank, planned.wait_s, self._rates) for rank in run.plan.ranks)
                states.append(_State(way, run, planned, max(seconds)))
        if not states:
            raise errors[0]
        return states

    def _settings(self) -> list[tuple[Values, ...]]:
        """Returns every combination of settings of training but row lengths, with the keys that differ alone."""
        has_experts = bool(self._flops.architecture.num_experts)
        parts = (
            activation_options(self._config["policy"]["megatron_cfg"], has_experts=has_experts),
            logits_options(),
            tile_options(has_experts=has_experts),
        )
        changed = [[self._changed(values) for values in options] for options in parts]
        distinct = [[one for number, one in enumerate(part) if one not in part[:number]] for part in changed]
        if self._only_adds:
            distinct = [
                [one for one in part if all(is_left_open(self._config, key) for key in one)] for part in distinct
            ]
        return list(itertools.product(*distinct))

    def _training(self, parts: tuple[Values, ...]) -> _Training | None:
        """Returns the plan of settings and row length; None where the model's sizes are not known with them."""
        config, hf_config = self._config, self._planner.hf_config
        for part in parts:
            config = with_values(config, part)
        policy, activations = config["policy"], activation_settings(config["policy"])
        ranks = split_devices(config["cluster"], policy).policy_ranks
        try:
            stages = activation_facts(hf_config, policy, world_size=ranks, group_size=self._spec.group_size)
        except UnknownArchitectureError:
            return None
        seconds = training_seconds(self._flops, config, self._spec, stages, activations, self._rates)
        return _Training(parts, config, seconds, stages, self._planner)

    def _allows(self, training: _Training) -> bool:
        """Returns whether the recipe allows each of the settings; numbers alone make no recipe invalid."""
        for values in training.parts:
            kind = tuple(repr(item) for item in values.items() if type(item[1]) not in (int, float))
            if kind not in self._allowed:
                try:
                    check_model(self._planner.hf_config, self._load(as_overrides(values))["policy"])
                    self._allowed[kind] = True
                except ValueError:
                    self._allowed[kind] = False
            if not self._allowed[kind]:
                return False
        return True

    def _changed(self, values: Values) -> dict[str, Any]:
        return {key: value for key, value in values.items() if value_at(self._config, key) != value}

    def _lengths(self, of: RowTokensKey) -> list[Values]:
        is_open = row_key(of) in self._rows
        if self._only_adds and not is_open:
            return [{}]
        return row_options(self._config, of, self._spec, is_open=is_open)

    def _resolved_rows(self) -> dict[str, Any]:
        """Returns the row lengths that the recipe leaves to the plan: its choice, or the least where nothing fits."""
        keys = open_keys(self._written)
        if not keys:
            return {}
        least, _, _ = row_limits(self._written, self._spec.group_size)
        try:
            config = decide(self._load(()), self._planner, has_gpus=True).config
        except HostBudgetError:
            config = self._written
        found: Mapping[str, Any] = config["policy"]["sequence_packing"]
        return {row_key(key): found[key] if isinstance(found[key], int) else least for key in keys}

    def _missing_gpu(self, state: _State, training: _Training, rows: Values) -> int:
        _, logprobs = self._logprobs(training, rows)
        return _missing_gpu(state.run, state.planned, training.passes, logprobs, self._planner.gpu_bytes)

    def _missing_host(self, state: _State, training: _Training) -> int:
        limit, of_hosts, of_ranks = state.run.plan.host_memory_limit_bytes, Counter[str](), []
        ranks_per_stage = len(state.run.needs) // len(training.slabs)
        for number, need in enumerate(state.run.needs):
            of_ranks.append(need.total_bytes + training.slabs[number // ranks_per_stage])
            of_hosts[need.host] += of_ranks[-1]
        hosts = zip(of_hosts.values(), self._planner.hosts, strict=False)
        lacks = [needed - usable_bytes(host) for needed, host in hosts]
        return max([*lacks, *([] if limit is None else [max(of_ranks) - limit])], default=0)

    def _overrides(self, state: _State, training: _Training, rows: Values) -> tuple[str, ...]:
        values = {**training.values, **rows}
        if state.way.overrides or values:
            values = self._rows | values  # the plan would choose other lengths
        return (*state.way.overrides, *as_overrides(values))

    def _missing_when_checked(self, overrides: Sequence[str]) -> int:
        """Returns the GPU memory that the recipe lacks as it would run with overrides, after all checks of a run.

        Raises:
            ValueError: a check refuses it.
        """
        resolved = decide(self._load(overrides), self._planner, has_gpus=True)
        check_fits(resolved, self._machine)
        assert resolved.run is not None, "the model's sizes are known"
        return missing_gpu_bytes(resolved.config, resolved.run, self._planner)


def _may_stream(config: MasterConfig) -> bool:
    """Returns whether a recipe leaves the place of optimizer state in training open."""
    policy = config["policy"]
    stays = policy["offload_optimizer_for_refit"] is False and has_generation(policy)
    return value_at(config, STATE_IN_TRAIN) is None and not stays


def _rounds_otherwise(way: Way) -> bool:
    """Returns whether a way steps other parameters on the CPU than the recipe, or with another optimizer."""
    keys = (CPU_OPTIMIZER, f"{OPTIMIZER}.optimizer_offload_fraction", f"{OPTIMIZER}.use_precision_aware_optimizer")
    return any(override.lstrip("+").startswith(keys) for override in way.overrides)
