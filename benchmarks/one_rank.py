"""Creates the policy worker of a benchmark on one GPU, or on the CPU."""

from typing import Any

from ports import free_port

from nemo_offload_rl.hf_config import hf_config
from nemo_offload_rl.plan.planner import worker_plan
from nemo_offload_rl.worker.worker import MegatronPolicyWorker


def one_rank_worker(policy: Any, *, init_reference_model: bool = False, group_size: int = 1) -> MegatronPolicyWorker:
    """Creates the only rank of a policy in this process.

    Args:
        policy: The policy section of a validated recipe, resolved for this machine.
        init_reference_model: Whether the weights of the start are kept as the reference policy.
        group_size: Rows of a sample that belong together.
    """
    return MegatronPolicyWorker(
        policy,
        plan=worker_plan(policy, hf_config(policy).to_dict(), world_size=1, group_size=group_size),
        rank=0,
        world_size=1,
        local_rank=0,
        master_addr="localhost",
        master_port=free_port(),
        seed=0,
        init_reference_model=init_reference_model,
    )
