"""Refits that are recorded and replayed: CUDA graphs on a GPU; on a CPU, recorded operations stand for them."""

import gc
import itertools
import logging

import pytest
import ray
import torch
from support import recorded_ops
from support.actors import kill_and_wait
from support.recorded_ops import OpsRecorder
from support.refit_sides import Counting, Weights, look, start_engine
from support.shared_memory import num_open_buffers

from nemo_offload_rl.generation import recorded_loads
from nemo_offload_rl.generation.recorded_loads import RecordedLoads
from nemo_offload_rl.memory.gpu_range import OutOfGpuMemoryError
from nemo_offload_rl.memory.shared_buffer import SharedBufferError
from nemo_offload_rl.memory.shared_range import HostRangeHandle
from nemo_offload_rl.memory.units import GIB
from nemo_offload_rl.refit import fixed_buckets, graphs
from nemo_offload_rl.refit.cuda_ipc import CudaIpcSender, CudaIpcTransport
from nemo_offload_rl.refit.fixed_buckets import FixedTensors
from nemo_offload_rl.refit.graphs import GraphSender
from nemo_offload_rl.refit.interface import Receiver
from nemo_offload_rl.refit.loads import EngineLostError
from nemo_offload_rl.refit.plan import ExportPlan
from nemo_offload_rl.refit.recorder import CaptureError

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="is for machines without a GPU")
on_one_gpu = pytest.mark.skipif(torch.cuda.device_count() > 1, reason="the engine must be on the GPU of this process")
on_each_device = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=on_cpu), pytest.param("cuda", marks=[pytest.mark.gpu, on_one_gpu])]
)


@pytest.fixture(scope="module")
def engine_process(ray_cluster):
    actor = start_engine(ray_cluster)
    yield actor
    ray.kill(actor)


@pytest.fixture
def device():
    return "cpu"


@pytest.fixture
def engine(engine_process, device):
    ray.get(engine_process.start.remote(device))
    return engine_process


@pytest.fixture
def make_sender(engine, device):
    made = []

    def make(
        weights, *, receivers=None, bucket_bytes=1000, verify=False, recorder=None, min_gain_s=-100.0, **arguments
    ):
        receivers, recorder = receivers or [Receiver(engine, (0,))], recorder or Counting(device)
        layouts = ExportPlan.of(weights).buckets(bucket_bytes)
        made.append(
            GraphSender(
                layouts,
                min(2, len(layouts)),
                receivers,
                CudaIpcSender(layouts, receivers, verify=verify),
                verify=verify,
                make_recorder=lambda: recorder,
                device=torch.device(device),
                min_gain_s=min_gain_s,
                **arguments,
            )
        )
        return made[-1]

    yield make
    for sender in made:
        sender.close()
    assert (look(engine)["num_senders"], num_open_buffers()) == (0, 0)


@on_each_device
@pytest.mark.parametrize(("bucket_bytes", "num_buckets"), [(1000, 1), (300, 3)])
def test_later_refits_run_no_python_and_bring_the_weights_of_then(
    engine, make_sender, device, bucket_bytes, num_buckets
):
    weights, recorder = Weights(device), Counting(device)
    sender = make_sender(weights, bucket_bytes=bucket_bytes, recorder=recorder)
    assert sender.send(weights) == {}
    first = look(engine)
    assert first["sums"] == weights.sums()
    assert (recorder.num_recordings, first["num_recordings"]) == (num_buckets, num_buckets)
    for _ in range(3):
        weights.step()
        weights.num_exports = 0
        sender.send(weights)
        assert weights.num_exports == 0
        found = look(engine)
        assert found["sums"] == weights.sums()
        assert found["num_copied"] == 0
        assert found["num_recordings"] == num_buckets
    assert sender.metrics["graphs"] == 1
    assert sender.metrics["load_s"] == 0.25 * num_buckets
    assert sender.metrics["graph_pool_gib"] > 0
    times = {name: sender.metrics[name] for name in ("export_s", "first_kernel_to_loaded_s", "send_s")}
    assert 0 < times["export_s"] < times["first_kernel_to_loaded_s"] < times["send_s"]


@on_cpu
def test_memory_is_there_in_a_refit_alone(engine, make_sender, device):
    weights = Weights(device)
    sender = make_sender(weights, bucket_bytes=300)
    sender.send(weights)
    slots = [slot for of_bucket in sender._buckets._slots for slot in of_bucket]
    assert [slot.float().abs().sum().item() for slot in slots] == [0] * 5  # the kernel has given new pages
    sender.send(weights)
    assert look(engine)["sums"] == weights.sums()


