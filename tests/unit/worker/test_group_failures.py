"""Tests groups whose ranks fail, die or hang."""

import contextlib
import os
import re
import subprocess
import sys
import textwrap
import time
import traceback

import psutil
import pytest
import ray
from support.toy_group import ApartCluster, pids_of, processes, toy_batch, toy_group

from nemo_offload_rl.placement import gather
from nemo_offload_rl.placement.local_ray import handlers_kept
from nemo_offload_rl.run.failures import add_failure_summary
from nemo_offload_rl.worker.actor import WorkerActor
from nemo_offload_rl.worker.errors import WorkerError

pytestmark = pytest.mark.slow


@pytest.fixture(params=[lambda cluster: cluster, ApartCluster], ids=["one node", "two nodes"])
def fresh_group(request, ray_cluster):
    made = []

    def make(**toy):
        made.append(toy_group(request.param(ray_cluster), **toy))
        return made[-1]

    yield make
    for each in made:
        each.shutdown()


def test_an_error_names_rank_verb_and_cause_and_ends_the_others(fresh_group, monkeypatch):
    monkeypatch.setattr(gather, "FAILURE_GRACE_S", 0.2)  # rank 0 does not answer
    group = fresh_group()
    group.wait_until_ready()
    pids = pids_of(group)
    start = time.monotonic()
    message = r"Rank 1 failed in load_checkpoint: ValueError: the checkpoint is of"
    with pytest.raises(WorkerError, match=message) as caught:
        group.load_checkpoint("fail on rank 1, wait on rank 0")
    assert time.monotonic() - start < 300  # rank 0 would sleep for 600 s, so the group did not wait for it
    assert (caught.value.rank, caught.value.verb) == (1, "load_checkpoint")
    assert isinstance(caught.value.cause, ValueError)
    told = str(caught.value)  # with the traceback of the rank
    assert "in load_checkpoint" in told and "toy_worker.py" in told and "\x1b" not in told
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    with pytest.raises(WorkerError, match="the checkpoint is of another model"):
        group.get_logprobs(toy_batch(2), mbs=1)
    with pytest.raises(WorkerError, match="the checkpoint is of another model"):
        group.stop_profile()


def test_a_return_beside_other_work_that_fails_is_an_error_of_the_next_verb(fresh_group, monkeypatch):
    monkeypatch.setattr(gather, "FAILURE_GRACE_S", 0.2)
    group = fresh_group(fails_to_return=1)
    group.start_return([ray.put("generation is asleep")], logprobs=True)
    with pytest.raises(WorkerError, match=r"Rank 1 failed in start_return: ValueError: no memory for the params of"):
        group.train(toy_batch(8), abs, gbs=4, mbs=1)


def last_line(error):
    add_failure_summary(error, None)
    return "".join(traceback.format_exception(error)).splitlines()[-1]


KILLED = "its process ended without an error of its own: it was killed"
NO_MEMORY = (
    r"OutOfMemoryError: CUDA out of memory\. Tried to allocate 2\.00 GiB\. Lower policy\.train_micro_batch_size"
    r".* if vLLM stays awake, set policy\.residency\.generation_weights=discard"
)


@pytest.mark.parametrize(
    ("folder", "message", "last"),
    [
        ("die on rank 1, fail on rank 0", "ActorDiedError.*Rank 0 failed too: ConnectionError: connection clo", KILLED),
        ("fail on rank 1 for lack of GPU memory", "OutOfMemory", NO_MEMORY),
    ],
)
def test_a_rank_that_died_or_has_no_gpu_memory_is_named_and_told_in_the_last_line(fresh_group, folder, message, last):
    with pytest.raises(WorkerError, match=f"(?s)Rank 1 failed in load_checkpoint: {message}") as caught:
        fresh_group().load_checkpoint(folder)
    assert caught.value.rank == 1
    told = last_line(caught.value)
    assert re.match(f"The run failed: rank 1 of the policy failed in load_checkpoint: {last}", told), told


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
    pids = pids_of(group)
    assert pids <= processes()
    assert os.getpid() not in pids
    group.shutdown()
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    assert "will not go quietly" in caplog.text
    group.shutdown()  # a second call does nothing
    with pytest.raises(RuntimeError, match="have been shut down"):
        group.memory_stats()


def test_what_fails_before_the_ranks_are_built_ends_them(ray_cluster):
    before, started = processes(), set()

    def fail():
        deadline = time.monotonic() + 60
        while len(started) < 2 and time.monotonic() < deadline:
            started.update(
                process.pid
                for process in psutil.Process().children(recursive=True)
                if process.pid not in before and "WorkerActor" in " ".join(process.cmdline())
            )
        raise RuntimeError("the engine could not be built")

    with pytest.raises(RuntimeError, match="the engine could not be built"):
        toy_group(ray_cluster, before_build=fail)
    assert len(started) >= 2
    assert not [pid for pid in started if psutil.pid_exists(pid)]


def test_a_worker_is_imported_before_it_is_built_and_what_fails_then_is_left_to_its_building():
    with handlers_kept():
        actor = WorkerActor()
    actor.import_worker("tests.unit.worker.no_module:Worker")
    with pytest.raises(ModuleNotFoundError, match="no_module"):
        actor.build("tests.unit.worker.no_module:Worker", ("127.0.0.1", 1), {}, contextlib.nullcontext)


def test_all_that_a_worker_is_built_with_is_imported_before():
    program = """
        import sys
        from nemo_offload_rl.worker.actor import WorkerActor
        WorkerActor().import_worker("nemo_offload_rl.worker.worker:MegatronPolicyWorker")
        print("megatron.bridge" in sys.modules, "nemo_offload_rl.mcore.architectures" in sys.modules)
        import torch
        print(torch.cuda.is_initialized())
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-2:] == ["True True", "False"]  # an engine that is being built may measure the GPU
