"""Compares the ways to keep optimizer state: resident, page-locked around refit, streamed, or CPU optimizer."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_offload_rl.config import RecipeError
from nemo_offload_rl.config.megatron import is_colocated
from nemo_offload_rl.config.rules.base import TABLE
from nemo_offload_rl.config.rules.residency import FOR_REFIT
from nemo_offload_rl.config.schema.policy import PolicyConfig
from nemo_offload_rl.memory.units import GIB, show_gib
from nemo_offload_rl.placement.host import HostFacts
from nemo_offload_rl.placement.rates import H200_RATES
from nemo_offload_rl.plan import host_budget
from nemo_offload_rl.plan.generation import POLICY_OVERHEAD_BYTES, EngineMemory, asleep_bytes
from nemo_offload_rl.plan.host_budget import usable_bytes
from nemo_offload_rl.plan.plan import GENERATION_WEIGHTS_KEY, TWO_WAY_SHARE, RankPlan
from nemo_offload_rl.plan.planner import PlannedRun
from nemo_offload_rl.residency.table import Phase, Target

OVERLAPPED_FACTOR = 1.15
"""How much longer a step with overlap takes than its kernels alone, since copies use the host's
memory bandwidth, too, and the first and the last one overlap with nothing. On the H200 (docs/results/cpu_optimizer.md)
it was 1.10 for 772 M parameters (218 ms; kernels 198) and 1.21 for 1,544 M (477 ms; kernels 396)."""

_MEASURED_THREADS = 16

_OPTIMIZER = "policy.megatron_cfg.optimizer"
_CPU_METRICS, _CPU_QUANTITIES = "residency/cpu_optimizer", ("step_s", "waited_s", "copied_gib")
_STATE = Target.OPTIMIZER_STATE


@dataclass(frozen=True)
class CpuSpeed:
    """Says how fast the CPU optimizer's kernels are on a rank's threads.

    Attributes:
        params_per_s: parameters that they step in a second.
        source: how the number was obtained, for messages.
    """

    params_per_s: float
    source: str


@dataclass(frozen=True)
class Host:
    """Describes the machine that a plan is for.

    Attributes:
        name: the machine's name in messages.
        memory: its memory.
        source: how the size of its memory was obtained, for messages.
        otherwise: how to plan for a machine of another size, a sentence for messages that its memory does not suffice.
    """

    name: str
    memory: HostFacts
    source: str
    otherwise: str = ""

    @property
    def usable_bytes(self) -> int:
        """Returns the bytes that all of the host's ranks may take together."""
        return usable_bytes(self.memory)


@dataclass(frozen=True)
class Way:
    """Names one way to keep optimizer state, and the overrides of the recipe that turn it on.

    Attributes:
        name: the way's name in messages.
        overrides: `key=value` for every key whose value differs from the recipe's.
    """

    name: str
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class PlannedWay:
    """Estimates the memory and time of a way to keep optimizer state, for the rank that holds most.

    Attributes:
        way: the way.
        refusal: why the recipe cannot use the way, and then all numbers are 0; empty where it can.
        training_bytes: GPU memory of the state in training, and of fp32 gradients in the optimizer step.
        state_bytes: GPU memory of the state in training, without activations and logits.
        activation_bytes: the least GPU memory that activations and logits need.
        refit_bytes: GPU memory that the policy keeps in a refit; 0 for an algorithm without generation.
        generation_bytes: GPU memory that the policy keeps beside generation; 0 for an algorithm without generation.
        engine: the memory that vLLM takes beside that; None without vLLM.
        asleep_bytes: GPU memory that a sleeping engine keeps in training; 0 without an engine on the policy's GPUs.
        host_bytes: host memory of the rank that takes most.
        all_ranks_host_bytes: host memory of all ranks of the host whose ranks take most.
        transfer_s: seconds on the link in a step, for all targets, if nothing overlaps.
        wait_s: seconds that the optimizer step waits for copies and for the CPU optimizer's kernels, which overlap.
    """

    way: Way
    refusal: str = ""
    training_bytes: int = 0
    state_bytes: int = 0
    activation_bytes: int = 0
    refit_bytes: int = 0
    generation_bytes: int = 0
    engine: EngineMemory | None = None
    asleep_bytes: int = 0
    host_bytes: int = 0
    all_ranks_host_bytes: int = 0
    transfer_s: float = 0.0
    wait_s: float = 0.0

    def left_in_training(self, gpu_bytes: int) -> int:
        """Returns the GPU memory for activations and logits: what state, the engine and the process leave."""
        return gpu_bytes - self.state_bytes - self._engine_in_training(gpu_bytes) - self._process_bytes

    def missing_bytes(self, gpu_bytes: int) -> int:
        """Returns the GPU memory that is missing, with the least for activations and logits; 0 or less if all fits.

        Activations are freed before the optimizer step allocates its fp32 gradients, so the larger of the two counts.
        """
        training = max(self.training_bytes, self.state_bytes + self.activation_bytes)
        training += self._engine_in_training(gpu_bytes)
        refit, generation = self.refit_bytes, self.generation_bytes
        if self.engine is not None:
            refit += self.engine.weights_bytes + self.engine.refit_bytes
            generation += int(self.engine.share_of(gpu_bytes) * gpu_bytes)
        return max(training, refit, generation) + self._process_bytes - gpu_bytes

    @property
    def _process_bytes(self) -> int:
        return POLICY_OVERHEAD_BYTES + (0 if self.engine is None else self.engine.refit_graph_bytes)

    def _engine_in_training(self, gpu_bytes: int) -> int:
        if self.engine is not None and self.engine.stays_awake:
            return self.engine.awake_bytes(gpu_bytes)
        return self.asleep_bytes

    def missing_host_bytes(self, host: Host) -> int:
        """Returns the host memory that is missing for all ranks of a host; 0 or less if they fit."""
        return self.all_ranks_host_bytes - host.usable_bytes

    def fits(self, gpu_bytes: int, host: Host) -> bool:
        """Returns whether the way fits on the GPU and in host memory."""
        return self.missing_bytes(gpu_bytes) <= 0 and self.missing_host_bytes(host) <= 0


