"""Tests the driver's handle on engines of a toy generator: what happens when one is late, fails, dies or is ended."""

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import ray
from ray import cloudpickle
from support.toy_group import NamedNodes

from nemo_offload_rl.generation import interface
from nemo_offload_rl.generation.actor_engines import ActorEngines, EngineActor, GeneratorProcess, engine_class
from nemo_offload_rl.generation.interface import GenerationError, GenerationOutput, GenerationRequest
from nemo_offload_rl.placement import gather

pytestmark = pytest.mark.slow

# The actors cannot import this module, so Ray pickles its classes by value.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

IN_FLIGHT = interface.InFlightUpdates(recomputes_kv_cache=False)
REQUEST = GenerationRequest([[5], [6], [7]], [0, 0, 0], 3, interface.SamplingParams(1, 1.0, 1.0, None, (2,), 11))


class ToyGenerator:
    """Answers with its number; has a fault in some verbs."""

    def __init__(self, number, faults):
        self._number, self._faults = number, faults

    def generate(self, request):
        self._fault("generate")
        rows = len(request.prompt_ids)
        return GenerationOutput([[self._number]] * rows, [[0.0]] * rows, ["stop"] * rows, [[0]] * rows)

    def memory_stats(self):
        self._fault("memory_stats")
        return {"gib": float(self._number)}

    def finish_generation(self):
        self._fault("finish_generation")

    def _fault(self, verb):
        match self._faults.get(verb):
            case "die":
                os._exit(1)
            case "hang":
                time.sleep(600)
            case "fail":
                raise ValueError(f"engine {self._number} does not {verb}")


class ToyProcess(GeneratorProcess):
    def build(self, number, faults, _late):
        self._generator = ToyGenerator(number, faults)


@pytest.fixture
def start(ray_cluster):
    """Starts two engines of one process, or one of two, on two nodes or on one."""
    made = []

    def start(*faults, cluster=None, num_replicas=2, in_flight=None, late=None):
        actor_class = engine_class(ToyProcess, in_flight).options(num_cpus=0)
        actors = [EngineActor(actor_class.remote(), n, n * num_replicas // 2, (n,)) for n in range(2)]
        faults = faults or ({}, {})
        builds = [one.actor.build.remote(n, faults[n], late) for n, one in enumerate(actors)]
        made.append(ActorEngines(cluster or NamedNodes(ray_cluster), actors, builds, in_flight=in_flight))
        return made[-1]

    yield start
    for engines in made:
        engines.shutdown()


def test_a_verb_waits_for_builds_which_the_call_of_a_relay_could_overtake(start, tmp_path):
    @ray.remote(num_cpus=0)
    def late():
        while not (tmp_path / "ready").exists():
            time.sleep(0.05)

    engines = start(late=late.remote())
    with ThreadPoolExecutor(1) as thread:
        stats = thread.submit(engines.memory_stats)
        ray.get(engines._process_refs[2:])  # the relays are there, and would have called the engines
        time.sleep(1)
        assert not stats.done()
        (tmp_path / "ready").touch()
        assert stats.result() == {"gib": 1.0}
    assert engines.generate(REQUEST).output_ids == [[0], [1], [1]]


def test_of_an_engine_of_two_processes_the_one_that_died_is_named_and_not_the_one_that_waits_for_it(start, monkeypatch):
    monkeypatch.setattr(gather, "FAILURE_GRACE_S", 0.3)
    engines = start({"generate": "hang"}, {"generate": "die"}, num_replicas=1)
    with pytest.raises(GenerationError, match="beside rank 1 on node node 1 failed in generate: ActorDied") as caught:
        engines.generate(REQUEST)
    assert caught.value.place == (1, "node 1")


def test_an_engine_that_does_not_sleep_is_an_error_of_the_driver_which_has_started_it(start):
    engines = start({"finish_generation": "fail"}, {})
    ray.get(list(engines.start_finish_generation()))  # the policy's return, which waits for them, goes on
    with pytest.raises(GenerationError, match=r"beside rank 0 .* failed in finish_generation: ValueError: engine 0"):
        engines.finish_generation()


@pytest.mark.parametrize("in_flight", [None, IN_FLIGHT], ids=["alone", "in flight"])
@pytest.mark.parametrize("nodes", [1, 2])
def test_engines_that_are_ended_while_they_generate_leave_no_process(start, ray_cluster, nodes, in_flight):
    cluster = ray_cluster if nodes == 1 else NamedNodes(ray_cluster)
    engines = start({"generate": "hang"}, {"generate": "hang"}, cluster=cluster, in_flight=in_flight)
    engines.wait_until_ready()
    pids = [pid for _, pid in ray.get(engines._process_refs)]
    assert len(pids) == (2 if nodes == 1 else 4)
    with ThreadPoolExecutor(1) as thread:
        generating = thread.submit(engines.generate, REQUEST)
        if in_flight is None:
            time.sleep(1)
        else:  # other verbs have another thread
            assert engines.memory_stats() == {"gib": 1.0}
        assert not generating.done()
        start_s = time.monotonic()
        engines.shutdown()
        assert isinstance(generating.exception(timeout=60), GenerationError)
        assert time.monotonic() - start_s < 30
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    assert engines.receivers == ()
    engines.shutdown()  # a second call does nothing
