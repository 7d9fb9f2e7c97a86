"""Tests the state machine alone, with targets that only record where they were moved."""

import dataclasses

import pytest
import torch

from nemo_offload_rl.residency.metrics import MemoryNow, Meter, Started
from nemo_offload_rl.residency.residency import Residency
from nemo_offload_rl.residency.table import DEFAULT_TABLE, Phase, Placement, Target
from nemo_offload_rl.residency.target import NoRoomError, ResidencyError


class Arrived:
    nbytes = 10
    is_queued = True
    has_failed = False

    def __init__(self, log=None, target=None):
        self.log, self.target = log, target

    def wait(self):
        self.log.append((self.target, "waited for"))

    def wait_on_current_stream(self):
        self.log.append((self.target, "held for"))

    def copy_seconds(self):
        return 1.0

    def exposed_seconds(self):
        return 0.25


class Shelf:
    """Records where the target is moved; `full` names the placements without room."""

    nbytes = mapped_bytes = 10

    def __init__(self, log, target):
        self.log, self.target, self.full = log, target, set()
        self.placements = {Placement.GPU, Placement.DROPPED if target is Target.GRADS else Placement.HOST}
        self.lazy_wait = target is Target.OPTIMIZER_STATE

    def start(self, placement):
        if placement in self.full:
            raise MemoryError("no shelf left")
        self.log.append((self.target, placement))
        return Arrived(self.log, self.target)

    def name_for_error(self, error):
        return "book 7"


def make(*entered, **overrides):
    """Returns the state machine in the last of the phases entered, its targets, and a log of what they do next."""
    table = {phase: DEFAULT_TABLE[phase] | overrides.get(phase, {}) for phase in Phase}
    log = []
    targets = {target: Shelf(log, target) for target in (Target.PARAMS, Target.GRADS, Target.OPTIMIZER_STATE)}
    residency = Residency(targets, table)
    for phase in entered:
        residency.enter(phase)
    log.clear()
    return residency, targets, log


def moves(log):
    done = [entry for entry in log if isinstance(entry[1], Placement)]
    log.clear()
    return done


def test_only_what_differs_moves():
    residency, _, log = make()
    for phase, *moved in (
        (Phase.TRAIN,),
        (Phase.LOGPROB, (Target.GRADS, Placement.DROPPED)),
        (Phase.REFIT, (Target.OPTIMIZER_STATE, Placement.HOST)),
        (Phase.GENERATE, (Target.PARAMS, Placement.HOST)),
        (Phase.LOGPROB, (Target.PARAMS, Placement.GPU)),  # targets to be kept stay on the host
    ):
        residency.enter(phase)
        assert moves(log) == moved
        assert all(residency.where(target) is placement for target, placement in moved)
    assert residency.where(Target.OPTIMIZER_STATE) is Placement.HOST


def test_what_leaves_goes_before_what_comes_back():
    residency, _, log = make(Phase.LOGPROB, refit={Target.PARAMS: Placement.HOST, Target.GRADS: Placement.GPU})
    residency.enter(Phase.REFIT)
    leave = [(target, Placement.HOST) for target in (Target.PARAMS, Target.OPTIMIZER_STATE)]
    assert moves(log) == [*leave, (Target.GRADS, Placement.GPU)]


def test_what_leaves_is_waited_for_where_the_gpu_is_handed_over():
    residency, _, log = make(Phase.TRAIN)
    residency.enter(Phase.REFIT)
    assert (Target.OPTIMIZER_STATE, "waited for") not in log
    residency.enter(Phase.GENERATE)
    assert (Target.OPTIMIZER_STATE, "waited for") in log
    assert (Target.PARAMS, "waited for") in log


def test_prefetch_brings_what_the_next_phase_needs_and_does_not_wait():
    residency, _, log = make(Phase.GENERATE, Phase.LOGPROB)
    residency.prefetch(Phase.TRAIN)
    assert moves(log) == [(Target.OPTIMIZER_STATE, Placement.GPU)]  # gradients have no contents to move
    residency.enter(Phase.TRAIN)
    assert moves(log) == [(Target.GRADS, Placement.GPU)]


def test_a_table_without_a_cell_is_refused():
    table = {phase: {Target.PARAMS: Placement.GPU} for phase in (Phase.TRAIN, Phase.LOGPROB, Phase.REFIT)}
    with pytest.raises(ValueError, match="no placement for params in phase generate"):
        Residency({Target.PARAMS: Shelf([], Target.PARAMS)}, table)


def test_an_error_of_cuda_is_said_and_not_repaired():
    residency, targets, log = make()

    def broken(placement):
        raise RuntimeError("CUDA error: an illegal memory access was encountered.")

    targets[Target.OPTIMIZER_STATE].start = broken
    with pytest.raises(ResidencyError, match=r"Cannot move optimizer_state off the GPU .* illegal .* cannot continue"):
        residency.enter(Phase.REFIT)
    assert moves(log) == []


