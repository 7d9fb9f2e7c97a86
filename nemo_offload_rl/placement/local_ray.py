"""Works around Ray's behaviour on this machine: object-store size, signal handlers, and slow shutdown."""

import contextlib
import logging
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

import ray
from ray._private import auto_init_hook

from nemo_offload_rl.memory.units import GIB
from nemo_offload_rl.placement.signals import ENDING_SIGNALS

logger = logging.getLogger(__name__)

_OBJECT_STORE_BYTES_WITHOUT_GPU = 1 * GIB
_MIN_SHARED_MEMORY_BYTES = 256 << 20


def object_store_options(has_gpus: bool) -> dict[str, Any]:
    """Returns the options for Ray's object store: Ray's default size (30% of memory) with GPUs, otherwise a small one.

    The small store goes to a temporary folder if /dev/shm has too little space.
    """
    if has_gpus:
        return {}
    free = shutil.disk_usage("/dev/shm").free
    if free < _MIN_SHARED_MEMORY_BYTES:
        folder = tempfile.gettempdir()
        logger.warning(
            "/dev/shm has only %d MiB free: Ray's object store goes to %s, which is slower.", free >> 20, folder
        )
        return {"object_store_memory": _OBJECT_STORE_BYTES_WITHOUT_GPU, "_plasma_directory": folder}
    return {"object_store_memory": min(_OBJECT_STORE_BYTES_WITHOUT_GPU, int(0.8 * free))}


@contextlib.contextmanager
def handlers_kept() -> Iterator[None]:
    """Restores this process's signal handlers after the `with` block, since Ray's would end the process at once."""
    if threading.current_thread() is not threading.main_thread():
        yield  # outside the main thread Ray sets no handlers
        return
    handlers = {number: signal.getsignal(number) for number in ENDING_SIGNALS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if handler is not None:  # None: not set by Python, which cannot restore it
                signal.signal(number, handler)


def disconnect_and_kill() -> None:
    """Disconnects from Ray and kills its processes; ray.shutdown() alone waits a second for each after SIGTERM.

    A thread that then still calls Ray gets an error; by default Ray would start on this machine again.
    """
    auto_init_hook.enable_auto_connect = False
    node = ray._private.worker._global_node
    if node is not None:
        kill_all_processes = node.kill_all_processes
        node.kill_all_processes = lambda **options: kill_all_processes(**options | {"allow_graceful": False})
    ray.shutdown()
