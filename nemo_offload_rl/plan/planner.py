"""Makes an `OffloadPlan` from a recipe and model sizes: bytes of each target in each phase, host memory, link time."""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nemo_offload_rl.activation_offload.schedule import ActivationOptions
from nemo_offload_rl.config.algorithms import ALGORITHMS, AlgorithmSpec
from nemo_offload_rl.config.megatron import megatron_field, split_devices
from nemo_offload_rl.config.schema import MasterConfig
from nemo_offload_rl.config.schema.megatron import MegatronConfig, MegatronOptimizerConfig
from nemo_offload_rl.config.schema.policy import PolicyConfig, has_generation
from nemo_offload_rl.placement.host import HostFacts
from nemo_offload_rl.placement.rates import H200_RATES, Rates
from nemo_offload_rl.plan import host_budget
from nemo_offload_rl.plan.activations import (
    RowSizes,
    activation_facts,
    limit_where_unknown,
    module_bytes,
    needed_slab_bytes,
    row_sizes,
    slab_bytes,
)
from nemo_offload_rl.plan.architecture import UnknownArchitectureError
from nemo_offload_rl.plan.generation import EngineMemory, engine_memory, free_bytes_for_refit
from nemo_offload_rl.plan.host_budget import (
    ACTIVATIONS,
    CHECKPOINT,
    GENERATION_WEIGHTS,
    RankNeed,
    check_host_budget,
)
from nemo_offload_rl.plan.model_facts import fp32_grad_bytes, shard_facts
from nemo_offload_rl.plan.plan import (
    TWO_WAY_SHARE,
    OffloadPlan,
    RankActivations,
    RankPlan,
    Traffic,
    Transition,
    keeps_generation_weights,
    settings,
)
from nemo_offload_rl.plan.saved_tensors import ActivationFacts
from nemo_offload_rl.plan.training_memory import least_activation_bytes
from nemo_offload_rl.residency.table import Phase, Placement, ShardFacts, Table, Target

_FLOAT = 4
_OF_GENERATION = (Phase.REFIT, Phase.GENERATE)


def make_plan(
    policy: PolicyConfig,
    facts: Sequence[ShardFacts] = (),
    *,
    cycle: Sequence[Phase] = ALGORITHMS["grpo"].phases,
    link_bytes_per_s: float | None = None,
) -> OffloadPlan:
    """Returns the plan of a validated policy section, without activations and buffers that never move.

    Args:
        policy: the recipe's `policy` section.
        facts: shard sizes of one rank of each pipeline stage; if empty, the plan has no sizes.
        cycle: the phases of a step in their order.
        link_bytes_per_s: speed of page-locked copies in one direction; None for an assumption.
    """
    plan = settings(policy)
    if link_bytes_per_s is not None:
        plan = dataclasses.replace(plan, link_bytes_per_s=link_bytes_per_s)
    ranks = tuple(_rank_plan(plan, stage, shard, cycle) for stage, shard in enumerate(facts))
    return dataclasses.replace(plan, ranks=ranks)


@dataclasses.dataclass(frozen=True)
class WorkerPlan:
    """Holds what a rank of the policy has to know of the plan; the driver makes it for all ranks.

    Attributes:
        offload: where everything lives in each phase, and how it is moved.
        activation_bytes: host memory for the activations of a rank of each pipeline stage; 0 where they stay on the
            GPU, or nothing is trained.
        generator_bytes: free GPU memory with which a refit and generation need nothing of the cache of torch's
            allocator; None where that is not known.
        rows: how long the rows of micro-batches may be.
    """

    offload: OffloadPlan
    activation_bytes: tuple[int, ...]
    generator_bytes: int | None
    rows: RowSizes


def worker_plan(
    policy: PolicyConfig,
    hf_config: Mapping[str, Any],
    *,
    world_size: int,
    group_size: int = 1,
    init_optimizer: bool = True,
) -> WorkerPlan:
    """Returns the plan of a policy's ranks.

    Args:
        policy: the recipe's `policy` section, resolved for the ranks' machine.
        hf_config: the model's Hugging Face config with every field, as its `to_dict()` gives it.
        world_size: ranks of the policy.
        group_size: rows of a sample that belong together, such as a chosen and a rejected answer.
        init_optimizer: whether the policy will be trained.

    Raises:
        ValueError: the host memory for activations cannot be computed, and the recipe does not give it; or it leaves
            the length of packed rows open.
    """
    plan = settings(policy)
    stages = policy["megatron_cfg"]["pipeline_model_parallel_size"]
    activations = (0,) * stages
    if plan.activations is not None and init_optimizer:
        try:
            facts = activation_facts(hf_config, policy, world_size=world_size, group_size=group_size)
        except UnknownArchitectureError as error:
            activations = (limit_where_unknown(plan.activations, error),) * stages
        else:
            activations = tuple(slab_bytes(of_stage, plan.activations) for of_stage in facts)
    return WorkerPlan(plan, activations, free_bytes_for_refit(policy, hf_config), row_sizes(policy))


