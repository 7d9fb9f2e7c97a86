import ast
import os
import sys
import time
import traceback
from dataclasses import dataclass

import psutil
import pytest
import ray
import torch

from nemo_offload_rl.data.batch import BatchedData
from nemo_offload_rl.refit import TRANSPORTS, make_transport
from nemo_offload_rl.refit.checksum import tensor_checksum
from nemo_offload_rl.refit.export import WeightExport
from nemo_offload_rl.refit.interface import Receiver
from nemo_offload_rl.refit.plan import TensorSpec
from nemo_offload_rl.run.failure_summary import add_failure_summary
from nemo_offload_rl.storage.checksum import FileSum
from nemo_offload_rl.storage.disk import DiskFullError
from nemo_offload_rl.storage.manifest import Manifest
from nemo_offload_rl.worker.actor import free_port
from nemo_offload_rl.worker.group import PolicyWorkerGroup, WorkerError

SIZES = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": 1,
    "sequence_parallel": False,
    "env_vars": {"TOY_VARIABLE": "from the recipe"},
}
TOY_WORKER = "tests.unit.worker.toy_worker:ToyWorker"  # Ray's processes have the working folder on their path

# The actors cannot import this module; what is defined in it travels whole.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


def _group(cluster, *, tp=1, **toy):
    config = {"megatron_cfg": SIZES | {"tensor_model_parallel_size": tp}, "toy": toy}
    return PolicyWorkerGroup(config, cluster, seed=7, init_reference_model=True, worker_cls=TOY_WORKER)


def _batch(num_rows):
    return BatchedData(row=torch.arange(num_rows), sample_mask=torch.ones(num_rows))


def double(value):
    return 2 * value


@pytest.fixture(scope="module")
def group(ray_cluster):
    with _group(ray_cluster) as group:
        yield group


@pytest.fixture(scope="module")
def tensor_parallel_group(ray_cluster, group):
    del group  # both fit side by side: each takes half of a bundle
    with _group(ray_cluster, tp=2) as group:
        yield group


def test_training_shards_reach_their_ranks(group):
    report = group.train(_batch(8), double, gbs=4, mbs=1)
    assert report == {"rows": [0, 1, 4, 5], "loss": 2.0, "gbs": 4, "mbs": 1, "rank": 0}


def test_ranks_of_a_tensor_parallel_group_get_the_same_shard(tensor_parallel_group):
    assert [ranks["dp_rank"] for ranks in tensor_parallel_group.parallel_ranks] == [0, 0]
    assert tensor_parallel_group.train(_batch(4), double, gbs=4, mbs=1)["rows"] == [0, 1, 2, 3]
    logprobs = tensor_parallel_group.get_logprobs(_batch(5), mbs=2)
    assert logprobs["rank"] == [0] * 5


def test_logprobs_of_any_number_of_rows_come_back_in_order(group):
    for num_rows in (1, 2, 5, 8):
        result = group.get_logprobs(_batch(num_rows), mbs=2)
        assert result["logprobs"].tolist() == [[float(row)] * 3 for row in range(num_rows)]
        assert result["rank"] == sorted(result["rank"])
    assert set(result["rank"]) == {0, 1}


def test_evaluate_counts_no_row_twice(group):
    assert group.evaluate(_batch(5), double, mbs=2) == {"samples": 3, "rows": [0, 1, 2, 0], "mbs": 2}
    with pytest.raises(ValueError, match="needs the column sample_mask, found row"):
        group.evaluate(BatchedData(row=torch.arange(2)), double, mbs=2)


def test_sizes_that_do_not_divide_leave_the_group_usable(group):
    with pytest.raises(ValueError, match=r"not a multiple of policy\.train_global_batch_size"):
        group.train(_batch(7), double, gbs=4, mbs=1)
    assert group.memory_stats()["host_rss_gib"] == 1.0


def test_each_rank_has_its_environment_and_arguments(group, tmp_path):
    group.save_checkpoint(str(tmp_path), True)
    texts = [(tmp_path / str(rank)).read_text() for rank in range(2)]
    seen = [ast.literal_eval(text[: text.rindex("}") + 1]) for text in texts]
    for rank, arguments in enumerate(seen):
        assert arguments["rank"] == rank
        assert arguments["world_size"] == 2
        assert arguments["seed"] == 7
        assert arguments["init_reference_model"] is True
        environment = arguments["environment"]
        assert environment["RANK"] == str(rank)
        assert environment["WORLD_SIZE"] == "2"
        assert environment["LOCAL_RANK"] == "0"
        assert environment["NVTE_CPU_OFFLOAD_V1"] == "1"
        assert environment["TOY_VARIABLE"] == "from the recipe"
        assert arguments["address"] == f"{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}"
    assert seen[0]["address"] == seen[1]["address"]


