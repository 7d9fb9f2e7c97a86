"""Runs a function on several ranks, each a process of its own."""

import contextlib
import faulthandler
import multiprocessing
import os
import random
import socket
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, SpawnContext
from typing import Any

import torch
from support.gloo import share_device_of_lone_ranks

from nemo_offload_rl.placement.reaper import MARK

# Bound, but not listening: another process that looks for a port finds none of these free, and a server that may reuse
# addresses, as all stores of ranks do, can listen there.
_reserved: deque[socket.socket] = deque(maxlen=100)


def free_port() -> int:
    """A port of this machine that no other call returns, here or in another process, until a hundred calls later.

    It may be used much later, so it lies below the range from which systems give ports to outgoing connections.
    """
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("localhost", port))  # is an error where another call has reserved it, too
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            _reserved.append(probe.dup())
            return port


# NCCL refuses two ranks on one GPU of a host, but not on GPUs of two hosts: each rank says that it has its own.
_RANKS_OF_ONE_GPU = {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo"}


def _child(
    function: Callable[..., Any], rank: int, world_size: int, ports: list[int], environ: dict[str, str], pipe: Any
) -> None:
    # The fork server started with an earlier test's environment, which its children inherit.
    os.environ.clear()
    os.environ.update(environ)
    faulthandler.enable()
    torch.set_num_threads(1)
    share_device_of_lone_ranks()
    if torch.cuda.device_count() == 1 and world_size > 1:
        os.environ.update(_RANKS_OF_ONE_GPU, NCCL_HOSTID=f"rank {rank}")
    try:
        pipe.send((True, function(rank, world_size, ports)))
    except Exception:  # noqa: BLE001  (the parent fails the test with it)
        pipe.send((False, traceback.format_exc()))


def worker_of_rank(policy: dict[str, Any], rank: int, world_size: int, port: int, **arguments: Any) -> Any:
    """The `MegatronPolicyWorker` of one rank of this machine; call it on every rank. All share a single GPU."""
    from nemo_offload_rl.hf_config import hf_config
    from nemo_offload_rl.plan.planner import worker_plan
    from nemo_offload_rl.worker.worker import MegatronPolicyWorker

    sizes = {name: arguments[name] for name in ("group_size", "init_optimizer") if name in arguments}
    arguments.pop("group_size", None)
    return MegatronPolicyWorker(
        policy, plan=worker_plan(policy, hf_config(policy).to_dict(), world_size=world_size, **sizes), rank=rank,
        world_size=world_size, local_rank=0 if torch.cuda.device_count() == 1 else rank, master_addr="localhost",
        master_port=port, **({"seed": 3, "init_reference_model": False} | arguments),
    )  # fmt: skip


def rows_of(worker: Any, num_rows: int) -> tuple[int, int]:
    """Returns the first row of a batch that is the worker's data-parallel rank's, and the one behind its last."""
    ranks = worker.parallel_ranks()
    share = num_rows // ranks["dp_size"]
    return ranks["dp_rank"] * share, (ranks["dp_rank"] + 1) * share


def fork_context() -> SpawnContext | ForkServerContext:
    """How ranks are started: forked from a process that has imported what takes each of them ten seconds.

    CUDA does not live through a fork, so ranks with GPUs are started afresh.
    """
    if torch.cuda.is_available():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["support.prepared"])
    environ = dict(os.environ)
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # Python 3.12's fork server has a path of its own otherwise
    os.environ.pop(MARK, None)  # a test's Ray, when it ends, ends all processes that bear its mark
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(environ)
    return context


def run_ranks(
    function: Callable[[int, int, list[int]], Any], world_size: int, *, num_ports: int, timeout_s: float = 180
) -> list[Any]:
    """Call `function(rank, world_size, ports)` on every rank and return the results in rank order."""
    context = fork_context()
    ports = [free_port() for _ in range(num_ports)]
    environ = dict(os.environ)
    pipes, processes = [], []
    for rank in range(world_size):
        ours, theirs = context.Pipe()
        process = context.Process(target=_child, args=(function, rank, world_size, ports, environ, theirs), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        results = []
        for rank, pipe in enumerate(pipes):
            assert pipe.poll(timeout_s), f"rank {rank} did not answer within {timeout_s} s"
            try:
                fine, value = pipe.recv()
            except EOFError:
                processes[rank].join(timeout=10)
                fine, value = False, f"its process ended with status {processes[rank].exitcode}"
            assert fine, f"rank {rank} failed:\n{value}"
            results.append(value)
        return results
    finally:
        for process in processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()


def off_and_on(
    layouts: Iterable[str], ports: Iterable[int], run: Callable[[str, int, bool], Any]
) -> dict[str, tuple[Any, Any]]:
    """For each layout what `run(layout, port, on)` gives without what is tested, and with it; two ports a layout."""
    free = iter(ports)
    return {layout: (run(layout, next(free), False), run(layout, next(free), True)) for layout in layouts}