def cpu_speed(num_threads: int | None = None) -> CpuSpeed:
    """Returns an assumed speed of the CPU optimizer's kernels, for plans without a measurement.

    Args:
        num_threads: CPU threads of a rank; None where its machine is not known.
    """
    measured = f"{_MEASURED_THREADS} threads"
    if num_threads is None:
        return CpuSpeed(H200_RATES.cpu_params_per_s, f"assumed for {measured} a rank")
    share = min(1.0, num_threads / _MEASURED_THREADS)
    threads = "the thread" if num_threads == 1 else f"the {num_threads} threads"
    source = f"assumed for {threads} that a rank has here, from a measurement with {measured}"
    return CpuSpeed(H200_RATES.cpu_params_per_s * share, source)


def measured_cpu_params_per_s(steps: Sequence[Mapping[str, float | None]]) -> float | None:
    """Returns the speed of a run's CPU optimizer without its copies, from the run's metrics; None where it had none.

    Metrics do not say whether the run overlapped copies with kernels. If it did, copies have slowed the kernels, and
    `optimizer_wait_s` multiplies by `OVERLAPPED_FACTOR` once more; so kernels count as at most the whole step divided
    by it, and the plan never expects more seconds for kernels than the run's whole steps took.

    Args:
        steps: the run's metrics, as `read_metrics` gives them.
    """
    speeds = []
    for metrics in steps:
        step_s, waited_s, copied_gib = (metrics.get(f"{_CPU_METRICS}/{name}") for name in _CPU_QUANTITIES)
        if step_s is not None and waited_s is not None and copied_gib is not None and step_s > waited_s:
            kernels_s = min(step_s - waited_s, step_s / OVERLAPPED_FACTOR)
            speeds.append(copied_gib * GIB / host_budget.COPIED_SIZE / kernels_s)
    return statistics.median(speeds) if speeds else None


def ways(policy: PolicyConfig) -> tuple[Way, ...]:
    """Returns every way to keep optimizer state: on the GPU, streamed, and by the share that the CPU optimizer steps.

    Args:
        policy: the recipe's `policy` section, validated.
    """
    optimizer = policy["megatron_cfg"]["optimizer"]
    fractions = sorted({0.5, 1.0, host_budget.fraction(optimizer) or 1.0})
    switches = (f"{_OPTIMIZER}.optimizer_cpu_offload", f"{_OPTIMIZER}.overlap_cpu_optimizer_d2h_h2d")
    off, on = dict.fromkeys(switches, "false"), dict.fromkeys(switches, "true")
    if optimizer["optimizer"] == "adam":
        on[f"{_OPTIMIZER}.use_precision_aware_optimizer"] = "true"
    resident = _state_cells(policy, train="gpu", logprob="keep", refit="keep", generate="keep")
    resident |= {FOR_REFIT: "false", "policy.offload_optimizer_for_logprob": "false"}
    pinned = _state_cells(policy, train="gpu", refit="host", generate="host")
    pinned |= {FOR_REFIT: "true", "policy.use_pinned_optimizer_offload": "true"}
    elsewhere = dict(pinned)
    if policy["offload_optimizer_for_refit"] is None:  # the plan does not decide on state that is off the GPU anyway
        del elsewhere[FOR_REFIT]
    return (
        _way(policy, "resident", off | resident),
        _way(policy, "page-locked around refit", off | pinned),
        _way(policy, "streamed", off | elsewhere | {f"{TABLE}.train.optimizer_state": "streamed"}),
        *(
            _way(
                policy,
                f"CPU optimizer, {share:g}",
                on | elsewhere | {f"{_OPTIMIZER}.optimizer_offload_fraction": share},
            )
            for share in fractions
        ),
    )