def test_ranks_go_on_where_none_of_them_finds_space(group):
    pids = _pids_of(group)
    with pytest.raises(DiskFullError, match=r"a full disk cannot be written: .*\(20 bytes needed, 10 bytes free\)"):
        group.save_checkpoint("a full disk", True)
    assert group.memory_stats()["host_rss_gib"] == 1.0
    assert _pids_of(group) == pids


def test_each_file_of_a_checkpoint_is_looked_at_by_one_rank(group, tensor_parallel_group):
    files = Manifest({f"file_{rank}": FileSum(0, "", rank) for rank in (0, 1, 2, None)})
    for ranks in (group, tensor_parallel_group):
        lines = ranks.find_damage("step_1", files)
        assert lines == [f"file_{file} of step_1, as rank {rank} sees it" for file, rank in ((0, 0), (2, 0), (1, 1))]


def test_memory_is_that_of_the_fullest_rank(group):
    assert group.memory_stats()["host_rss_gib"] == 1.0


def test_moves_are_those_of_the_slowest_rank(group, tensor_parallel_group):
    for ranks in (group, tensor_parallel_group):  # ranks that hold no results of their own count, too
        assert ranks.residency_metrics() == {
            "train/optimizer_state/copy_s": 2.0,
            "train/optimizer_state/gb_per_s": 3.0,
        }


def test_ports_come_from_the_range():
    low = free_port("127.0.0.1", None)
    assert free_port("127.0.0.1", (low, low + 50)) in range(low, low + 51)
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        taken = listener.getsockname()[1]
        with pytest.raises(ValueError, match=f"from {taken} to {taken} is free"):
            free_port("127.0.0.1", (taken, taken))


class Engine:
    """Keeps all weights in the order in which they come, and where their buckets say that they are from."""

    def __init__(self):
        self.weights, self.origins = [], []

    def load_weights(self, bucket):
        self.weights += ((name, tensor.clone()) for name, tensor in bucket.named_tensors())
        self.origins.append(getattr(bucket, "origin", None))

    def take(self):
        taken = self.weights, self.origins
        self.weights, self.origins = [], []
        return taken


@pytest.fixture(scope="module")
def receivers(ray_cluster):
    receivers = [Receiver(ray.remote(Engine).options(num_cpus=0).remote(), (rank,)) for rank in range(2)]
    yield receivers
    for receiver in receivers:
        ray.kill(receiver.actor)


def test_weights_go_through_the_group_to_every_receiver(group, receivers):
    group.prepare_refit_info(make_transport("object_store", receivers, verify=True))
    checksums = group.send_weights()
    assert len(checksums) == 5
    for weights, origins in ray.get([receiver.actor.take.remote() for receiver in receivers]):
        assert len(origins) == 3
        assert {name: tensor_checksum(tensor) for name, tensor in weights} == checksums
        assert dict(weights)["w3"].tolist() == [[3.0, 3.0], [3.0, 3.0]]
    group.prepare_refit_info(make_transport("object_store", receivers, verify=False))
    assert group.send_weights() == {}
    ray.get([receiver.actor.take.remote() for receiver in receivers])


@dataclass
class NeighbourBucket:
    origin: tuple[int, int]
    weights: list

    def named_tensors(self):
        return self.weights


class NeighbourTransport:
    """A transport by which each rank sends everything at once to the engine that shares its bundle."""

    def __init__(self, receivers, *, verify):
        self.receivers = receivers

    def connect(self, plan, *, rank, bucket_bytes):
        (receiver,) = (receiver for receiver in self.receivers if rank in receiver.ranks)
        return NeighbourSender(plan, rank, receiver)


class NeighbourSender:
    def __init__(self, plan, rank, receiver):
        (self.layout,) = plan.buckets(plan.num_bytes)
        self.buffer = torch.empty(self.layout.num_bytes, dtype=torch.uint8)  # for all refits
        self.rank, self.receiver = rank, receiver

    def send(self, weights):
        slots = self.layout.views(self.buffer)
        for (_, slot), (_, tensor) in zip(slots, weights, strict=True):
            slot.copy_(tensor)
        ray.get(self.receiver.load_weights(NeighbourBucket((self.rank, self.buffer.data_ptr()), slots)))
        return {name: tensor_checksum(slot) for name, slot in slots}


def test_by_a_registered_transport_each_rank_sends_to_its_own_engine_as_planned(group, receivers, monkeypatch):
    monkeypatch.setitem(TRANSPORTS, "neighbour", f"{__name__}:NeighbourTransport")
    plan = group.prepare_refit_info(make_transport("neighbour", receivers, verify=True))
    assert plan.tensors == tuple(TensorSpec(f"w{index}", (2, 2), torch.float32) for index in range(5))
    assert plan.num_bytes == 80
    first, second = (group.send_weights() for _ in range(2))
    assert first == second
    for rank, (weights, origins) in enumerate(ray.get([receiver.actor.take.remote() for receiver in receivers])):
        assert [TensorSpec.of(name, tensor) for name, tensor in weights] == 2 * list(plan.tensors)
        assert {name: tensor_checksum(tensor) for name, tensor in weights} == first
        assert [sender for sender, _ in origins] == [rank, rank]
        assert len({address for _, address in origins}) == 1  # one buffer for both refits