def test_single_targets_are_placed_and_the_next_phase_moves_what_differs():
    residency, _, log = make()
    residency.place({Target.OPTIMIZER_STATE: Placement.HOST, Target.GRADS: Placement.UNCHANGED})
    assert moves(log) == [(Target.OPTIMIZER_STATE, Placement.HOST)]
    residency.place({Target.OPTIMIZER_STATE: Placement.HOST})
    assert moves(log) == []
    residency.place({Target.GRADS: Placement.DROPPED, Target.OPTIMIZER_STATE: Placement.GPU})
    assert moves(log) == [(Target.OPTIMIZER_STATE, Placement.GPU), (Target.GRADS, Placement.DROPPED)]
    residency.place({Target.PARAMS: Placement.HOST})
    log.clear()
    residency.enter(Phase.TRAIN)
    assert moves(log) == [(Target.PARAMS, Placement.GPU), (Target.GRADS, Placement.GPU)]


@pytest.mark.parametrize("by_place", [False, True])
def test_what_returns_is_waited_for_at_once_or_when_it_is_required_if_it_waits_itself(by_place):
    residency, _, log = make()
    places = {Target.PARAMS: Placement.HOST, Target.OPTIMIZER_STATE: Placement.HOST}
    residency.place(places) if by_place else residency.enter(Phase.GENERATE)
    log.clear()
    residency.place(dict.fromkeys(places, Placement.GPU)) if by_place else residency.enter(Phase.TRAIN)
    assert (Target.PARAMS, "held for") in log
    assert (Target.OPTIMIZER_STATE, "held for") not in log
    residency.require(Target.OPTIMIZER_STATE)
    assert log[-1] == (Target.OPTIMIZER_STATE, "held for")


def test_a_placement_that_cannot_be_moves_nothing():
    residency, _, log = make()
    for target, message in (
        (Target.GRADS, "grads does not support placement host; it supports dropped, gpu, keep"),
        (Target.REFERENCE_WEIGHTS, "Cannot place reference_weights: there is no such target"),
    ):
        with pytest.raises(ValueError, match=message):
            residency.place({Target.PARAMS: Placement.HOST, target: Placement.HOST})
        assert moves(log) == []


@pytest.mark.parametrize("leaves_early", [False, True])
@pytest.mark.parametrize("is_taken_back", [False, True])
def test_host_memory_that_is_read_is_waited_for_before_it_is_written_again(leaves_early, is_taken_back):
    residency, _, log = make(Phase.GENERATE)
    residency.lend(Target.OPTIMIZER_STATE, lambda: log.append("the reader has done"))
    residency.enter(Phase.TRAIN)  # moves back, which only reads the lent memory
    if is_taken_back:
        residency.take_back(Target.OPTIMIZER_STATE)
        residency.take_back(Target.OPTIMIZER_STATE)  # nothing is lent any more
    if leaves_early:
        residency.start_leaving(Phase.REFIT)
        assert ((Target.OPTIMIZER_STATE, Placement.HOST) in log) == is_taken_back
    assert "the reader has done" not in log
    residency.enter(Phase.REFIT)
    if not is_taken_back:
        assert log.index("the reader has done") < log.index((Target.OPTIMIZER_STATE, Placement.HOST))
    residency.enter(Phase.TRAIN)
    residency.enter(Phase.REFIT)
    assert log.count("the reader has done") == (not is_taken_back)


def test_what_a_phase_sends_away_may_leave_before_it_and_the_phase_finds_it_gone():
    residency, _, log = make(Phase.TRAIN)
    residency.start_leaving(Phase.REFIT)
    assert log == [(Target.GRADS, Placement.DROPPED), (Target.OPTIMIZER_STATE, Placement.HOST)]  # without a wait
    assert residency.phase is Phase.TRAIN
    log.clear()
    residency.enter(Phase.REFIT)
    assert moves(log) == []
    residency.enter(Phase.TRAIN)
    assert moves(log) == [(Target.GRADS, Placement.GPU), (Target.OPTIMIZER_STATE, Placement.GPU)]


def test_what_finds_no_room_early_leaves_with_the_phase_whose_error_names_it():
    residency, targets, log = make()
    targets[Target.OPTIMIZER_STATE].full.add(Placement.HOST)
    residency.start_leaving(Phase.REFIT)
    assert residency.where(Target.OPTIMIZER_STATE) is Placement.GPU
    with pytest.raises(NoRoomError, match=r"Cannot move optimizer_state off the GPU for phase refit: .* book 7"):
        residency.enter(Phase.REFIT)
    targets[Target.OPTIMIZER_STATE].full.clear()
    residency.enter(Phase.REFIT)
    assert (Target.OPTIMIZER_STATE, Placement.HOST) in log