def plan_ways(
    policy: PolicyConfig,
    plan_with: Callable[[Sequence[str]], PlannedRun],
    *,
    cpu_params_per_s: float = H200_RATES.cpu_params_per_s,
) -> tuple[PlannedWay, ...]:
    """Plans a recipe with every way to keep optimizer state.

    Args:
        policy: the recipe's `policy` section, validated.
        plan_with: plans the recipe with further overrides; raises a ValueError where the recipe does not allow them.
        cpu_params_per_s: parameters that a rank's CPU optimizer steps in a second.
    """
    planned = []
    for way in ways(policy):
        try:
            planned.append(planned_way(policy, way, plan_with(way.overrides), cpu_params_per_s))
        except RecipeError as error:
            planned.append(PlannedWay(way, refusal=f"{error.problems[0].path}: {error.problems[0].message}"))
        except ValueError as error:
            planned.append(PlannedWay(way, refusal=str(error).partition("\n")[0]))
    return tuple(planned)


def fastest_that_fits(planned: Sequence[PlannedWay], gpu_bytes: int, host: Host) -> PlannedWay | None:
    """Returns the way with the shortest wait that fits on GPU and host; None if no way fits."""
    fitting = [one for one in planned if not one.refusal and one.fits(gpu_bytes, host)]
    # Of equal waits, the first: it copies least beside other phases.
    return min(fitting, key=lambda one: one.wait_s, default=None)


def reason(planned: Sequence[PlannedWay], gpu_bytes: int, host: Host) -> str:
    """Returns one sentence for the user: which way to take on a GPU of this size and this host, and why."""
    chosen, possible = fastest_that_fits(planned, gpu_bytes, host), [one for one in planned if not one.refusal]
    if chosen is None:
        return _why_none(possible, gpu_bytes, host)
    left = show_gib(chosen.left_in_training(gpu_bytes))
    by_wait = sorted(possible, key=lambda one: one.wait_s)
    faster = by_wait[: by_wait.index(chosen)]
    why = "no step waits for its copies"
    if faster:
        why = f"it is the fastest that fits ({_obstacles(faster, gpu_bytes, host)})"
    elif chosen.wait_s:
        why = "it is the fastest that the recipe allows"
    return (
        f"For a GPU of {show_gib(gpu_bytes)} GiB use {chosen.way.name}, since {why}; it leaves {left} GiB in training "
        f"for activations and logits, which need at least {show_gib(chosen.activation_bytes)} GiB."
    )


def _why_none(possible: Sequence[PlannedWay], gpu_bytes: int, host: Host) -> str:
    size, least = show_gib(gpu_bytes), min((one.missing_bytes(gpu_bytes) for one in possible), default=0)
    if possible and least <= 0:
        return (
            f"No option fits a GPU of {size} GiB and its host ({_obstacles(possible, gpu_bytes, host)}); more host "
            "memory, a larger GPU, or more nodes with policy.megatron_cfg.optimizer.use_distributed_optimizer would "
            f"make room. {host.otherwise}"
        ).rstrip()
    awake = any(one.engine is not None and one.engine.stays_awake for one in possible)
    return (
        f"No option fits a GPU of {size} GiB, which lacks {show_gib(least)} GiB for the smallest option with "
        "the least memory for activations and logits; smaller micro-batches, "
        f"policy.megatron_cfg.activation_checkpointing, {f'{GENERATION_WEIGHTS_KEY}=discard, ' if awake else ''}more "
        "GPUs, model parallelism or a smaller share for generation on the same GPUs would make room."
    )


