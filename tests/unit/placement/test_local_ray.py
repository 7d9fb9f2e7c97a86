"""Tests how Ray is started on this machine, without starting it."""

import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import ray
from ray._private import auto_init_hook

from nemo_offload_rl.placement import local_ray
from nemo_offload_rl.placement.local_ray import disconnect_and_kill, handlers_kept, join_ray, object_store_options
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


@pytest.fixture
def joined(monkeypatch):
    """Records the arguments of `ray.init`, which does nothing, and the addresses that are asked for an answer."""
    calls: list[object] = []
    monkeypatch.setattr("ray.init", lambda **options: calls.append(options))
    monkeypatch.setattr(
        "nemo_offload_rl.placement.local_ray.answers_at", lambda host, port, timeout: not calls.append((host, port))
    )
    return calls


@pytest.mark.parametrize(
    ("address", "asked"),
    [("10.0.0.1:6379", ("10.0.0.1", 6379)), ("head:7000", ("head", 7000)), ("[fd00::1]:6379", ("fd00::1", 6379))],
)
def test_the_head_is_asked_for_an_answer_before_ray_joins(address, asked, joined, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", address)
    join_ray({"log_to_driver": False})
    assert joined == [asked, {"log_to_driver": False}]


def test_ray_starts_where_the_address_names_no_cluster(joined, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "local")
    join_ray({})
    assert joined == [{}]


def test_auto_without_a_ray_on_this_machine_is_one_sentence(joined, monkeypatch, tmp_path):
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr("ray._private.services.find_gcs_addresses", set)
    with pytest.raises(ValueError, match=r"^RAY_ADDRESS is auto, but no Ray runs on this machine; start one, correct"):
        join_ray({})
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("10.0.0.1:6379")
    monkeypatch.setattr("nemo_offload_rl.placement.local_ray.answers_at", lambda *arguments: False)
    with pytest.raises(ValueError, match=r"is auto, which stands for 10.0.0.1:6379, but no head .* answers there"):
        join_ray({})
    assert joined == []


@pytest.mark.parametrize("address", [":6379", "head:port", "head:99999", "6379"])
def test_what_is_no_address_is_one_sentence(address, joined, monkeypatch, caplog):
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ValueError, match=f"^RAY_ADDRESS is {address}, which names no head of a Ray cluster: "):
        join_ray({})
    assert joined == [] and caplog.records == []


def test_a_head_that_refuses_is_one_sentence(joined, monkeypatch):
    def refuse(**options):
        raise ConnectionError("Failed to connect") from RuntimeError("no\ntoken")

    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setattr("ray.init", refuse)
    with pytest.raises(ValueError, match=r"^RAY_ADDRESS is 10.0.0.1:6379, but Ray cannot join .*: no token; correct"):
        join_ray({})
