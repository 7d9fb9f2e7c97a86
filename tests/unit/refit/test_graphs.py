"""Refits that are recorded and replayed: CUDA graphs on a GPU; on a CPU, recorded operations stand for them."""

import gc
import itertools
import logging
from unittest import mock

import pytest
import ray
import torch
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


EXCHANGED = "tensor parallelism of 2"
REPLAYS_EXCHANGES = {"record_collectives": True, "max_pool_bytes": GIB}


@pytest.fixture
def device():
    return "cpu"


def refit(engine, sender, weights, num_refits=1):
    """Refits with weights that change before each refit, and checks what arrives."""
    for _ in range(num_refits):
        weights.step()
        weights.num_exports = 0
        sender.send(weights)
        num_exports = weights.num_exports
        found = look(engine)
        assert found["sums"] == weights.sums()
    return found | {"num_exports": num_exports}


@pytest.fixture
def engine(engine_process, device):
    ray.get(engine_process.start.remote(device))
    return engine_process


@pytest.fixture
def make_sender(engine, device):
    made = []

    def make(receivers=None, bucket_bytes=1000, verify=False, recorder=None, exchanged="", refused=(), **arguments):
        """Returns weights, the recorder of their exports, and a sender of them."""
        weights, recorder = Weights(device, exchanged=exchanged, refused=refused), recorder or Counting(device)
        receivers, layouts = receivers or [Receiver(engine, (0,))], ExportPlan.of(weights).buckets(bucket_bytes)
        made.append(
            GraphSender(
                layouts, min(2, len(layouts)), receivers, CudaIpcSender(layouts, receivers, verify=verify),
                verify=verify, make_recorder=lambda: recorder, device=torch.device(device),
                **{"min_gain_s": -100.0} | arguments,
            )
        )  # fmt: skip
        return weights, recorder, made[-1]

    yield make
    for sender in made:
        sender.close()
    assert (look(engine)["num_senders"], num_open_buffers()) == (0, 0)


@on_each_device
@pytest.mark.parametrize(("bucket_bytes", "num_buckets"), [(1000, 1), (300, 3)])
def test_later_refits_run_no_python_and_bring_their_weights(engine, make_sender, device, bucket_bytes, num_buckets):
    weights, recorder, sender = make_sender(bucket_bytes=bucket_bytes)
    assert sender.send(weights) == {}
    first = look(engine)
    assert first["sums"] == weights.sums()
    assert (recorder.num_recordings, first["num_recordings"]) == (num_buckets, num_buckets)
    if device == "cpu":  # memory is there in a refit alone: the kernel has given new pages
        slots = [slot for of_bucket in sender._buckets._slots for slot in of_bucket]
        assert [slot.float().abs().sum().item() for slot in slots] == [0] * 5
    for _ in range(3):
        found = refit(engine, sender, weights)
        assert (found["num_exports"], found["num_copied"], found["num_recordings"]) == (0, 0, num_buckets)
    assert (sender.metrics["graphs"], sender.metrics["load_s"]) == (1, 0.25 * num_buckets)
    assert sender.metrics["graph_pool_gib"] > 0
    times = {name: sender.metrics[name] for name in ("export_s", "first_kernel_to_loaded_s", "send_s")}
    assert 0 < times["export_s"] < times["first_kernel_to_loaded_s"] < times["send_s"]


@on_each_device
def test_a_changed_address_has_the_export_recorded_anew_at_once_or_when_there_is_memory(engine, make_sender, device):
    weights, recorder, sender = make_sender()
    for number in range(4):
        if number in (1, 3):
            weights.tensors[0] = weights.tensors[0].clone()
        if number == 3:
            full = mock.Mock(side_effect=OutOfGpuMemoryError("full"))
            with mock.patch.object(sender._buckets, "mapped", full), pytest.raises(OutOfGpuMemoryError):
                sender.send(weights)
        refit(engine, sender, weights)
        assert recorder.num_recordings == (1, 2, 2, 3)[number]
    assert sender.metrics["graphs"] == 1


@on_each_device
def test_addresses_that_never_stay_have_exports_driven_from_python(engine, make_sender, device, caplog):
    weights, recorder, sender = make_sender()
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
def test_an_engine_whose_parameters_move_records_its_loads_anew(engine, make_sender, device):
    weights, _, sender = make_sender()
    sender.send(weights)
    look(engine, "first")
    found = refit(engine, sender, weights)
    assert (found["num_recordings"], found["num_copied"]) == (2, 5 * 2)  # the second time to record


@on_each_device
@pytest.mark.parametrize("first", [True, False])
def test_an_export_that_cannot_be_recorded_is_driven_from_python(engine, make_sender, device, caplog, first):
    weights, _, sender = make_sender()
    with caplog.at_level(logging.INFO):
        for number in range(4):
            weights.reads_a_number = first or number
            weights.tensors[0] = weights.tensors[0].clone() if number == 1 else weights.tensors[0]
            refit(engine, sender, weights)
            assert sender.metrics["graphs"] == float(number == 0 and not first)
    assert caplog.text.count("driven from Python, not replayed from CUDA graphs: aten._local_scalar_dense") == 1


