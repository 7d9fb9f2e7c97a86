"""Provides a generation backend whose engines span several bundles: each actor holds some columns of the table."""

import sys

import ray
import torch
from support.toy_policy import VOCABULARY, TableSampler

from nemo_offload_rl.generation.interface import Capabilities, EngineSpec
from nemo_offload_rl.placement.cluster import ENGINE_SHARE
from nemo_offload_rl.refit.interface import Receiver

# The actors cannot import this module, so Ray pickles its classes by value.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Shard:
    """Runs as one actor of an engine and keeps its part of each weight, as a tensor-parallel rank does."""

    def __init__(self, index, num_shards):
        self.index = index
        self.num_shards = num_shards
        self.columns = None

    def load_weights(self, bucket):
        with bucket.opened() as ((_, table),):
            self.columns = table.chunk(self.num_shards, dim=1)[self.index].clone()
        return 0.25

    def logits(self, rows):
        return self.columns[rows]

    def discard_weights(self):
        self.columns = None

    def resources(self):
        """Returns the actor's resources by name, such as CPU_group_INDEX_ID of a cluster group's bundle."""
        return set(ray._private.worker.global_worker.core_worker.resource_ids())


class ShardedGeneration(TableSampler):
    """Runs one engine over all bundles of a node; drops its weights when it sleeps, and has no checksums."""

    def __init__(self, cluster, ranks):
        super().__init__(Capabilities("object_store", keeps_weights=False, batch_independent_sampling=True))
        self.shards = [
            ray.remote(Shard).options(**cluster.actor_options(rank, ENGINE_SHARE)).remote(index, len(ranks))
            for index, rank in enumerate(ranks)
        ]
        self.receivers = [Receiver(shard, (rank,)) for shard, rank in zip(self.shards, ranks, strict=True)]

    def logits(self, input_ids):
        rows = input_ids[:, 0] * VOCABULARY + input_ids[:, 1]
        return torch.cat(ray.get([shard.logits.remote(rows) for shard in self.shards]), dim=1)

    def prepare_refit_info(self, plan):
        assert [spec.name for spec in plan.tensors] == ["table"]

    def finish_generation(self):
        super().finish_generation()
        ray.get([shard.discard_weights.remote() for shard in self.shards])

    def shutdown(self):
        for shard in self.shards:
            ray.kill(shard)


def start(policy_config, cluster, bundles_by_engine, in_flight):
    assert in_flight is None
    (ranks,) = bundles_by_engine
    return ShardedGeneration(cluster, ranks)


ENGINE = EngineSpec(lambda policy_config, cluster: policy_config["generation"]["num_shards"], start)
