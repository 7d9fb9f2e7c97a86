"""Checks whether the offloaded state of a host's GPUs, and the CPU optimizer's, fit before memory is page-locked."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from nemo_offload_rl.config.schema.megatron import MegatronOptimizerConfig
from nemo_offload_rl.config.schema.policy import PolicyConfig
from nemo_offload_rl.memory.units import GIB, show_gib
from nemo_offload_rl.placement.host import HostFacts
from nemo_offload_rl.residency.table import ShardFacts, Target

# Left free for Ray, generation and the page cache, which take more memory after this check.
MARGIN_SHARE, MIN_MARGIN_BYTES = 0.05, 1 * GIB

ACTIVATIONS = "activations"
"""The name in `RankNeed.fixed_bytes` of the pool that activations are offloaded to."""

CPU_OPTIMIZER = "cpu_optimizer"
"""The name in `RankNeed.fixed_bytes` of the CPU optimizer's state."""

CHECKPOINT = "checkpoint"
"""The name in `RankNeed.fixed_bytes` of the buffers into which an asynchronous checkpoint is copied."""

GENERATION_WEIGHTS = "generation_weights"
"""The name in `RankNeed.fixed_bytes` of the weights of a sleeping vLLM on the rank's GPU, in the engine's process."""

LIMIT_KEY = "policy.residency.host_memory_limit_gib"
_OPTIMIZER_STAYS = "policy.offload_optimizer_for_refit=false policy.offload_optimizer_for_logprob=false"
_PARAMS_STAY = "++policy.residency.table.generate.params=keep"
_NO_REFERENCE = "loss_fn.reference_policy_kl_penalty=0"
_LESS_ACTIVATIONS = (
    "a lower policy.activation_offload.host_memory_limit_gib or fewer policy.megatron_cfg.offload_modules "
    "(frees this much at most; activations that do not fit stay on the GPU)"
)
_LESS_ON_CPU = (
    "a lower policy.megatron_cfg.optimizer.optimizer_offload_fraction (frees this much at most; optimizer state that "
    "is stepped on the GPU needs host memory, too, while it is offloaded)"
)
_NO_SNAPSHOT = (
    "policy.megatron_cfg.checkpoint.async_save=false (a save copies nothing, and the run waits until it is written)"
)
_NO_GENERATION_WEIGHTS = "policy.residency.generation_weights=discard (each generation is preceded by a refit)"
_MORE_RANKS = (
    "policy.megatron_cfg.optimizer.use_distributed_optimizer=true with more ranks (cluster.num_nodes): it shards "
    "optimizer state over them"
)


@dataclass(frozen=True)
class RankNeed:
    """Counts the host memory that a rank will take, in bytes.

    Attributes:
        rank: its number in the worker group.
        host: identifies the machine, since several may have the same hostname.
        target_bytes: bytes of each target, page-locked or not.
        fixed_bytes: bytes, by name, of host buffers that never move, such as the pool of activations.
    """

    rank: int
    host: str
    target_bytes: Mapping[Target, int]
    fixed_bytes: Mapping[str, int] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        """Returns the bytes of all targets and of the buffers that never move."""
        return sum(self.target_bytes.values()) + sum(self.fixed_bytes.values())


class HostBudgetError(ValueError):
    """Says that the offloaded state does not fit into the memory of a host; `str()` includes a table."""


def margin_bytes(host: HostFacts) -> int:
    """Returns the bytes that are left to other processes."""
    return max(int(MARGIN_SHARE * _free_bytes(host)), MIN_MARGIN_BYTES)


def usable_bytes(host: HostFacts) -> int:
    """Returns the bytes that all ranks of a host may take together."""
    return max(0, _free_bytes(host) - margin_bytes(host))


def _free_bytes(host: HostFacts) -> int:
    return min(source for source in (host.available_bytes, host.cgroup_free_bytes) if source is not None)