@on_each_device
def test_what_ranks_exchange_is_driven_from_python_and_its_loads_are_replayed(engine, make_sender, device, caplog):
    weights, recorder, sender = make_sender(exchanged=EXCHANGED)
    with caplog.at_level(logging.INFO):
        for number in range(3):
            found = refit(engine, sender, weights)
            assert (found["num_exports"], found["num_recordings"]) == (1, 1)
            assert (found["num_copied"], sender.metrics["graphs"]) == (0 if number else 5 * 2, 0)
    assert caplog.text.count("replayed from CUDA graphs: ranks exchange parts of the weights in an export (tensor") == 1
    assert (recorder.num_recordings, weights.answers) == (0, [])


@on_each_device
@pytest.mark.parametrize(("refused", "num_recordings"), [((), 1), ((4,), 2)])
def test_ranks_that_exchange_weights_replay_them_if_all_say_so(engine, make_sender, device, refused, num_recordings):
    weights, recorder, sender = make_sender(exchanged=EXCHANGED, refused=refused, **REPLAYS_EXCHANGES)
    for number in range(3):
        refit(engine, sender, weights)
        assert sender.metrics["graphs"] == 1
        # It may be recorded, was recorded, gains enough; then, in each refit, no address has changed on any rank.
        assert weights.answers == [True] * (3 + number + (1 if refused and number else 0))
    assert recorder.num_recordings == num_recordings


REFUSALS = [
    (1, GIB, 0, [True], "another rank cannot record it"),
    (2, GIB, 1, [True, True], "another rank cannot record it"),
    (3, GIB, 1, [True, True, True], "a replay saves too little on another rank"),
    (0, 1, 1, [True, False], "of policy.refit_buffer_size_gb."),  # which keeps too much memory here
]


@on_each_device
@pytest.mark.parametrize(("refused", "max_pool_bytes", "num_recordings", "answers", "log"), REFUSALS)
def test_a_rank_drives_exports_from_python_if_another_one_does(
    engine, make_sender, device, caplog, refused, max_pool_bytes, num_recordings, answers, log
):
    pool = {"max_pool_bytes": max_pool_bytes}
    weights, recorder, sender = make_sender(exchanged=EXCHANGED, refused=(refused,), record_collectives=True, **pool)
    with caplog.at_level(logging.INFO):
        refit(engine, sender, weights, 2)
    assert sender.metrics["graphs"] == 0
    assert (recorder.num_recordings, recorder.pool_bytes) == (num_recordings, 0)
    assert weights.answers == answers  # and no questions after
    assert caplog.text.count(log) == 1


@on_each_device
@pytest.mark.parametrize(("options", "answers"), [({}, []), (REPLAYS_EXCHANGES, [False])])  # it tells the other ranks
def test_an_engine_that_cannot_open_fixed_buckets_gets_others(engine, make_sender, device, caplog, options, answers):
    ray.get(engine.start.remote(device, opens_fixed=False))
    weights, _, sender = make_sender(exchanged=EXCHANGED, **options)
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            assert refit(engine, sender, weights)["num_exports"] == 1  # as often as on the other ranks
    assert caplog.text.count("streamed, not replayed from CUDA graphs: this memory cannot be opened.\n") == 1
    assert weights.answers == answers


@on_each_device
@pytest.mark.parametrize("exchanged", ["", EXCHANGED])
def test_a_refit_without_memory_for_buckets_is_streamed_and_tried_again(engine, make_sender, device, caplog, exchanged):
    """Other ranks of an exchange drive theirs from Python by then: an export is drawn as often on each, unasked."""
    weights, recorder, sender = make_sender(exchanged=exchanged, **(REPLAYS_EXCHANGES if exchanged else {}))
    for number in range(4):
        full = mock.Mock(side_effect=OutOfGpuMemoryError("the GPU is full"))
        with mock.patch.object(graphs, "FixedBuckets", full if number < 2 else graphs.FixedBuckets):
            found = refit(engine, sender, weights)
        assert sender.metrics["graphs"] == float(number >= 2 and not exchanged)
        assert found["num_exports"] == 1 or not exchanged
    warned = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert ["the GPU is full" in message for message in warned] == [True, True]
    assert (weights.answers, recorder.num_recordings) == (([False], 0) if exchanged else ([], 1))
    assert found["num_senders"] == 1  # whose loads are replayed


@on_cpu
@pytest.mark.parametrize(("registers", "is_asked"), [("0", True), ("1", False), (None, False)])
def test_exchanges_are_recorded_only_where_nccl_registers_no_memory_of_graphs(engine, monkeypatch, registers, is_asked):
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", registers or "")
    if registers is None:
        monkeypatch.delenv("NCCL_GRAPH_REGISTER")
    weights = Weights("cpu", exchanged=EXCHANGED, refused=(1,))
    transport = CudaIpcTransport([Receiver(engine, (0,))], verify=False)
    sender = transport.connect(ExportPlan.of(weights), rank=0, bucket_bytes=1000)
    sender.send(weights)
    sender.close()
    assert weights.answers == [True] * is_asked


