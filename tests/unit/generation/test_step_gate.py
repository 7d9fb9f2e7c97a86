"""Tests when a generation holds for new weights."""

import itertools
import threading

import pytest

from nemo_offload_rl.generation.step_gate import StepGate

LIMIT_S = 20


def started(function) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


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
    for thread in threads:
        thread.join(LIMIT_S)
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
    thread.join(LIMIT_S)
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
    with gate._changed:
        assert gate._changed.wait_for(lambda: gate._is_holding, LIMIT_S)
    again = started(update_again)
    for one in (again, thread):
        one.join(LIMIT_S)
        assert not one.is_alive()
    assert log == ["step", "weights"]


def test_all_ranks_hold_where_the_first_one_does():
    barrier, decisions = threading.Barrier(2), {}

    def agreement(rank):
        calls = itertools.count()

        def agree(wanted):
            call = next(calls)
            if rank == 0:
                decisions[call] = wanted
            barrier.wait(LIMIT_S)
            return decisions[call]

        return agree

    gates = [StepGate(agreement(rank)) for rank in range(2)]
    weights, computed = [0, 0], [[], []]
    ready = threading.Event()

    def generate(rank):
        with gates[rank].generating():
            while sum(computed[rank]) < 3:  # steps with the new weights
                gates[rank].between_steps()
                computed[rank].append(weights[rank])
                ready.set()
                barrier.wait(LIMIT_S)  # the collectives of a step

    threads = [started(lambda rank=rank: generate(rank)) for rank in range(2)]
    assert ready.wait(LIMIT_S)
    holds = [started(gate.hold) for gate in reversed(gates)]
    for one in holds:
        one.join(LIMIT_S)
    assert not any(one.is_alive() for one in holds)
    for rank, gate in enumerate(gates):
        weights[rank] = 1
        gate.release()
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive()
    assert computed[0] == computed[1] and computed[0][0] == 0


def test_a_generation_that_fails_lets_weights_come():
    gate = StepGate()
    with pytest.raises(ValueError, match="failed"), gate.generating():
        raise ValueError("failed")
    gate.hold()
    gate.release()