@dataclasses.dataclass(frozen=True)
class PlannedRun:
    """Holds the plan of a whole run.

    Attributes:
        plan: the offload plan, with the sizes of every pipeline stage.
        needs: the host memory of every rank.
        engine: GPU memory of the vLLM engine; None without vLLM.
    """

    plan: OffloadPlan
    needs: Sequence[RankNeed]
    engine: EngineMemory | None = None

    def check_hosts(self, hosts: Sequence[HostFacts]) -> None:
        """Checks that hosts have the memory that their ranks need.

        Args:
            hosts: memory of the hosts, in the order of the ranks; those behind its end are not checked.

        Raises:
            HostBudgetError: one has too little.
        """
        names = dict.fromkeys(need.host for need in self.needs)
        check_host_budget(self.needs, dict(zip(names, hosts, strict=False)), self.plan.host_memory_limit_bytes)

    @property
    def bytes_by_host(self) -> Mapping[str, int]:
        """Host memory that all ranks of a host need together, by host."""
        totals: Counter[str] = Counter()
        for need in self.needs:
            totals[need.host] += need.total_bytes
        return totals

    @property
    def most_host_bytes(self) -> int:
        """Host memory that all ranks of a host need together, for the host that needs most."""
        return max(self.bytes_by_host.values())

    @property
    def ranks_of_a_host(self) -> int:
        """The number of ranks of the first host."""
        return len([need for need in self.needs if need.host == self.needs[0].host])

    @property
    def first_host_state_bytes(self) -> int:
        """Bytes of the training state of all ranks of the first host, on GPUs and in host memory."""
        ranks_per_stage = len(self.needs) // len(self.plan.ranks)
        stages = [need.rank // ranks_per_stage for need in self.needs if need.host == self.needs[0].host]
        return sum(sum(self.plan.ranks[stage].target_bytes.values()) for stage in stages)


@dataclasses.dataclass(frozen=True)
class Planner:
    """Plans recipes of one model for machines with GPUs of one size.

    Attributes:
        hf_config: the model's Hugging Face config with every field, as its `to_dict()` gives it.
        algorithm: a key of `ALGORITHMS`, the section that marks the recipe.
        gpu_bytes: memory of the smallest GPU; None where that is not known.
        hosts: memory of the hosts of the policy's ranks, in the order of the ranks; empty to skip their check.
        rates: those of the GPUs and hosts, from which seconds are predicted.
    """

    hf_config: Mapping[str, Any]
    algorithm: str
    gpu_bytes: int | None
    hosts: Sequence[HostFacts] = ()
    rates: Rates = H200_RATES

    @property
    def spec(self) -> AlgorithmSpec:
        """The algorithm's spec."""
        return ALGORITHMS[self.algorithm]

    def run(self, config: MasterConfig) -> PlannedRun:
        """Returns the plan of a validated recipe, and raises the errors of `plan_run`."""
        link = self.rates.link_bytes_per_s
        return plan_run(config, self.hf_config, algorithm=self.algorithm, link_bytes_per_s=link)

    def plan(self, config: MasterConfig) -> PlannedRun | None:
        """Does the same as `run`, but returns None where the model's sizes are not known."""
        try:
            return self.run(config)
        except UnknownArchitectureError:
            return None


def plan_run(
    config: MasterConfig, hf_config: Mapping[str, Any], *, algorithm: str, link_bytes_per_s: float | None = None
) -> PlannedRun:
    """Returns the plan of a validated recipe.

    Args:
        config: the recipe.
        hf_config: the model's Hugging Face config with every field, as its `to_dict()` gives it.
        algorithm: a key of `ALGORITHMS`.
        link_bytes_per_s: as in `make_plan`.

    Raises:
        UnknownArchitectureError: the model's sizes are not known.
        ValueError: the model cannot be split as the recipe says.
        HostBudgetError: a rank needs more host memory than the recipe's limit.
    """
    policy = config["policy"]
    split = split_devices(config["cluster"], policy)
    world_size = split.policy_ranks
    spec = ALGORITHMS[algorithm]
    facts = shard_facts(hf_config, policy, world_size=world_size, has_reference=spec.has_reference(config))
    engine = engine_memory(policy, hf_config)
    phases = [phase for phase in spec.phases if has_generation(policy) or phase not in _OF_GENERATION]
    plan = make_plan(policy, facts, cycle=phases, link_bytes_per_s=link_bytes_per_s)
    activations = activation_facts(hf_config, policy, world_size=world_size, group_size=spec.group_size)
    least = least_activation_bytes(hf_config, policy, activations)
    in_host = {}
    if engine is not None and keeps_generation_weights(policy):
        in_host = {GENERATION_WEIGHTS: engine.weights_bytes}
    ranks = []
    for rank, of_stage in zip(plan.ranks, activations, strict=True):
        offloaded = None if plan.activations is None else _offloaded(of_stage, plan.activations)
        fixed_bytes = {
            **host_budget.host_bytes(policy, rank.facts),
            **_snapshot_bytes(config, rank.facts, plan.table),
            **in_host,
            **({} if offloaded is None else {ACTIVATIONS: offloaded.slab_bytes}),
        }
        ranks.append(
            dataclasses.replace(
                rank,
                activations=offloaded,
                fixed_bytes=fixed_bytes,
                step_grad_bytes=fp32_grad_bytes(policy, rank.facts),
                least_activation_bytes=least[rank.stage],
            )
        )
    plan = dataclasses.replace(plan, ranks=tuple(ranks))
    needs = rank_needs(plan, ranks_per_host=split.policy_per_node, num_hosts=split.policy_nodes)
    needs = list(_without_weights_of_replicas(needs, facts, policy["megatron_cfg"]))
    check_host_budget(needs, {}, plan.host_memory_limit_bytes)
    return PlannedRun(plan, needs, engine)


def _offloaded(facts: ActivationFacts, options: ActivationOptions) -> RankActivations:
    needed, slab = needed_slab_bytes(facts, options), slab_bytes(facts, options)
    return RankActivations(facts, module_bytes(facts, options), needed, slab)


def rank_needs(plan: OffloadPlan, *, ranks_per_host: int, num_hosts: int) -> list[RankNeed]:
    """Returns the host memory of every rank of a cluster; hosts are named by their number.

    Ranks of one pipeline stage are consecutive, as in megatron-core, and fill one host after another.
    """
    world_size = ranks_per_host * num_hosts
    assert world_size % len(plan.ranks) == 0, "the plan is of another world size"
    ranks_per_stage = world_size // len(plan.ranks)
    stages = [plan.ranks[rank // ranks_per_stage] for rank in range(world_size)]
    return [
        RankNeed(rank, f"host {rank // ranks_per_host}", stage.host_bytes, stage.fixed_bytes)
        for rank, stage in enumerate(stages)
    ]


def _rank_plan(plan: OffloadPlan, stage: int, facts: ShardFacts, cycle: Sequence[Phase]) -> RankPlan:
    from nemo_offload_rl.residency.targets import TARGETS  # imports torch

    sizes = {target: TARGETS[target].estimate_bytes(facts) for target in Target}
    steps = list(_steady_cycle(plan.table, cycle))
    return RankPlan(
        stage=stage,
        facts=facts,
        target_bytes=sizes,
        gpu_bytes={
            phase: {target: _gpu_bytes(plan, cell, sizes[target]) for target, cell in cells.items()}
            for _, phase, _, cells in steps
        },
        host_bytes={target: sizes[target] if _needs_host(plan.table, target, facts) else 0 for target in Target},
        transitions=tuple(
            Transition(source, phase, tuple(_traffic(plan, phase, before, cells, sizes)))
            for source, phase, before, cells in steps
            if source is not phase
        ),
        step_traffic=tuple(_step_traffic(plan, sizes)),
    )


def _gpu_bytes(plan: OffloadPlan, cell: Placement, size: int) -> int:
    return {Placement.GPU: size, Placement.STREAMED: plan.stream_window_bytes if size else 0}.get(cell, 0)


def _step_traffic(plan: OffloadPlan, sizes: Mapping[Target, int]) -> Iterator[Traffic]:
    size = sizes[Target.OPTIMIZER_STATE]
    if not plan.streams_optimizer_state or not size:
        return
    # Staged copies run in one direction at a time.
    speed = plan.link_bytes_per_s * TWO_WAY_SHARE if plan.pinned else plan.bytes_per_s(Target.OPTIMIZER_STATE) / 2
    yield Traffic(Target.OPTIMIZER_STATE, size, size, size / speed)


def _needs_host(table: Table, target: Target, facts: ShardFacts) -> bool:
    # The policy's parameters are on the host while the reference weights are swapped in.
    swapped_out = target is Target.PARAMS and facts.has_reference
    return swapped_out or any(table[phase][target] in (Placement.HOST, Placement.STREAMED) for phase in Phase)


_Cells = Mapping[Target, Placement]


def _steady_cycle(table: Table, cycle: Sequence[Phase]) -> Iterator[tuple[Phase, Phase, _Cells, _Cells]]:
    """Yields (previous phase, phase, placements before, placements after) for a step that follows another step."""
    where: dict[Target, Placement] = dict(table[Phase.TRAIN])
    previous = cycle[-1]
    for in_steady_state in (False, True):
        for phase in cycle:
            before = dict(where)
            where |= {target: cell for target, cell in table[phase].items() if cell is not Placement.UNCHANGED}
            if in_steady_state:
                yield previous, phase, before, dict(where)
            previous = phase


def _traffic(
    plan: OffloadPlan, phase: Phase, before: _Cells, after: _Cells, sizes: Mapping[Target, int]
) -> Iterator[Traffic]:
    for target in Target:
        out, back = 0, 0
        if target is Target.REFERENCE_WEIGHTS:
            if phase is Phase.LOGPROB:
                # The reference weights are swapped in for their log-probs: the policy's go out and come back.
                out, back = sizes[target], 2 * sizes[target]
        elif (before[target], after[target]) == (Placement.GPU, Placement.HOST):
            out = sizes[target]
        elif (before[target], after[target]) == (Placement.HOST, Placement.GPU):
            back = sizes[target]
        if out or back:
            yield Traffic(target, out, back, (out + back) / plan.bytes_per_s(target))


def _snapshot_bytes(config: MasterConfig, facts: ShardFacts, table: Table) -> Mapping[str, int]:
    """Returns the largest host memory of an asynchronous checkpoint's snapshot, by its name in budgets; else nothing.

    The first save allocates it, on the first data-parallel rank with the weights. State that has a host copy for other
    phases is read from that copy and not counted.

    Args:
        config: the recipe.
        facts: the sizes of the rank's shard.
        table: where each target lives in each phase.
    """
    checkpointing, policy = config["checkpointing"], config["policy"]
    if not checkpointing["enabled"] or not policy["megatron_cfg"]["checkpoint"]["async_save"]:
        return {}
    nbytes = _weights_bytes(facts)
    if checkpointing["save_optimizer"]:
        nbytes += _optimizer_bytes(policy, facts, table)
    return {CHECKPOINT: nbytes}


def _weights_bytes(facts: ShardFacts) -> int:
    """Returns the bytes of a rank's weights, including frozen ones."""
    return (facts.num_params + facts.num_frozen_params) * facts.param_size


def _without_weights_of_replicas(
    needs: Sequence[RankNeed], facts: Sequence[ShardFacts], megatron_cfg: MegatronConfig
) -> Iterator[RankNeed]:
    """Yields the needs without the weights of ranks that write none, since another data-parallel rank has the same.

    Experts are spread over `expert_model_parallel_size` x `expert_tensor_parallel_size` ranks; each of these counts
    with all of its weights.

    Args:
        needs: the needs of every rank; those of one pipeline stage are consecutive.
        facts: the shard sizes of one rank of each pipeline stage.
        megatron_cfg: the recipe's `policy.megatron_cfg` section.
    """
    expert_ranks = megatron_cfg["expert_model_parallel_size"] * megatron_cfg["expert_tensor_parallel_size"]
    num_writers = max(megatron_cfg["tensor_model_parallel_size"], expert_ranks)
    ranks_per_stage = len(needs) // len(facts)
    for number, need in enumerate(needs):
        if CHECKPOINT in need.fixed_bytes and number % ranks_per_stage >= num_writers:
            nbytes = need.fixed_bytes[CHECKPOINT] - _weights_bytes(facts[number // ranks_per_stage])
            need = dataclasses.replace(need, fixed_bytes={**need.fixed_bytes, CHECKPOINT: nbytes})
        yield need


def _optimizer_bytes(policy: PolicyConfig, facts: ShardFacts, table: Table) -> int:
    """Returns the bytes of optimizer state that a snapshot copies.

    It copies the CPU optimizer's state, state that has no host copy for another phase, and state whose type is
    converted on the GPU for a save.
    """
    section = policy["megatron_cfg"]["optimizer"]
    num_on_gpu = facts.num_optimizer_params - facts.num_cpu_optimizer_params
    # The CPU optimizer's state changes in the next step, wherever it is; its gradients are not saved.
    nbytes = facts.num_cpu_optimizer_params * (_FLOAT + host_budget.moments_size(section))
    if policy["precision"] == "float32":
        nbytes += num_on_gpu * _FLOAT  # a float32 model's master weights are its parameters; a save writes both
    if _is_converted(section):
        return nbytes + num_on_gpu * 3 * _FLOAT
    has_host = any(table[phase][Target.OPTIMIZER_STATE] in (Placement.HOST, Placement.STREAMED) for phase in Phase)
    return nbytes if has_host else nbytes + num_on_gpu * facts.optimizer_size


def _is_converted(optimizer: MegatronOptimizerConfig) -> bool:
    if not optimizer["use_precision_aware_optimizer"] or host_budget.fraction(optimizer):
        return False
    return any(megatron_field(optimizer, name) != "float32" for name in ("exp_avg_dtype", "exp_avg_sq_dtype"))
