import ast
import contextlib
import gzip
import json
import sys
from dataclasses import dataclass

import pytest
import ray
import torch
from support import weight_loader
from support.toy_group import ApartCluster, pids_of, processes, toy_batch, toy_group
from support.weight_loader import take

from nemo_offload_rl.data.batch import BatchedData
from nemo_offload_rl.metrics.timer import ProfileOptions
from nemo_offload_rl.refit import TRANSPORTS, make_transport
from nemo_offload_rl.refit.checksum import tensor_checksum
from nemo_offload_rl.refit.export import WeightExport
from nemo_offload_rl.refit.interface import RefitSender
from nemo_offload_rl.refit.plan import TensorSpec
from nemo_offload_rl.storage.disk import DiskFullError
from nemo_offload_rl.storage.manifest import FileSum, Manifest

pytestmark = pytest.mark.slow

# The actors cannot import this module, so Ray pickles its classes by value.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


def double(value):
    return 2 * value


@pytest.fixture(scope="module", params=[lambda cluster: cluster, ApartCluster], ids=["one node", "two nodes"])
def cluster(request, ray_cluster):
    return request.param(ray_cluster)


@pytest.fixture(scope="module")
def group(cluster):
    with toy_group(cluster) as group:
        yield group


@pytest.fixture(scope="module")
def tensor_parallel_group(cluster, group):
    del group  # both fit side by side: each uses half of a bundle
    with toy_group(cluster, tp=2) as group:
        yield group


def test_one_rank_checks_the_model(ray_cluster, group, caplog):
    del group  # both fit side by side
    with caplog.at_level("INFO"), toy_group(ray_cluster, checks_model=True) as checked:
        checked.wait_until_ready()
    assert caplog.text.count("The model was not checked against transformers: policy.skip_model_check") == 1


def test_state_returns_once_what_it_waits_for_has_ended_and_before_the_next_verb(group):
    group.start_return([ray.put("generation is asleep")], logprobs=False)
    report = group.train(toy_batch(8), double, gbs=4, mbs=1)
    assert report == {"rows": [0, 1, 4, 5], "loss": 2.0, "gbs": 4, "mbs": 1, "rank": 0}
    # Memory is that of the fullest rank; what a rank is built of is left out of garbage collections.
    assert group.memory_stats().items() >= {"returned": 1, "host_rss_gib": 1.0, "is_collected": 0}.items()


def test_only_the_chosen_ranks_leave_a_profile(group, tmp_path):
    options = ProfileOptions(steps=(1, 1), ranks=(1,), trace=True, memory=False, nvtx=False)
    group.start_profile(options, str(tmp_path / "profile" / "step_1"))
    group.train(toy_batch(8), double, gbs=4, mbs=1)
    group.stop_profile()
    group.get_logprobs(toy_batch(8), mbs=1)
    [path] = (tmp_path / "profile").iterdir()
    assert path.name == "step_1_rank_1.json.gz"
    with gzip.open(path) as file:
        names = {event["name"] for event in json.load(file)["traceEvents"]}
    assert "train" in names
    assert "get_logprobs" not in names


def test_ranks_of_a_tensor_parallel_group_get_the_same_shard(tensor_parallel_group):
    assert [ranks["dp_rank"] for ranks in tensor_parallel_group.parallel_ranks] == [0, 0]
    assert tensor_parallel_group.train(toy_batch(4), double, gbs=4, mbs=1)["rows"] == [0, 1, 2, 3]
    logprobs = tensor_parallel_group.get_logprobs(toy_batch(5), mbs=2)
    assert logprobs["rank"] == [0] * 5


def test_logprobs_of_any_number_of_rows_come_back_in_order(group):
    for num_rows in (1, 2, 5, 8):
        result = group.get_logprobs(toy_batch(num_rows), mbs=2)
        assert result["logprobs"].tolist() == [[float(row)] * 3 for row in range(num_rows)]
        assert result["rank"] == sorted(result["rank"])
    assert set(result["rank"]) == {0, 1}


@pytest.mark.parametrize("verb", ["get_logprobs", "get_reference_policy_logprobs"])
def test_log_prob_verbs_send_only_the_columns_that_they_read(group, monkeypatch, verb):
    sent = []
    put = ray.put
    monkeypatch.setattr(ray, "put", lambda wires: sent.extend(wires) or put(wires))
    batch = toy_batch(8)
    batch["advantages"] = torch.zeros(8, 1000)
    getattr(group, verb)(batch, mbs=2)
    tensors = [array for wire in sent for array, _ in wire.tensors.values()]
    assert sum(array.nbytes for array in tensors) == 8 * 8 * (3 + 1)  # tokens and lengths, int64


def test_evaluate_counts_no_row_twice(group):
    assert group.evaluate(toy_batch(5), double, mbs=2) == {"samples": 3, "rows": [0, 1, 2, 0], "mbs": 2}


def test_a_wrong_batch_leaves_the_group_usable(group):
    with pytest.raises(ValueError, match=r"not a multiple of policy\.train_global_batch_size"):
        group.train(toy_batch(7), double, gbs=4, mbs=1)
    batch = BatchedData(row=torch.arange(4))
    calls = {
        "train": lambda: group.train(batch, double, gbs=4, mbs=1),
        "evaluate": lambda: group.evaluate(batch, double, mbs=2),
        "A log-prob pass": lambda: group.get_logprobs(batch, mbs=2),
    }
    for name, call in calls.items():
        with pytest.raises(ValueError, match=f"{name} .*input_ids"):
            call()
    assert group.memory_stats()["host_rss_gib"] == 1.0