def _obstacles(unfit: Sequence[PlannedWay], gpu_bytes: int, host: Host) -> str:
    """Returns the memory that each way lacks: GPU memory first, then host memory."""
    on_gpu = [one for one in unfit if one.missing_bytes(gpu_bytes) > 0]
    lacks = ", ".join(f"{one.way.name} lacks {show_gib(one.missing_bytes(gpu_bytes))}" for one in on_gpu)
    needs = (
        f"{one.way.name} needs {show_gib(one.all_ranks_host_bytes)} GiB of host memory, but {host.name} has "
        f"{show_gib(host.usable_bytes)}"
        for one in unfit
        if one not in on_gpu
    )
    return "; ".join([*([f"{lacks} GiB"] if lacks else []), *needs])


def planned_way(policy: PolicyConfig, way: Way, run: PlannedRun, cpu_params_per_s: float) -> PlannedWay:
    """Returns what a way to keep optimizer state takes, from the plan of the recipe that has it."""
    ranks, link = run.plan.ranks, run.plan.link_bytes_per_s
    fullest = max(ranks, key=lambda rank: _state_bytes(rank) + rank.least_activation_bytes)
    return PlannedWay(
        way,
        training_bytes=max(_state_bytes(rank) + rank.step_grad_bytes for rank in ranks),
        state_bytes=_state_bytes(fullest),
        activation_bytes=fullest.least_activation_bytes,
        refit_bytes=_most_bytes(ranks, Phase.REFIT),
        generation_bytes=_most_bytes(ranks, Phase.GENERATE),
        # An engine on GPUs of its own takes no memory of the policy's GPUs.
        engine=run.engine if is_colocated(policy) else None,
        asleep_bytes=asleep_bytes(policy),
        host_bytes=max(rank.total_host_bytes for rank in ranks),
        all_ranks_host_bytes=run.most_host_bytes,
        transfer_s=max(sum(move.seconds for move in rank.all_traffic) + _cpu_copies_s(rank, link) for rank in ranks),
        wait_s=max(optimizer_wait_s(rank, link, cpu_params_per_s) for rank in ranks),
    )


def _most_bytes(ranks: Sequence[RankPlan], phase: Phase) -> int:
    """Returns the GPU memory of the rank that keeps most in a phase; 0 if the algorithm does not have the phase."""
    return max(sum(rank.gpu_bytes[phase].values()) if phase in rank.gpu_bytes else 0 for rank in ranks)


def _state_bytes(rank: RankPlan) -> int:
    return sum(rank.gpu_bytes[Phase.TRAIN].values())


def optimizer_wait_s(rank: RankPlan, link_bytes_per_s: float, cpu_params_per_s: float) -> float:
    """Returns the seconds that a rank's optimizer step waits for copies and the CPU optimizer's kernels."""
    # `ways` turns overlap on wherever the CPU steps: its kernels, copies to the host and copies back run concurrently.
    kernels_s = OVERLAPPED_FACTOR * rank.facts.num_cpu_optimizer_params / cpu_params_per_s
    copies_s = _cpu_copies_s(rank, link_bytes_per_s) / 2 / TWO_WAY_SHARE
    return sum(move.seconds for move in rank.step_traffic) + max(kernels_s, copies_s)


def _cpu_copies_s(rank: RankPlan, link_bytes_per_s: float) -> float:
    """Returns the seconds that copy gradients to the host and then parameters back, one direction after the other."""
    return 2 * rank.facts.num_cpu_optimizer_params * host_budget.COPIED_SIZE / link_bytes_per_s


def _state_cells(policy: PolicyConfig, **wanted: str) -> dict[str, str]:
    """Returns overrides for the table cells that the recipe sets itself, since cells take precedence over flags."""
    table: Mapping[str, Any] = policy["residency"]["table"] or {}
    written = {phase for phase, cells in table.items() if _STATE in cells}
    return {f"{TABLE}.{phase}.{_STATE}": cell for phase, cell in wanted.items() if phase in written}


def _way(policy: PolicyConfig, name: str, wanted: Mapping[str, Any]) -> Way:
    overrides = []
    for key, value in wanted.items():
        found: Any = policy
        for part in key.split(".")[1:]:
            found = found[part] if isinstance(found, Mapping) and part in found else None
        is_off = found is None and value == "false" and key != FOR_REFIT  # a null flag is neither true nor false
        same = str(found).lower() == str(value).lower() or is_off
        if not same:
            overrides.append(f"{'++' if found is None or '.table.' in key else ''}{key}={value}")
    return Way(name, tuple(overrides))