def check_host_budget(
    needs: Sequence[RankNeed],
    hosts: Mapping[str, HostFacts],
    limit_bytes: int | None,
) -> None:
    """Checks that every rank stays within the recipe's limit, and that each host has memory for its ranks.

    Args:
        needs: the needs of every rank of the hosts.
        hosts: the memory of each host, by `RankNeed.host`, read before any of the needs was allocated; a host that is
            missing here is not checked, except for the recipe's limit.
        limit_bytes: the recipe's limit for one rank; None for no limit.

    Raises:
        HostBudgetError: a rank exceeds its limit, or a host lacks memory. The message is for the first such case: a
            sentence, a table of needed and available memory, and the keys that would help.
    """
    for need in needs:
        if limit_bytes is not None and need.total_bytes > limit_bytes:
            raise _over_limit(need, limit_bytes)
    for name, host in hosts.items():
        here = [need for need in needs if need.host == name]
        if sum(need.total_bytes for need in here) > usable_bytes(host):
            raise _over_memory(here, host)


def check_state_fits_host(state_bytes: int, host: HostFacts) -> None:
    """Checks that a model's training state fits into the memory of a host without GPUs.

    Args:
        state_bytes: parameters, gradients, optimizer state and reference weights of all ranks of the host.
        host: the host's memory.

    Raises:
        HostBudgetError: the state does not fit.
    """
    usable = usable_bytes(host)
    if state_bytes > usable:
        raise HostBudgetError(
            f"Without GPUs, parameters, gradients and optimizer state take {show_gib(state_bytes)} GiB of host memory "
            f"on {host.hostname}, but {show_gib(usable)} GiB are available; give a smaller model in policy.hf_config "
            "or policy.model_name, or run on GPUs."
        )


def _over_limit(need: RankNeed, limit_bytes: int) -> HostBudgetError:
    enough = math.ceil(need.total_bytes / GIB)
    sentence = (
        f"Rank {need.rank} needs {show_gib(need.total_bytes)} GiB of host memory for offloading, but "
        f"{LIMIT_KEY} is {limit_bytes / GIB:g}."
    )
    raising = f"{LIMIT_KEY}={enough}, or null to use what the host has"
    return _error(sentence, [need], [], need.total_bytes - limit_bytes, raising)


def _over_memory(needs: Sequence[RankNeed], host: HostFacts) -> HostBudgetError:
    total, usable = sum(need.total_bytes for need in needs), usable_bytes(host)
    ranks = f"{len(needs)} ranks of {host.hostname} need" if len(needs) > 1 else f"rank of {host.hostname} needs"
    sentence = (
        f"The {ranks} {show_gib(total)} GiB of host memory for offloading, but {show_gib(usable)} GiB are "
        "available; nothing was page-locked."
    )
    return _error(sentence, needs, list(_sources(host)), total - usable, None)


def _error(
    sentence: str, needs: Sequence[RankNeed], sources: Sequence[str], missing_bytes: int, first_remedy: str | None
) -> HostBudgetError:
    lines = [sentence, "", *_table(needs)]
    if sources:
        lines += ["", "  available (GiB)", *(f"    {source}" for source in sources)]
    lines += ["", f"  {show_gib(missing_bytes)} GiB are missing; any of these helps"]
    lines += [f"    {remedy}" for remedy in ([first_remedy] if first_remedy else [])]
    lines += [f"    {remedy}" for remedy in _remedies(needs, missing_bytes)]
    return HostBudgetError("\n".join(lines))


def _table(needs: Sequence[RankNeed]) -> Iterator[str]:
    """Yields the lines of a table of each rank's needs in GiB, by target and by buffer that never moves."""
    fixed = dict.fromkeys(name for need in needs for name, nbytes in need.fixed_bytes.items() if nbytes)
    columns = [*Target, *fixed]
    widths = [max(len(column), 8) for column in columns]
    names = [f"{column:>{width}}" for column, width in zip(columns, widths, strict=True)]
    yield "  " + "  ".join([f"{'needed (GiB)':<14}", *names, f"{'total':>8}"])
    rows = [[_bytes_of(need, column) for column in columns] for need in needs]
    for need, row in zip(needs, rows, strict=True):
        yield _row(f"rank {need.rank}", row, widths)
    if len(needs) > 1:
        yield _row("all", [sum(sizes) for sizes in zip(*rows, strict=True)], widths)


def _row(label: str, sizes: Sequence[int], widths: Sequence[int]) -> str:
    cells = [f"{show_gib(size):>{width}}" for size, width in zip(sizes, widths, strict=True)]
    return "  " + "  ".join([f"{label:<14}", *cells, f"{show_gib(sum(sizes)):>8}"])