def test_each_rank_has_its_environment_and_arguments(group, tmp_path):
    group.save_checkpoint(str(tmp_path), True)
    texts = [(tmp_path / str(rank)).read_text() for rank in range(2)]
    seen = [ast.literal_eval(text[: text.rindex("}") + 1]) for text in texts]
    variables = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "NVTE_CPU_OFFLOAD_V1": "1", "TOY_VARIABLE": "from the recipe"}
    for rank, arguments in enumerate(seen):
        wanted = {"rank": rank, "world_size": 2, "seed": 7, "init_reference_model": True}
        assert wanted.items() <= arguments.items()
        environment = arguments["environment"]
        assert (variables | {"RANK": str(rank)}).items() <= environment.items()
        assert arguments["address"] == f"{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}"
    assert seen[0]["address"] == seen[1]["address"]


def test_a_checkpoint_beside_the_run_is_written_when_every_rank_has_written(group):
    group.start_checkpoint("somewhere", True)
    assert group.train(toy_batch(8), double, gbs=4, mbs=1)["loss"] == 2.0
    assert [group.is_checkpoint_written() for _ in range(3)] == [False, True, True]
    assert group.finish_checkpoint() == {"somewhere of rank 0": None}
    group.start_checkpoint("a full disk", True)
    with pytest.raises(DiskFullError, match="a full disk cannot be written"):
        group.finish_checkpoint()
    assert group.memory_stats()["host_rss_gib"] == 1.0


def test_ranks_go_on_where_none_of_them_finds_space(group):
    pids = pids_of(group)
    with pytest.raises(DiskFullError, match=r"a full disk cannot be written: .*\(20 bytes needed, 10 bytes free\)"):
        group.save_checkpoint("a full disk", True)
    assert group.memory_stats()["host_rss_gib"] == 1.0
    assert pids_of(group) == pids


def test_each_file_of_a_checkpoint_is_looked_at_by_one_rank(group, tensor_parallel_group):
    files = Manifest({f"file_{rank}": FileSum(0, "", rank) for rank in (0, 1, 2, None)})
    for ranks in (group, tensor_parallel_group):
        lines = ranks.find_damage("step_1", files)
        assert lines == [f"file_{file} of step_1, as rank {rank} sees it" for file, rank in ((0, 0), (2, 0), (1, 1))]


def test_moves_are_those_of_the_slowest_rank(group, tensor_parallel_group):
    for ranks in (group, tensor_parallel_group):  # ranks that hold no results of their own count, too
        assert ranks.residency_metrics() == {"train/optimizer_state/copy_s": 2.0, "train/optimizer_state/gb_per_s": 3.0}


@pytest.fixture(scope="module")
def receivers(ray_cluster):
    receivers = [weight_loader.start(rank) for rank in range(2)]
    yield receivers
    for receiver in receivers:
        ray.kill(receiver.actor)


def sums(found):
    return {name: tensor_checksum(tensor) for name, tensor in found["weights"].items()}


@pytest.mark.parametrize(("name", "num_buckets"), [("object_store", 3), ("cuda_ipc", 5)])  # of half the size
def test_weights_go_through_the_group_to_every_receiver(group, receivers, name, num_buckets):
    plan = group.prepare_refit_info(make_transport(name, receivers, verify=True))
    assert plan.tensors == tuple(TensorSpec(f"w{index}", (2, 2), torch.float32) for index in range(5))
    checksums = group.send_weights()
    assert len(checksums) == 5
    for found in map(take, receivers):
        assert found["num_loads"] == num_buckets
        assert sums(found) == checksums
        assert found["weights"]["w3"].tolist() == [[3.0, 3.0], [3.0, 3.0]]
    group.prepare_refit_info(make_transport(name, receivers, verify=False))
    assert group.send_weights() == {}
    assert [len(take(receiver)["weights"]) for receiver in receivers] == [5, 5]


@dataclass
class NeighbourBucket:
    origin: tuple[int, int]
    weights: list

    @contextlib.contextmanager
    def opened(self):
        yield self.weights


class NeighbourTransport:
    """Sends everything at once from each rank to the engine that shares its bundle."""

    def __init__(self, receivers, *, verify):
        self.receivers = receivers

    def connect(self, plan, *, rank, bucket_bytes):
        (receiver,) = (receiver for receiver in self.receivers if rank in receiver.ranks)
        return NeighbourSender(plan, rank, receiver)


class NeighbourSender(RefitSender):
    def __init__(self, plan, rank, receiver):
        (self.layout,) = plan.buckets(plan.num_bytes)
        self.buffer = torch.empty(self.layout.num_bytes, dtype=torch.uint8)  # one buffer for all refits
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
    origins = set()
    for _ in range(2):
        sent = group.send_weights()
        for rank, found in enumerate(map(take, receivers)):
            assert [TensorSpec.of(*named) for named in found["weights"].items()] == list(plan.tensors)
            assert sums(found) == sent
            assert [of_rank for of_rank, _ in found["origins"]] == [rank]
            origins |= found["origins"]
    assert len(origins) == 2  # both refits used one buffer a rank


def test_a_refit_before_its_plan_is_refused():
    with pytest.raises(RuntimeError, match="call prepare_refit_info before send_weights"):
        WeightExport(list, rank=0, bucket_bytes=1).send()


def test_a_world_that_does_not_divide_is_refused_before_anything_starts(ray_cluster):
    before = processes()
    with pytest.raises(ValueError, match="world size 2"):
        toy_group(ray_cluster, tp=3)
    assert processes() <= before


def test_what_ranks_log_is_logged_here(group, caplog):
    group.residency_metrics()
    found = [(record.name, record.levelname, record.getMessage()) for record in caplog.records]
    for rank in range(2):
        assert ("nemo_offload_rl.toy", "WARNING", f"rank {rank}: page-locking failed for params") in found
