"""Tests how Ray is started on this machine, without starting it."""

import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import ray
from ray._private import auto_init_hook

from nemo_offload_rl.placement import local_ray
from nemo_offload_rl.placement.local_ray import disconnect_and_kill, handlers_kept, object_store_options
from nemo_offload_rl.placement.signals import ENDING_SIGNALS, ignore_ending_signals

MIB = 2**20


@pytest.mark.parametrize(("free_mib", "store_mib"), [(256, 204), (1024, 819), (2048, 1024)])
def test_the_object_store_leaves_some_shared_memory_to_others(monkeypatch, free_mib, store_mib):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free_mib * MIB))
    options = object_store_options(has_gpus=False)
    assert list(options) == ["object_store_memory"]
    assert options["object_store_memory"] // MIB == store_mib
    assert object_store_options(has_gpus=True) == {}  # Ray chooses its size


def test_with_too_little_shared_memory_the_object_store_is_on_the_disk_and_says_so(monkeypatch, caplog, tmp_path):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=64 * MIB))  # as in a container
    monkeypatch.setattr(local_ray.tempfile, "gettempdir", lambda: str(tmp_path))
    options = object_store_options(has_gpus=False)
    assert options == {"object_store_memory": 1024 * MIB, "_plasma_directory": str(tmp_path)}
    assert "/dev/shm has only 64 MiB free" in caplog.text


def test_signal_handlers_are_as_before_whatever_was_done_inside():
    before = {number: signal.getsignal(number) for number in ENDING_SIGNALS}

    def start_ray():
        ignore_ending_signals()
        assert {signal.getsignal(number) for number in ENDING_SIGNALS} == {signal.SIG_IGN}
        raise RuntimeError("Ray did not start")

    with pytest.raises(RuntimeError, match="Ray"), handlers_kept():
        start_ray()
    assert {number: signal.getsignal(number) for number in ENDING_SIGNALS} == before
    with ThreadPoolExecutor(1) as another:  # another thread has no handlers to keep
        another.submit(handlers_kept().__enter__).result()


def test_a_thread_that_still_calls_ray_after_its_end_does_not_start_it_again(monkeypatch):
    monkeypatch.setattr(auto_init_hook, "enable_auto_connect", True)  # Ray's default
    monkeypatch.setattr(ray._private.worker, "_global_node", None)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    disconnect_and_kill()
    started = []
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda: started.append("Ray"))
    auto_init_hook.auto_init_ray()  # what `ray.wait` and `remote` begin with
    assert started == []