@on_each_device
def test_a_changed_address_has_the_export_recorded_anew(engine, make_sender, device):
    weights, recorder = Weights(device), Counting(device)
    sender = make_sender(weights, recorder=recorder)
    for number in range(4):
        if number in (1, 3):
            weights.tensors[0] = weights.tensors[0].clone()
        weights.step()
        sender.send(weights)
        assert look(engine)["sums"] == weights.sums()
        assert recorder.num_recordings == (1, 2, 2, 3)[number]


@on_each_device
def test_addresses_that_never_stay_have_exports_driven_from_python(engine, make_sender, device, caplog):
    weights, recorder = Weights(device), Counting(device)
    sender = make_sender(weights, recorder=recorder)
    with caplog.at_level(logging.INFO):
        for _ in range(4):
            weights.tensors[1] = weights.tensors[1] + 1
            sender.send(weights)
            assert look(engine)["sums"] == weights.sums()
    assert recorder.num_recordings == 2
    assert "driven from Python, not replayed from CUDA graphs: the weights' addresses change in each r" in caplog.text
    assert sender.metrics["graphs"] == 0
    assert look(engine)["num_recordings"] == 1  # its loads are replayed all the same


@on_each_device
def test_a_recording_that_found_no_memory_is_made_again(engine, make_sender, device, monkeypatch):
    weights, recorder = Weights(device), Counting(device)
    sender = make_sender(weights, recorder=recorder)
    sender.send(weights)
    weights.tensors[0] = weights.tensors[0].clone()
    with monkeypatch.context() as patch:
        patch.setattr(sender._buckets, "mapped", full_gpu)
        with pytest.raises(OutOfGpuMemoryError):
            sender.send(weights)
    weights.step()
    sender.send(weights)
    assert look(engine)["sums"] == weights.sums()
    assert (sender.metrics["graphs"], recorder.num_recordings) == (1, 2)


def full_gpu():
    raise OutOfGpuMemoryError("the GPU has no memory for the buckets")


@on_each_device
def test_an_engine_whose_parameters_move_records_its_loads_anew(engine, make_sender, device):
    weights = Weights(device)
    sender = make_sender(weights)
    sender.send(weights)
    look(engine, "first")
    weights.step()
    sender.send(weights)
    found = look(engine)
    assert found["sums"] == weights.sums()
    assert (found["num_recordings"], found["num_copied"]) == (2, 5 * 2)  # the second time to record


@on_each_device
@pytest.mark.parametrize("first", [True, False])
def test_an_export_that_cannot_be_recorded_is_driven_from_python_and_said_once(
    engine, make_sender, device, caplog, first
):
    weights = Weights(device)
    sender = make_sender(weights)
    with caplog.at_level(logging.INFO):
        for number in range(4):
            weights.reads_a_number = first or number
            weights.tensors[0] = weights.tensors[0].clone() if number == 1 else weights.tensors[0]
            weights.step()
            sender.send(weights)
            assert look(engine)["sums"] == weights.sums()
            assert sender.metrics["graphs"] == float(number == 0 and not first)
    assert caplog.text.count("driven from Python, not replayed from CUDA graphs: aten._local_scalar_dense") == 1


@on_each_device
def test_what_ranks_exchange_is_driven_from_python_and_its_loads_are_replayed(engine, make_sender, device, caplog):
    weights, recorder = Weights(device, exchanged="tensor parallelism of 2"), Counting(device)
    sender = make_sender(weights, recorder=recorder)
    with caplog.at_level(logging.INFO):
        for number in range(3):
            weights.step()
            sender.send(weights)
            assert weights.num_exports == 1 + 2 * number + 1  # the plan's, and one of each refit and of each sums()
            found = look(engine)
            assert found["sums"] == weights.sums()
            assert (found["num_recordings"], found["num_copied"]) == (1, 0 if number else 5 * 2)
            assert sender.metrics["graphs"] == 0
    assert caplog.text.count("replayed from CUDA graphs: ranks exchange parts of the weights in an export (tensor") == 1
    assert (recorder.num_recordings, weights.answers) == (0, [])


@on_each_device
def test_ranks_that_exchange_weights_replay_them_if_all_say_so(engine, make_sender, device):
    weights = Weights(device, exchanged="tensor parallelism of 2")
    sender = make_sender(weights, record_collectives=True, max_pool_bytes=GIB)
    for number in range(3):
        weights.step()
        sender.send(weights)
        assert sender.metrics["graphs"] == 1
        assert look(engine)["sums"] == weights.sums()
        # It may be recorded, was recorded, gains enough; then, in each refit, no address has changed.
        assert weights.answers == [True] * (3 + number)