def _bytes_of(need: RankNeed, name: str) -> int:
    return sum(nbytes for other, nbytes in [*need.target_bytes.items(), *need.fixed_bytes.items()] if other == name)


def _sources(host: HostFacts) -> Iterator[str]:
    cgroup, memlock = host.cgroup_free_bytes, host.memlock_bytes
    yield f"{show_gib(host.available_bytes):>10}  MemAvailable"
    yield f"{'no limit' if cgroup is None else show_gib(cgroup):>10}  free under the cgroup's limit"
    yield f"{'no limit' if memlock is None else show_gib(memlock):>10}  memlock of each process"
    yield f"{'-' + show_gib(margin_bytes(host)):>10}  margin"
    yield f"{show_gib(usable_bytes(host)):>10}  usable for offloading"


def _remedies(needs: Sequence[RankNeed], missing_bytes: int) -> Iterator[str]:
    """Yields how much memory each key would free, largest first, and whether that is enough."""
    params, optimizer, reference = (
        sum(_bytes_of(need, target) for need in needs)
        for target in (Target.PARAMS, Target.OPTIMIZER_STATE, Target.REFERENCE_WEIGHTS)
    )
    freed = {f"{_OPTIMIZER_STAYS} (it stays on the GPU, unless it is streamed)": optimizer}
    freed[f"{_NO_REFERENCE} (no reference weights are kept)"] = reference
    freed[_LESS_ACTIVATIONS] = sum(_bytes_of(need, ACTIVATIONS) for need in needs)
    freed[_LESS_ON_CPU] = sum(_bytes_of(need, CPU_OPTIMIZER) for need in needs)
    freed[_NO_SNAPSHOT] = sum(_bytes_of(need, CHECKPOINT) for need in needs)
    freed[_NO_GENERATION_WEIGHTS] = sum(_bytes_of(need, GENERATION_WEIGHTS) for need in needs)
    # Params also need host memory while the reference weights are swapped in.
    also = f" {_NO_REFERENCE}" if reference else ""
    freed[f"{_PARAMS_STAY}{also} (they stay on the GPU)"] = params + reference if params else 0
    for remedy, size in sorted(freed.items(), key=lambda item: -item[1]):
        if size:
            enough = "enough" if size >= missing_bytes else "not enough alone"
            yield f"frees {show_gib(size)} GiB, {enough}: {remedy}"
    if optimizer or freed[_LESS_ON_CPU]:
        yield _MORE_RANKS


_FLOAT = 4
COPIED_SIZE = _FLOAT
"""Bytes of each parameter that a step copies to the host (its gradient), and back (its new value)."""


def fraction(optimizer: MegatronOptimizerConfig) -> float:
    """Returns the share of the parameters that the CPU optimizer steps; 0 without it.

    Args:
        optimizer: the recipe's `policy.megatron_cfg.optimizer`.
    """
    return float(optimizer["optimizer_offload_fraction"]) if optimizer["optimizer_cpu_offload"] else 0.0


def moments_size(optimizer: MegatronOptimizerConfig) -> int:
    """Returns the bytes per element of the optimizer's moments, which are float32."""
    if optimizer["optimizer"] == "adam":
        return 2 * _FLOAT
    return _FLOAT if optimizer["sgd_momentum"] > 0 else 0


def gpu_size(policy: PolicyConfig) -> int:
    """Returns the bytes per element of the master weights that megatron-core keeps on the GPU; 0 without them."""
    optimizer = policy["megatron_cfg"]["optimizer"]
    has_own = policy["precision"] == "bfloat16" and not optimizer["use_precision_aware_optimizer"]
    return _FLOAT if fraction(optimizer) and has_own else 0


def host_bytes(policy: PolicyConfig, facts: ShardFacts) -> Mapping[str, int]:
    """Returns the host memory of a rank's CPU optimizer (gradients, master weights, moments), by its name in budgets.

    Empty without the CPU optimizer.
    """
    if not facts.num_cpu_optimizer_params:
        return {}
    size = 2 * _FLOAT + moments_size(policy["megatron_cfg"]["optimizer"])
    return {CPU_OPTIMIZER: facts.num_cpu_optimizer_params * size}