@on_each_device
def test_engines_forget_buckets_that_another_engine_cannot_open(ray_cluster, engine, make_sender, device):
    other = start_engine(ray_cluster)
    ray.get(other.start.remote(device, opens_fixed=False))
    weights, _, sender = make_sender(receivers=[Receiver(engine, (0,)), Receiver(other, (0,))])
    for _ in range(2):
        weights.step()
        sender.send(weights)
        assert look(engine)["sums"] == look(other)["sums"] == weights.sums()
        assert look(engine)["num_senders"] == num_open_buffers() == 0
    ray.kill(other)


@on_each_device
def test_an_exports_graphs_that_gain_too_little_are_given_back(engine, make_sender, device, caplog):
    # Both ways read the clock as often, and each reading is 1 ms after the one before.
    weights, recorder, sender = make_sender(min_gain_s=0.005, clock=itertools.count(0, 0.001).__next__)
    with caplog.at_level(logging.INFO):
        sender.send(weights)
    assert "a replay takes 5.0 ms instead of 5.0 ms, and must save at least 5 ms" in caplog.text
    assert (recorder.num_recordings, recorder.pool_bytes) == (1, 0)
    look(engine)
    assert refit(engine, sender, weights)["num_copied"] == 0  # its loads are replayed all the same
    assert sender.metrics["graphs"] == 0


@on_each_device
@pytest.mark.parametrize(("bucket_bytes", "named"), [(1000, "s whole to scalar"), (300, " whole")])
def test_a_load_that_fails_once_graphs_are_taken_is_named(engine, make_sender, device, bucket_bytes, named):
    weights, _, sender = make_sender(bucket_bytes=bucket_bytes)
    sender.send(weights)
    ray.get(engine.start.remote(device, opens_fixed=False))
    match = f"failed at a generation engine with the weight{named}: SharedBufferError: this memory cannot be opened"
    with pytest.raises(RuntimeError, match=match):
        sender.send(weights)


@on_each_device
def test_an_engine_that_dies_once_graphs_are_taken_is_named_with_the_weights(ray_cluster, make_sender, device):
    doomed = start_engine(ray_cluster)
    ray.get(doomed.start.remote(device))
    weights, _, sender = make_sender(receivers=[Receiver(doomed, (0,), "engine 3")])
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
    def record(self, work):
        replay = super().record(work)
        replay.__self__.steps.pop()
        return replay


@on_each_device
def test_checksums_are_those_of_an_export_and_not_of_what_a_graph_has_made(engine, make_sender, device):
    weights, _, sender = make_sender(verify=True)
    for _ in range(3):
        weights.step()
        assert sender.send(weights) == weights.sums() == look(engine)["sums"]


@on_cpu
def test_a_graph_that_exports_anything_else_is_found(engine, make_sender, device):
    weights, _, sender = make_sender(verify=True, recorder=ForgetfulRecorder())
    sender.send(weights)
    weights.step()
    sent, received = sender.send(weights), look(engine)["sums"]
    assert [name for name in sent if sent[name] != received[name]] == ["scalar"]


def test_a_bucket_that_an_engine_has_never_had_is_refused(engine):
    bucket = fixed_buckets.FixedBucket("a sender", 3, 0, HostRangeHandle(None), True)
    with pytest.raises(SharedBufferError, match="Bucket 3 of a refit was sent by its number only, but this engine"):
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


@pytest.mark.parametrize("reads_a_number", [True, False])
def test_a_load_is_replayed_unless_it_cannot_be_recorded(monkeypatch, caplog, reads_a_number):
    monkeypatch.setattr(recorded_loads, "why_not_recorded", lambda tensors: "")
    parameter, tensors, calls = torch.zeros(3), fixed(torch.ones(3)), []
    loads = RecordedLoads([parameter], OpsRecorder)

    def load():
        calls.append(1)
        value = tensors[0][1][0].item() if reads_a_number else tensors[0][1]
        parameter.copy_(torch.as_tensor(value))
        return frozenset({"a", "b"})

    for value in (1.0, 2.0, 3.0):
        tensors[0][1].fill_(value)
        assert loads.load(tensors, load) == {"a", "b"}
        assert parameter.tolist() == [value] * 3
    assert len(calls) == (4 if reads_a_number else 2)  # one of them was recorded
    message = "The engine loads weights without CUDA graphs: aten._local_scalar_dense waits"
    assert caplog.text.count(message) == reads_a_number


def test_nothing_is_recorded_without_a_gpu():
    loads = RecordedLoads([torch.zeros(3)], lambda: pytest.fail("there is nothing to record with"))
    assert loads.load(fixed(torch.ones(3)), lambda: None) is None
    assert loads.memory_stats == {}