def drive_twice(engine, sender, weights):
    """Two refits, after which the export is driven from Python."""
    for _ in range(2):
        weights.step()
        sender.send(weights)
        assert look(engine)["sums"] == weights.sums()
    assert sender.metrics["graphs"] == 0


@on_each_device
@pytest.mark.parametrize(
    ("refused", "num_recordings", "log"),
    [
        (1, 0, "another rank cannot record it"),
        (2, 1, "another rank cannot record it"),
        (3, 1, "a replay saves too little on another rank"),
    ],
)
def test_a_rank_drives_exports_from_python_if_another_one_does(
    engine, make_sender, device, caplog, refused, num_recordings, log
):
    weights, recorder = Weights(device, exchanged="tensor parallelism of 2", refused=(refused,)), Counting(device)
    sender = make_sender(weights, recorder=recorder, record_collectives=True, max_pool_bytes=GIB)
    with caplog.at_level(logging.INFO):
        drive_twice(engine, sender, weights)
    assert (recorder.num_recordings, recorder.pool_bytes) == (num_recordings, 0)
    assert weights.answers == [True] * refused  # and no questions after
    assert caplog.text.count(log) == 1


@on_each_device
def test_graphs_of_exchanged_weights_that_keep_too_much_memory_are_not_used(engine, make_sender, device, caplog):
    weights, recorder = Weights(device, exchanged="tensor parallelism of 2"), Counting(device)
    sender = make_sender(weights, recorder=recorder, record_collectives=True, max_pool_bytes=1)
    with caplog.at_level(logging.INFO):
        drive_twice(engine, sender, weights)
    assert (recorder.num_recordings, recorder.pool_bytes) == (1, 0)
    assert weights.answers == [True, False]
    assert caplog.text.count("of policy.refit_buffer_size_gb.") == 1


@on_each_device
def test_a_rank_records_its_export_again_if_another_rank_does(engine, make_sender, device):
    weights, recorder = Weights(device, exchanged="tensor parallelism of 2", refused=(4,)), Counting(device)
    sender = make_sender(weights, recorder=recorder, record_collectives=True, max_pool_bytes=GIB)
    for _ in range(3):
        weights.step()
        sender.send(weights)
        assert sender.metrics["graphs"] == 1
        assert look(engine)["sums"] == weights.sums()
    assert recorder.num_recordings == 2
    assert weights.answers == [True] * 6


@on_each_device
def test_a_rank_whose_buckets_do_not_stay_tells_the_others(engine, make_sender, device):
    ray.get(engine.start.remote(device, opens_fixed=False))
    weights = Weights(device, exchanged="tensor parallelism of 2")
    sender = make_sender(weights, record_collectives=True, max_pool_bytes=GIB)
    for _ in range(2):
        sender.send(weights)
        assert look(engine)["sums"] == weights.sums()
    assert weights.answers == [False]


@on_each_device
def test_an_engine_that_cannot_open_buckets_that_stay_gets_others(engine, make_sender, device, caplog):
    ray.get(engine.start.remote(device, opens_fixed=False))
    weights = Weights(device, exchanged="tensor parallelism of 2")
    sender = make_sender(weights)
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            weights.step()
            weights.num_exports = 0
            sender.send(weights)
            assert weights.num_exports == 1  # as often as on the other ranks
            assert look(engine)["sums"] == weights.sums()
    assert caplog.text.count("streamed, not replayed from CUDA graphs: this memory cannot be opened.\n") == 1


def register_no_buckets(monkeypatch):
    def full(*_):
        raise OutOfGpuMemoryError("the GPU is full")

    monkeypatch.setattr(graphs, "FixedBuckets", full)


@on_each_device
def test_a_refit_whose_buckets_find_no_memory_is_streamed_and_the_next_one_tries_again(
    engine, make_sender, device, monkeypatch, caplog
):
    weights, recorder = Weights(device), Counting(device)
    sender = make_sender(weights, recorder=recorder)
    for number in range(4):
        weights.step()
        with monkeypatch.context() as patch:
            if number < 2:
                register_no_buckets(patch)
            sender.send(weights)
        assert look(engine)["sums"] == weights.sums()
        assert sender.metrics["graphs"] == float(number >= 2)
    warned = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert len(warned) == 2
    assert all("the GPU is full" in message for message in warned)
    assert recorder.num_recordings == 1


