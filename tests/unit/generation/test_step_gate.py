"""Tests when a generation holds for new weights."""

import threading
from functools import partial

import pytest

from nemo_offload_rl.generation.step_gate import StepGate

LIMIT_S = 20


def started(function) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def join(threads):
    for one in threads:
        one.join(LIMIT_S)
        assert not one.is_alive()


def wait_for_hold(gate):
    with gate._changed:
        assert gate._changed.wait_for(lambda: gate._is_holding, LIMIT_S)


def test_weights_come_between_two_steps_of_a_generation():
    gate, log, is_stepping, may_end = StepGate(), [], threading.Event(), threading.Event()

    def generate():
        with gate.generating():
            log.append("step")
            is_stepping.set()
            assert may_end.wait(LIMIT_S)
            while not gate.between_steps():
                log.append("step")
            log.append("step with new weights")

    def update():
        gate.hold()
        log.append("weights")
        gate.release()

    threads = [started(generate)]
    assert is_stepping.wait(LIMIT_S)
    threads.append(started(update))
    threads[1].join(0.05)
    assert log == ["step"]  # which is under way
    may_end.set()
    join(threads)
    assert log == ["step", "weights", "step with new weights"]


def test_no_generation_begins_while_weights_come():
    gate, log = StepGate(), []
    gate.hold()  # none is under way: at once

    def generate():
        with gate.generating():
            log.append("generates")

    thread = started(generate)
    thread.join(0.05)
    log.append("weights")
    gate.release()
    join([thread])
    assert log == ["weights", "generates"]
    gate.release()  # a wake-up without new weights
    assert gate.num_updates == 1


def test_weights_that_follow_at_once_wait_for_the_next_step():
    gate, log = StepGate(), []
    gate.hold()

    def generate():
        with gate.generating():
            log.append("step")
            while gate.num_updates < 2:
                gate.between_steps()

    def update_again():
        with gate._changed:  # the generation has no chance to wake up before the next weights wait for it
            gate.release()
            gate.hold()
            log.append("weights")
        gate.release()

    thread = started(generate)
    wait_for_hold(gate)
    join([started(update_again), thread])
    assert log == ["step", "weights"]


class Ranks:
    """Two ranks of a replica, each with a gate, that generate in step until they have made three with new weights."""

    def __init__(self) -> None:
        self.barrier, self._wanted = threading.Barrier(2), [False, False]
        self.gates = [StepGate(partial(self._agree, rank)) for rank in range(2)]
        self.weights, self.computed, self.has_stepped = [0, 0], [[], []], threading.Event()

    def _agree(self, rank, wanted):
        self._wanted[rank] = wanted
        self.barrier.wait(LIMIT_S)
        agreed = any(self._wanted)
        self.barrier.wait(LIMIT_S)
        return agreed

    def generate(self, rank):
        with self.gates[rank].generating():
            while sum(self.computed[rank]) < 3:
                self.gates[rank].between_steps()
                self.computed[rank].append(self.weights[rank])
                self.has_stepped.set()
                self.barrier.wait(LIMIT_S)  # the collectives of a step

    def bring_weights(self):
        for rank, gate in enumerate(self.gates):
            self.weights[rank] = 1
            gate.release()


def test_all_ranks_hold_at_the_same_step():
    ranks = Ranks()
    threads = [started(partial(ranks.generate, rank)) for rank in range(2)]
    assert ranks.has_stepped.wait(LIMIT_S)
    join([started(gate.hold) for gate in reversed(ranks.gates)])
    ranks.bring_weights()
    join(threads)
    assert ranks.computed[0] == ranks.computed[1] and ranks.computed[0][0] == 0


@pytest.mark.parametrize("early", [0, 1])
def test_a_rank_whose_hold_came_before_the_generation_holds_the_others(early):
    ranks = Ranks()
    ranks.gates[early].hold()  # no generation is under way there: at once
    threads = [started(partial(ranks.generate, rank)) for rank in range(2)]
    wait_for_hold(ranks.gates[1 - early])  # which knows of no weights
    join([started(ranks.gates[1 - early].hold)])
    ranks.bring_weights()
    join(threads)
    assert ranks.computed == [[1, 1, 1]] * 2


def test_a_generation_that_fails_lets_weights_come():
    gate = StepGate()
    with pytest.raises(ValueError, match="failed"), gate.generating():
        raise ValueError("failed")
    gate.hold()
    gate.release()
