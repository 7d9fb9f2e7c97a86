"""Defines fixtures and pytest hooks that several test modules use."""

import gc
import os
import signal
from collections.abc import Iterator

# xdist runs several processes, and ranks and Ray workers come on top; torch reads this when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Transformer Engine's dense attention is bit-equal between runs only with this; it reads it when it is imported.
os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")

import psutil
import pytest
import torch
from support.forked_python import ray_forks_its_workers
from support.gloo import share_device_of_lone_ranks

from nemo_offload_rl.placement.cluster import Cluster
from nemo_offload_rl.placement.signals import ENDING_SIGNALS

share_device_of_lone_ranks()


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Cluster]:
    """Starts Ray on this machine, once; worker groups and generation use ranks 0 and 1, or rank 0 on a single GPU."""
    with ray_forks_its_workers():
        cluster = Cluster(num_nodes=1, gpus_per_node=1 if torch.cuda.device_count() == 1 else 2)
    with cluster:
        yield cluster


@pytest.fixture(autouse=True)
def ending_signals_are_handled_as_before() -> Iterator[None]:
    """Checks that each test restores the signal handlers; later tests' processes would inherit an ignored signal."""
    handlers = {number: signal.getsignal(number) for number in ENDING_SIGNALS}
    yield
    assert {number: signal.getsignal(number) for number in ENDING_SIGNALS} == handlers


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds options that run the reliability tests and more fuzz cases."""
    parser.addoption(
        "--reliability",
        action="store_true",
        help="also run what is marked `reliability`: runs that are hit everywhere, and 2,000 steps (half an hour)",
    )
    parser.addoption("--fuzz", action="store_true", help="500 mutated data files instead of 120")
    parser.addoption("--fuzz-seed", type=int, default=1, metavar="N", help="seed of the mutations")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Returns the processes for `-n auto`: each may take 4 GiB; tests that check free GPU memory need the GPU alone.

    One more than there are cores takes 13% less time on two cores, since tests wait for other processes.
    """
    if torch.cuda.is_available():
        return 0
    with_memory = psutil.virtual_memory().available // (4 << 30)
    return max(1, min((os.cpu_count() or 1) + 1, 4, with_memory))


def pytest_collection_finish() -> None:
    """Freezes the half million objects that imports made: garbage collections are then 20 times faster."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def frozen_again() -> Iterator[None]:
    """Freezes objects of later imports and those that benchmarks thawed: a worker takes 0.1 s, not 2.5 s, per test."""
    yield
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skips tests marked `gpu` on machines without a GPU, and tests marked `reliability` without their option.

    Files with tests marked `slow` run first, so that no process has a long test left when the others are done.
    """
    slow_files = {item.path for item in items if item.get_closest_marker("slow") is not None}
    items.sort(key=lambda item: item.path not in slow_files)
    skipped = {} if torch.cuda.is_available() else {"gpu": "needs a CUDA GPU"}
    if not config.getoption("--reliability"):
        skipped["reliability"] = "takes many minutes: --reliability runs it"
    for item in items:
        for marker, reason in skipped.items():
            if item.get_closest_marker(marker) is not None:
                item.add_marker(pytest.mark.skip(reason=reason))