@on_each_device
def test_a_rank_that_found_no_memory_asks_the_others_nothing_when_it_tries_again(
    engine, make_sender, device, monkeypatch
):
    """They drive their exports from Python by then; an export is drawn as often on each rank."""
    weights, recorder = Weights(device, exchanged="tensor parallelism of 2"), Counting(device)
    sender = make_sender(weights, recorder=recorder, record_collectives=True, max_pool_bytes=GIB)
    for number in range(4):
        weights.step()
        weights.num_exports = 0
        with monkeypatch.context() as patch:
            if number < 2:
                register_no_buckets(patch)
            sender.send(weights)
        assert weights.num_exports == 1
        assert look(engine)["sums"] == weights.sums()
    assert (weights.answers, recorder.num_recordings) == ([False], 0)
    assert look(engine)["num_senders"] == 1  # whose loads are replayed


@on_cpu
@pytest.mark.parametrize(("registers", "is_asked"), [("0", True), ("1", False), (None, False)])
def test_what_ranks_exchange_is_recorded_only_where_nccl_registers_no_graphs_memory(
    engine, monkeypatch, registers, is_asked
):
    if registers is None:
        monkeypatch.delenv("NCCL_GRAPH_REGISTER", raising=False)
    else:
        monkeypatch.setenv("NCCL_GRAPH_REGISTER", registers)
    weights = Weights("cpu", exchanged="tensor parallelism of 2", refused=(1,))
    transport = CudaIpcTransport([Receiver(engine, (0,))], verify=False)
    sender = transport.connect(ExportPlan.of(weights), rank=0, bucket_bytes=1000)
    sender.send(weights)
    sender.close()
    assert weights.answers == [True] * is_asked


@on_each_device
def test_engines_forget_buckets_that_another_engine_cannot_open(ray_cluster, engine, make_sender, device):
    other = start_engine(ray_cluster)
    ray.get(other.start.remote(device, opens_fixed=False))
    weights = Weights(device)
    sender = make_sender(weights, receivers=[Receiver(engine, (0,)), Receiver(other, (0,))])
    for _ in range(2):
        weights.step()
        sender.send(weights)
        assert look(engine)["sums"] == look(other)["sums"] == weights.sums()
        assert look(engine)["num_senders"] == num_open_buffers() == 0
    ray.kill(other)


@on_each_device
def test_an_exports_graphs_that_gain_too_little_are_given_back(engine, make_sender, device, caplog):
    weights, recorder = Weights(device), Counting(device)
    # Both ways read the clock as often, and each reading is 1 ms after the one before.
    sender = make_sender(weights, recorder=recorder, min_gain_s=0.005, clock=itertools.count(0, 0.001).__next__)
    with caplog.at_level(logging.INFO):
        sender.send(weights)
    assert "a replay takes 5.0 ms instead of 5.0 ms, and must save at least 5 ms" in caplog.text
    assert (recorder.num_recordings, recorder.pool_bytes) == (1, 0)
    for _ in range(2):
        assert look(engine)["sums"] == weights.sums()
        weights.step()
        sender.send(weights)
        assert sender.metrics["graphs"] == 0
    assert look(engine)["num_copied"] == 0  # its loads are replayed all the same


@on_each_device
@pytest.mark.parametrize(("bucket_bytes", "named"), [(1000, "s whole to scalar"), (300, " whole")])
def test_a_load_that_fails_once_graphs_are_taken_names_the_engine_and_the_weights(
    engine, make_sender, device, bucket_bytes, named
):
    weights = Weights(device)
    sender = make_sender(weights, bucket_bytes=bucket_bytes)
    sender.send(weights)
    ray.get(engine.start.remote(device, opens_fixed=False))
    match = f"failed at a generation engine with the weight{named}: SharedBufferError: this memory cannot be opened"
    with pytest.raises(RuntimeError, match=match):
        sender.send(weights)


@on_each_device
def test_an_engine_that_dies_once_graphs_are_taken_is_named_with_the_weights(ray_cluster, make_sender, device):
    doomed = start_engine(ray_cluster)
    ray.get(doomed.start.remote(device))
    weights = Weights(device)
    sender = make_sender(weights, receivers=[Receiver(doomed, (0,), "engine 3")])
    sender.send(weights)
    assert sender.metrics["graphs"] == 1
    kill_and_wait(doomed)
    with pytest.raises(EngineLostError, match="has lost engine 3 with the weights whole to scalar: its process or its"):
        sender.send(weights)
    with pytest.raises(EngineLostError, match="has lost engine 3: its process or its node has ended"):
        sender.close()
    gc.collect()  # the first error's frames hold the replay
    assert num_open_buffers() == 0