def test_targets_that_are_not_asked_for_are_not_waited_for():
    residency, _, log = make(Phase.REFIT)
    residency.wait_until_released(without=(Target.OPTIMIZER_STATE,))
    assert log == [(Target.GRADS, "waited for")]
    residency.wait_until_released()
    assert (Target.OPTIMIZER_STATE, "waited for") in log


def test_dropped_memory_is_taken_early_where_asked_and_before_what_is_copied():
    residency, _, log = make(Phase.GENERATE)
    residency.prefetch(Phase.TRAIN, with_dropped=True)
    assert moves(log) == [(target, Placement.GPU) for target in (Target.PARAMS, Target.GRADS, Target.OPTIMIZER_STATE)]
    residency.enter(Phase.TRAIN)
    assert (Target.GRADS, "held for") in log
    assert moves(log) == []


class MeterOfAGpu(Meter):
    """Counts how often the cache is given back, and says how many bytes are free."""

    def __init__(self, free=None):
        super().__init__(torch.device("cpu"))
        self.free, self.num_given_back = free, 0

    def give_back_cache(self):
        self.num_given_back += 1

    def memory(self):
        return dataclasses.replace(super().memory(), gpu_free=self.free)


def test_the_cache_is_given_back_before_copies_leave_early_and_not_once_more_while_they_run():
    _, targets, log = make()
    meter = MeterOfAGpu()
    residency = Residency(targets, DEFAULT_TABLE, meter=meter)
    residency.enter(Phase.TRAIN)
    residency.start_leaving(Phase.REFIT)
    residency.enter(Phase.REFIT)
    assert meter.num_given_back == 1
    residency.enter(Phase.GENERATE)
    assert meter.num_given_back == 2
    residency.enter(Phase.TRAIN)
    residency.enter(Phase.REFIT)
    assert meter.num_given_back == 3
    log.clear()
    residency.enter(Phase.GENERATE, wait=False)
    assert meter.num_given_back == 3
    assert (Target.PARAMS, Placement.HOST) in log
    assert "waited for" not in [what for _, what in log]


@pytest.mark.parametrize(("free", "num_given_back"), [(100, 0), (99, 2), (None, 2)])
def test_the_cache_stays_where_the_generator_finds_enough_free(free, num_given_back):
    _, targets, _ = make()
    meter = MeterOfAGpu(free)
    residency = Residency(targets, DEFAULT_TABLE, meter=meter, generator_bytes=100)
    residency.enter(Phase.TRAIN)
    residency.start_leaving(Phase.REFIT)
    residency.enter(Phase.REFIT)
    residency.enter(Phase.GENERATE)
    assert meter.num_given_back == num_given_back


def test_the_seconds_of_all_entries_of_a_phase_are_added_up():
    """So are the seconds of its moves: a validation enters the phase once more before the metrics are taken."""
    meter = MeterOfAGpu(free=2**30)
    meter.record_transition(Phase.LOGPROB, 0.5, meter.memory(), {})
    meter.record_transition(Phase.TRAIN, 0.0625, meter.memory(), {})
    meter.free = 3 * 2**30
    meter.record_transition(Phase.LOGPROB, 0.25, meter.memory(), {})
    metrics = meter.take_metrics()
    assert metrics["logprob/enter_s"] == pytest.approx(0.75)
    assert metrics["train/enter_s"] == pytest.approx(0.0625)
    assert metrics["logprob/gpu_free_before_gib"] == 3  # memory is the last entry's
    assert "logprob/enter_s" not in meter.take_metrics()


class EndsMeanwhile(Arrived):
    """Represents a move that the helper thread ends right after it was first asked for."""

    num_asked = 0

    @property
    def is_queued(self):
        self.num_asked += 1
        return self.num_asked > 1


def test_a_move_that_ends_while_records_are_taken_is_in_the_next_ones():
    meter = Meter(torch.device("cpu"))
    started = Started(Phase.REFIT, Target.OPTIMIZER_STATE, Placement.GPU, Placement.HOST, EndsMeanwhile())
    meter.record_start(started)
    assert meter.take_records() == []
    assert [record.nbytes for record in meter.take_records()] == [10]
    assert meter.take_records() == []


def test_what_is_left_on_the_gpu_is_itemised_and_adds_up_to_what_the_driver_counts():
    memory = MemoryNow(1, 1, gpu_allocated=2, gpu_reserved=7, gpu_ranges=30, gpu_free=50, gpu_total=100)
    left = {name: gib * 2**30 for name, gib in memory.left({Target.PARAMS: 20, Target.GRADS: 10}).items()}
    assert left == {
        "left_params_gib": 20, "left_grads_gib": 10, "left_tensors_gib": 2, "left_cache_gib": 5, "left_others_gib": 13,
    }  # fmt: skip
    assert sum(left.values()) == memory.gpu_total - memory.gpu_free
    assert MemoryNow(1, 1).left({Target.PARAMS: 20}) == {}
