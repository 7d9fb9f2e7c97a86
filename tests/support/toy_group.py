"""Starts worker groups of the toy worker in tests/unit/worker/toy_worker.py."""

from dataclasses import replace

import psutil
import ray
import torch
from support.tiny import policy_without_model, tiny_policy

from nemo_offload_rl.data.batch import BatchedData
from nemo_offload_rl.plan.activations import row_sizes
from nemo_offload_rl.plan.plan import settings
from nemo_offload_rl.plan.planner import WorkerPlan
from nemo_offload_rl.worker.group import PolicyWorkerGroup

SIZES = {
    "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "context_parallel_size": 1,
    "expert_model_parallel_size": 1, "expert_tensor_parallel_size": 1, "sequence_parallel": False,
    "env_vars": {"TOY_VARIABLE": "from the recipe"},
}  # fmt: skip
TOY_WORKER = "tests.unit.worker.toy_worker:ToyWorker"  # Ray's processes have the working folder on their path


def toy_group(cluster, *, tp=1, before_build=None, checks_model=False, **toy):
    """Starts a group of two; `toy` says which faults its workers have."""
    megatron = tiny_policy()["megatron_cfg"] | SIZES | {"tensor_model_parallel_size": tp}
    config = tiny_policy() | {"skip_model_check": True, "megatron_cfg": megatron, "toy": toy}
    return PolicyWorkerGroup(
        config, cluster, seed=7, init_reference_model=True,
        plan=WorkerPlan(settings(policy_without_model()), (0,), None, row_sizes(config)), worker_cls=TOY_WORKER,
        checks_model=checks_model, before_build=before_build,
    )  # fmt: skip


class ApartCluster:
    """Is a cluster of one node that says its ranks are on several, so that these have relays."""

    def __init__(self, cluster, ranks_per_node=1):
        self._cluster, self._ranks_per_node = cluster, ranks_per_node

    def __getattr__(self, name):
        return getattr(self._cluster, name)

    def node_of(self, bundle):
        return replace(self._cluster.node_of(0), id=f"node {bundle // self._ranks_per_node}")

    def options_beside(self, bundle):
        return self._cluster.options_beside(0)


class NamedNodes(ApartCluster):
    """Names its nodes in messages."""

    def node_name(self, bundle):
        return self.node_of(bundle).id


def toy_batch(num_rows):
    rows, lengths = torch.arange(num_rows), torch.full((num_rows,), 3)
    ids = rows[:, None].expand(-1, 3)
    masks = {"token_mask": torch.ones(num_rows, 3), "sample_mask": torch.ones(num_rows)}
    return BatchedData(row=rows, input_ids=ids, input_lengths=lengths, **masks)


def processes():
    return {process.pid for process in psutil.Process().children(recursive=True)}


def pids_of(group):
    return {int(pid) for _, pid in ray.get(group._process_refs)}