def test_a_refit_before_its_plan_is_refused():
    with pytest.raises(RuntimeError, match="call prepare_refit_info before send_weights"):
        WeightExport(list, rank=0, bucket_bytes=1).send()


def test_a_world_that_does_not_divide_is_refused_before_anything_starts(ray_cluster):
    before = _processes()
    with pytest.raises(ValueError, match="world size 2"):
        _group(ray_cluster, tp=3)
    assert _processes() == before


def _processes():
    return {process.pid for process in psutil.Process().children(recursive=True)}


def _pids_of(group):
    return {int(rank_pid) for _, rank_pid in ray.get(group._process_refs)}


@pytest.fixture
def fresh_group(ray_cluster, group, tensor_parallel_group):
    """A group that a test may break; the lasting ones are ended, as a bundle has room for two actors."""
    group.shutdown()
    tensor_parallel_group.shutdown()
    made = []

    def make(**toy):
        made.append(_group(ray_cluster, **toy))
        return made[-1]

    yield make
    for each in made:
        each.shutdown()


def test_what_ranks_log_is_logged_here(group, caplog):
    group.residency_metrics()
    found = [(record.name, record.levelname, record.getMessage()) for record in caplog.records]
    for rank in range(2):
        assert ("nemo_offload_rl.toy", "WARNING", f"rank {rank}: page-locking failed for params") in found


def test_an_error_names_rank_verb_and_cause_and_ends_the_others(fresh_group):
    group = fresh_group()
    group.wait_until_ready()
    pids = _pids_of(group)
    start = time.monotonic()
    with pytest.raises(
        WorkerError, match=r"Rank 1 failed in load_checkpoint: ValueError: the checkpoint is of"
    ) as caught:
        group.load_checkpoint("fail on rank 1, wait on rank 0")
    assert time.monotonic() - start < 30
    assert (caught.value.rank, caught.value.verb) == (1, "load_checkpoint")
    assert isinstance(caught.value.cause, ValueError)
    assert "in load_checkpoint" in str(caught.value)  # the traceback of the rank
    assert "toy_worker.py" in str(caught.value)
    assert "\x1b" not in str(caught.value)
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    with pytest.raises(WorkerError, match="the checkpoint is of another model"):
        group.get_logprobs(_batch(2), mbs=1)


def test_a_rank_whose_process_died_is_the_one_named(fresh_group):
    group = fresh_group()
    with pytest.raises(WorkerError, match="Rank 1 failed in load_checkpoint: ActorDiedError") as caught:
        group.load_checkpoint("die on rank 1, fail on rank 0")
    assert caught.value.rank == 1
    assert "Rank 0 failed too: ConnectionError: connection closed by peer" in str(caught.value)


@pytest.mark.parametrize(
    ("folder", "last_line"),
    [
        (
            "die on rank 1, fail on rank 0",
            "The run failed: rank 1 of the policy failed in load_checkpoint: its process ended without an error of its "
            "own: it was killed",
        ),
        (
            "fail on rank 1 for lack of GPU memory",
            "The run failed: rank 1 of the policy failed in load_checkpoint: OutOfMemoryError: CUDA out of memory. "
            "Tried to allocate 2.00 GiB. Lower policy.train_micro_batch_size",
        ),
    ],
)
def test_the_last_line_of_a_failed_run_is_the_cause_in_words(fresh_group, folder, last_line):
    with pytest.raises(WorkerError) as caught:
        fresh_group().load_checkpoint(folder)
    add_failure_summary(caught.value)
    assert "".join(traceback.format_exception(caught.value)).splitlines()[-1].startswith(last_line)


def test_an_exception_that_cannot_be_pickled_still_arrives(fresh_group):
    with pytest.raises(WorkerError, match="this and that") as caught:
        fresh_group().load_checkpoint("fail with what cannot travel")
    assert caught.value.verb == "load_checkpoint"


def test_a_rank_that_cannot_be_built_is_an_error_of_its_construction(fresh_group):
    group = fresh_group(fails_to_build=1)
    with pytest.raises(WorkerError, match="Rank 1 failed in its construction: ValueError: rank 1 has a bad recipe"):
        group.wait_until_ready()
    with pytest.raises(WorkerError, match="bad recipe"):
        group.memory_stats()


def test_shutdown_leaves_no_process(fresh_group, caplog):
    group = fresh_group(hangs_in_shutdown=True)
    group.wait_until_ready()
    pids = _pids_of(group)
    assert pids <= _processes()
    assert os.getpid() not in pids
    group.shutdown()
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    assert "will not go quietly" in caplog.text
    group.shutdown()  # a second one does nothing
    with pytest.raises(RuntimeError, match="have been shut down"):
        group.memory_stats()
