"""Computes the host memory of an asynchronous checkpoint's snapshot, which the first save allocates."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from nemo_offload_rl.config.megatron.further_fields import megatron_field
from nemo_offload_rl.config.schema import MasterConfig
from nemo_offload_rl.config.schema.megatron import MegatronConfig, MegatronOptimizerConfig
from nemo_offload_rl.config.schema.policy import PolicyConfig
from nemo_offload_rl.plan import cpu_optimizer
from nemo_offload_rl.plan.host_budget import CHECKPOINT, RankNeed
from nemo_offload_rl.residency.table import Phase, Placement, ShardFacts, Table, Target

_FLOAT = 4


def host_bytes(config: MasterConfig, facts: ShardFacts, table: Table) -> Mapping[str, int]:
    """Returns the largest host memory of a rank's snapshot, by its name in budgets; empty without asynchronous saves.

    The bytes are those of the first data-parallel rank, which writes the weights. State that has a host copy for other
    phases is read from that copy and not counted.

    Args:
        config: the recipe.
        facts: the sizes of the rank's shard.
        table: where each target lives in each phase.
    """
    checkpointing, policy = config["checkpointing"], config["policy"]
    if not checkpointing["enabled"] or not policy["megatron_cfg"]["checkpoint"]["async_save"]:
        return {}
    nbytes = weights_bytes(facts)
    if checkpointing["save_optimizer"]:
        nbytes += _optimizer_bytes(policy, facts, table)
    return {CHECKPOINT: nbytes}


def weights_bytes(facts: ShardFacts) -> int:
    """Returns the bytes of a rank's weights, including frozen ones."""
    return (facts.num_params + facts.num_frozen_params) * facts.param_size


def without_weights_of_replicas(
    needs: Sequence[RankNeed], facts: Sequence[ShardFacts], megatron_cfg: MegatronConfig
) -> list[RankNeed]:
    """Returns the needs without the weights of ranks that write none, since another data-parallel rank has the same.

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
    return [
        need
        if CHECKPOINT not in need.fixed_bytes or number % ranks_per_stage < num_writers
        else _less(need, weights_bytes(facts[number // ranks_per_stage]))
        for number, need in enumerate(needs)
    ]


def _less(need: RankNeed, nbytes: int) -> RankNeed:
    return replace(need, fixed_bytes={**need.fixed_bytes, CHECKPOINT: need.fixed_bytes[CHECKPOINT] - nbytes})


def _optimizer_bytes(policy: PolicyConfig, facts: ShardFacts, table: Table) -> int:
    """Returns the bytes of optimizer state that a snapshot copies.

    It copies the CPU optimizer's state, state that has no host copy for another phase, and state whose type is
    converted on the GPU for a save.
    """
    section = policy["megatron_cfg"]["optimizer"]
    num_on_gpu = facts.num_optimizer_params - facts.num_cpu_optimizer_params
    # The CPU optimizer's state changes in the next step, wherever it is; its gradients are not saved.
    nbytes = facts.num_cpu_optimizer_params * (_FLOAT + cpu_optimizer.moments_size(section))
    if policy["precision"] == "float32":
        nbytes += num_on_gpu * _FLOAT  # a float32 model's master weights are its parameters; a save writes both
    if _is_converted(section):
        return nbytes + num_on_gpu * 3 * _FLOAT
    has_host = any(table[phase][Target.OPTIMIZER_STATE] in (Placement.HOST, Placement.STREAMED) for phase in Phase)
    return nbytes if has_host else nbytes + num_on_gpu * facts.optimizer_size


def _is_converted(optimizer: MegatronOptimizerConfig) -> bool:
    if not optimizer["use_precision_aware_optimizer"] or cpu_optimizer.fraction(optimizer):
        return False
    return any(megatron_field(optimizer, name) != "float32" for name in ("exp_avg_dtype", "exp_avg_sq_dtype"))
