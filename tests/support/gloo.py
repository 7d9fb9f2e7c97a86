"""Ends workers that are alone in their groups without waiting for gloo.

Megatron makes 27 groups for a rank. Each of gloo's has a device, whose thread looks only every 10 ms whether it is to
end, and they end one after the other: collecting a worker took 0.2 s, and takes 6 ms where its groups share a device. A
group of a single rank sends nothing: it does not matter which one it has. Groups of several ranks keep one each.
"""

import functools
import os
from datetime import timedelta
from typing import Any

from torch.distributed import ProcessGroupGloo, Store

_init = ProcessGroupGloo.__init__


@functools.cache
def _device(pid: int) -> Any:
    """The device of a process: the thread of its parent's does not live through a fork."""
    return ProcessGroupGloo.create_device(hostname="127.0.0.1")


def _init_on_shared_device(group: ProcessGroupGloo, store: Store, rank: int, size: int, timeout: timedelta) -> None:
    if size > 1:
        _init(group, store, rank, size, timeout)
        return
    options = ProcessGroupGloo._Options()
    options._devices, options._timeout = [_device(os.getpid())], timeout
    _init(group, store, rank, size, options)


def share_device_of_lone_ranks() -> None:
    """Have this process make all gloo groups of one rank on one device from now on."""
    ProcessGroupGloo.__init__ = _init_on_shared_device


def keep_devices_apart() -> None:
    """Have each group made on a device of its own again, as in a run."""
    ProcessGroupGloo.__init__ = _init
