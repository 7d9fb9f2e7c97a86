import pytest
from support.tiny import policy_without_model

from nemo_offload_rl.memory.units import GIB
from nemo_offload_rl.plan.generation import check_share_beside_policy
from nemo_offload_rl.plan.planner import make_plan
from nemo_offload_rl.residency.table import ShardFacts

# 10 GiB of optimizer state, 2 of parameters and 4 of gradients.
FACTS = ShardFacts(
    num_params=GIB,
    num_frozen_params=0,
    param_size=2,
    grad_size=4,
    num_optimizer_params=GIB,
    optimizer_size=10,
    has_reference=False,
)


@pytest.mark.parametrize(("offloads", "most"), [(True, 0.97), (False, 0.85)])
def test_a_share_of_the_gpu_has_to_fit_beside_what_the_policy_keeps(offloads, most):
    plan = make_plan(policy_without_model(offload_optimizer_for_refit=offloads), [FACTS])
    check_share_beside_policy(plan, most, 80 * GIB)
    with pytest.raises(ValueError, match=rf"gpu_memory_utilization is 0\.98, which is 78\.4 of .*set it to {most} or"):
        check_share_beside_policy(plan, 0.98, 80 * GIB)
