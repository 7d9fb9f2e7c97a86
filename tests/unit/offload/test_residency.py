import pytest

from nemo_offload_rl.offload.residency import Residency
from nemo_offload_rl.offload.types import DEFAULT_TABLE, Cell, Phase, Target


class Shelf:
    """A target that notes where it was told to go, and what it costs."""

    def __init__(self, log, target, cells):
        self.log, self.target, self.cells = log, target, frozenset(cells)

    def move(self, cell):
        self.log.append((self.target, cell))
        return 10 if cell in (Cell.GPU, Cell.HOST) else 0


def make(table=DEFAULT_TABLE):
    log = []
    targets = {
        Target.PARAMS: Shelf(log, Target.PARAMS, {Cell.GPU, Cell.HOST}),
        Target.GRADS: Shelf(log, Target.GRADS, {Cell.GPU, Cell.DROPPED}),
    }
    return Residency(targets, table), log


def test_only_what_differs_moves():
    residency, log = make()
    assert residency.enter(Phase.TRAIN).moved == {}
    assert residency.enter(Phase.LOGPROB).moved == {Target.GRADS: (Cell.GPU, Cell.DROPPED)}
    assert residency.enter(Phase.REFIT).moved == {}
    transition = residency.enter(Phase.GENERATE)
    assert transition.moved == {Target.PARAMS: (Cell.GPU, Cell.HOST)}
    assert transition.bytes == 10
    assert log == [(Target.GRADS, Cell.DROPPED), (Target.PARAMS, Cell.HOST)]
    assert residency.where(Target.PARAMS) is Cell.HOST


def test_entering_a_phase_twice_is_entering_it_once():
    residency, log = make()
    residency.enter(Phase.GENERATE)
    before = list(log)
    assert residency.enter(Phase.GENERATE).moved == {}
    assert log == before


def test_what_leaves_goes_before_what_comes_back():
    table = {phase: dict(cells) for phase, cells in DEFAULT_TABLE.items()}
    table[Phase.REFIT][Target.PARAMS] = Cell.HOST
    table[Phase.REFIT][Target.GRADS] = Cell.GPU
    table[Phase.LOGPROB] = {Target.PARAMS: Cell.GPU, Target.GRADS: Cell.DROPPED}
    residency, log = make(table)
    residency.enter(Phase.LOGPROB)
    log.clear()
    residency.enter(Phase.REFIT)
    assert log == [(Target.PARAMS, Cell.HOST), (Target.GRADS, Cell.GPU)]


def test_keep_leaves_a_target_wherever_it_is():
    table = {phase: dict(cells) for phase, cells in DEFAULT_TABLE.items()}
    table[Phase.LOGPROB][Target.GRADS] = Cell.KEEP
    residency, log = make(table)
    residency.enter(Phase.LOGPROB)
    assert log == []
    residency.enter(Phase.REFIT)
    residency.enter(Phase.LOGPROB)
    assert residency.where(Target.GRADS) is Cell.DROPPED


def test_a_move_that_fails_is_not_believed():
    residency, _ = make()

    class Broken(Shelf):
        def move(self, cell):
            raise MemoryError("no room")

    residency._targets[Target.PARAMS] = Broken([], Target.PARAMS, {Cell.GPU, Cell.HOST})
    with pytest.raises(MemoryError):
        residency.enter(Phase.GENERATE)
    assert residency.where(Target.PARAMS) is Cell.GPU


def test_a_table_that_cannot_be_is_refused():
    table = {phase: dict(cells) for phase, cells in DEFAULT_TABLE.items()}
    table[Phase.GENERATE][Target.GRADS] = Cell.HOST
    with pytest.raises(ValueError, match="grads cannot be host in phase generate; it can be dropped, gpu, keep"):
        make(table)
    del table[Phase.GENERATE][Target.GRADS]
    with pytest.raises(ValueError, match="no cell for grads in phase generate"):
        make(table)