class ForgetfulRecorder(OpsRecorder):
    """Leaves out the last operation."""

    def record(self, work):
        replay = super().record(work)
        replay.__self__.steps.pop()
        return replay


@on_each_device
def test_checksums_are_those_of_an_export_and_not_of_what_a_graph_has_made(engine, make_sender, device):
    weights = Weights(device)
    sender = make_sender(weights, verify=True)
    for _ in range(3):
        weights.step()
        assert sender.send(weights) == weights.sums() == look(engine)["sums"]


@on_cpu
def test_a_graph_that_exports_anything_else_is_found(engine, make_sender, device):
    weights = Weights(device)
    sender = make_sender(weights, verify=True, recorder=ForgetfulRecorder())
    sender.send(weights)
    weights.step()
    sent, received = sender.send(weights), look(engine)["sums"]
    assert [name for name in sent if sent[name] != received[name]] == ["scalar"]


def test_a_bucket_that_an_engine_has_never_had_is_refused(engine):
    bucket = fixed_buckets.FixedBucket("a sender", 3, 0, HostRangeHandle(None), True)
    with pytest.raises(
        SharedBufferError, match="Bucket 3 of a refit was sent by its number only, but this engine has ne"
    ):
        ray.get(engine.load_weights.remote(bucket))


class Mapped:
    """Stands for a buffer in the engine's process: counts whether its memory is mapped."""

    def __init__(self, *, opens=True):
        self.tensor, self.is_mapped, self.opens = torch.zeros(64, dtype=torch.uint8), False, opens

    def make_peer(self):
        return self

    def map(self, handle):
        if not self.opens:
            raise SharedBufferError("this memory cannot be opened")
        self.is_mapped = True

    def unmap(self):
        self.is_mapped = False

    def close(self):
        pass


def test_a_buffer_that_cannot_be_mapped_leaves_no_other_one_mapped(monkeypatch):
    layouts = ExportPlan.of((f"w{number}", torch.zeros(4)) for number in range(4)).buckets(16)
    good, bad = Mapped(), Mapped(opens=False)
    monkeypatch.setitem(fixed_buckets._SENDERS, "a sender", fixed_buckets._Sender(layouts))
    with fixed_buckets.FixedBucket("a sender", 0, 0, good, False).opened() as tensors:
        assert tensors[0][0] == "w0"
    assert good.is_mapped  # for the bucket after the next
    bucket = fixed_buckets.FixedBucket("a sender", 1, 1, bad, False)
    with pytest.raises(SharedBufferError, match="cannot be opened"), bucket.opened():
        pytest.fail("it cannot be opened")
    assert not good.is_mapped


def fixed(*tensors):
    return FixedTensors(tuple((str(number), tensor) for number, tensor in enumerate(tensors)))


def test_a_load_that_cannot_be_recorded_is_driven_from_python(monkeypatch, caplog):
    monkeypatch.setattr(recorded_loads, "why_not_recorded", lambda tensors: "")
    parameter, tensors = torch.zeros(3), fixed(torch.ones(3))
    loads = RecordedLoads([parameter], OpsRecorder)

    def load():
        parameter.fill_(tensors[0][1][0].item())
        return frozenset({"0"})

    for value in (1.0, 2.0):
        tensors[0][1].fill_(value)
        assert loads.load(tensors, load) == {"0"}
        assert parameter.tolist() == [value] * 3
    assert caplog.text.count("The engine loads weights without CUDA graphs: aten._local_scalar_dense waits") == 1


def test_replayed_loads_fill_the_parameters_that_the_recorded_one_did(monkeypatch):
    monkeypatch.setattr(recorded_loads, "why_not_recorded", lambda tensors: "")
    parameters, tensors = [torch.zeros(3)], fixed(torch.ones(3))
    loads = RecordedLoads(parameters, OpsRecorder)
    calls = []

    def load():
        calls.append(1)
        parameters[0].copy_(tensors[0][1])
        return frozenset({"a", "b"})

    for value in (1.0, 2.0):
        tensors[0][1].fill_(value)
        assert loads.load(tensors, load) == {"a", "b"}
        assert parameters[0].tolist() == [value] * 3
    assert len(calls) == 2  # one of them was recorded


def test_nothing_is_recorded_without_a_gpu():
    with pytest.raises(CaptureError, match="never"):
        recorded_ops.OpsRecorder().record(raise_capture_error)
    loads = RecordedLoads([torch.zeros(3)], lambda: pytest.fail("there is nothing to record with"))
    assert loads.load(fixed(torch.ones(3)), lambda: None) is None
    assert loads.memory_stats == {}


def raise_capture_error():
    raise CaptureError("never")
