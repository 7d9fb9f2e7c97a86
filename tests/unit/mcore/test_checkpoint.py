import gc
import json
import os
import re
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from support.limits import files_of_at_most
from support.ranks import free_port, run_ranks, worker_of_rank
from support.tiny import TINY_QWEN3, TINY_QWEN3_MOE, random_batch, tiny_policy
from torch.distributed.checkpoint.utils import _DistWrapper

from nemo_offload_rl.algorithms.losses import NLLLoss
from nemo_offload_rl.storage.disk import DiskFullError
from nemo_offload_rl.storage.manifest import CheckpointError, read_manifest, write_manifest

CONSTANT = {"checkpoint": {"ckpt_assume_constant_structure": True}}


def train(worker, seeds):
    return [worker.train(random_batch(4, seed=seed), NLLLoss(), gbs=4, mbs=2) for seed in seeds]


def logprobs(worker):
    return worker.get_logprobs(random_batch(3), mbs=3)["logprobs"]


UNDISTRIBUTED = {"use_distributed_optimizer": False}
SGD = UNDISTRIBUTED | {"optimizer": "sgd", "lr": 0.1, "min_lr": 0.1, "sgd_momentum": 0.9}
OPTIMIZERS = [
    ("bfloat16", {"use_distributed_optimizer": True}),
    ("bfloat16", UNDISTRIBUTED),
    ("float32", UNDISTRIBUTED),
    ("bfloat16", SGD),
    ("float32", SGD),
    ("float32", SGD | {"sgd_momentum": 0.0}),
]  # each class once with Adam, and what SGD keeps


@pytest.mark.parametrize(("precision", "optimizer"), OPTIMIZERS)
def test_a_resumed_run_continues_bit_for_bit(make_worker, tmp_path, precision, optimizer):
    policy = tiny_policy(precision=precision, optimizer=optimizer)
    worker = make_worker(policy)
    train(worker, [0, 1])
    worker.save_checkpoint(str(tmp_path / "policy"), save_optimizer=True)
    want = train(worker, [3, 4])

    worker = make_worker(policy, seed=99)
    worker.load_checkpoint(str(tmp_path / "policy"))
    assert train(worker, [3, 4]) == want


def test_another_layout_is_refused(make_worker, tmp_path):
    worker = make_worker()
    worker.save_checkpoint(str(tmp_path / "policy"), save_optimizer=True)
    layout = tmp_path / "policy" / "layout.json"
    found = json.loads(layout.read_text())
    may_change = {"context"}  # as the number of data-parallel ranks
    for size, here in found["parallel"].items() - {(name, found["parallel"][name]) for name in may_change}:
        layout.write_text(json.dumps(found | {"parallel": found["parallel"] | {size: 2}, "world_size": 2}))
        with pytest.raises(ValueError, match=f"{size} parallel size 2 in the checkpoint and {here} in this run"):
            worker.load_checkpoint(str(tmp_path / "policy"))
    assert found["parallel"].keys() == {"tensor", "pipeline", "virtual_pipeline", "expert", "expert_tensor", "context"}


def test_an_unfinished_checkpoint_and_one_without_optimizer_cannot_be_resumed(make_worker, tmp_path):
    worker = make_worker()
    with pytest.raises(ValueError, match=r"it has no layout\.json"):
        worker.load_checkpoint(str(tmp_path))
    worker.save_checkpoint(str(tmp_path), save_optimizer=False)
    with pytest.raises(ValueError, match=r"checkpointing\.save_optimizer was false"):
        worker.load_checkpoint(str(tmp_path))


MODEL, DIVISION = "cannot be loaded: it is of another model, ", "cannot be resumed: its optimizer state is divided oth"
OTHERS = [
    ({"hf_config": TINY_QWEN3 | {"num_hidden_layers": 2}}, MODEL + r"in which \S+ has the shape \[4, .* \[2, "),
    ({"hf_config": TINY_QWEN3 | {"hidden_size": 32}}, MODEL + r"in which \S+ has the shape \[\d+, 64\], and \[\d+, 32"),
    ({"hf_config": TINY_QWEN3_MOE}, MODEL + r"without the tensor decoder\.layers\.mlp\.router\.weight"),
    ({"hf_config": TINY_QWEN3 | {"tie_word_embeddings": False}}, MODEL + r"without the tensor output_layer\.weight of"),
    ({"hf_config": TINY_QWEN3 | {"vocab_size": 1024}}, MODEL + r"in which embedding\.\S+ has the shape .* \[1024, "),
    ({"precision": "bfloat16"}, DIVISION),
    ({"optimizer": {"use_distributed_optimizer": False}}, DIVISION),
    ({"distributed_data_parallel_config": {"overlap_grad_reduce": True, "bucket_size": 20_000}}, DIVISION),
]


def test_a_checkpoint_of_another_model_or_division_is_named(make_worker, tmp_path):
    make_worker().save_checkpoint(str(tmp_path), save_optimizer=True)
    for other, what in OTHERS:
        with pytest.raises(CheckpointError, match=what) as caught:
            make_worker(tiny_policy(**other)).load_checkpoint(str(tmp_path))
        assert what is DIVISION or "give another checkpointing.checkpoint_dir" in str(caught.value)
        assert "damaged" not in str(caught.value)
        assert "\n" not in str(caught.value)


def test_nothing_that_was_saved_is_held_until_the_next_garbage_collection(make_worker, tmp_path, monkeypatch):
    """For state on the host, a save writes views of page-locked memory that is freed later."""
    worker = make_worker()
    train(worker, [0])
    written = []

    def read(tensor):
        memory = np.empty(max(tensor.nbytes, 1), dtype=np.uint8)
        written.append(weakref.ref(memory))  # it lives as long as any tensor that views it
        host = torch.from_numpy(memory)[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        return host.copy_(tensor.detach())

    monkeypatch.setattr(type(worker.offloader), "checkpoint_reader", lambda _: read)
    gc.collect()
    gc.disable()
    try:
        worker.save_checkpoint(str(tmp_path / "policy"), save_optimizer=True)
        held = [memory.nbytes for reference in written if (memory := reference()) is not None]
    finally:
        gc.enable()
    assert len(written) > 20
    assert not held


def test_files_are_hashed_while_they_are_written(make_worker, tmp_path):
    worker = make_worker()
    train(worker, [0])
    sums = worker.save_checkpoint(str(tmp_path), save_optimizer=True)
    contents = {str(path.relative_to(tmp_path)): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert sums.keys() == contents.keys()
    assert {"__0_0.distcp", ".metadata", "layout.json", "hf_config/config.json"} <= contents.keys()
    for name, content in contents.items():
        assert (sums[name].size, sums[name].checksum) == (len(content), xxhash.xxh3_128(content).hexdigest()), name
        assert sums[name].rank == 0


def test_a_flipped_bit_is_found_by_the_rank_that_will_read_it(make_worker, tmp_path):
    worker = make_worker()
    manifest = write_manifest(tmp_path, worker.save_checkpoint(str(tmp_path), save_optimizer=True))
    assert worker.find_damage(str(tmp_path), manifest) == []
    weights = tmp_path / "__0_0.distcp"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    (line,) = worker.find_damage(str(tmp_path), read_manifest(tmp_path))
    assert line.startswith("__0_0.distcp has changed since it was written")


def test_training_goes_on_after_a_save_for_which_there_was_no_space(make_worker, tmp_path):
    worker = make_worker()
    want = train(worker, [0, 1])
    worker = make_worker()
    got = train(worker, [0])
    with files_of_at_most(100_000), pytest.raises(DiskFullError, match=r"File too large .*needed") as caught:
        worker.save_checkpoint(str(tmp_path / "full"), save_optimizer=True)
    assert caught.value.needed_bytes > 1_000_000
    assert (tmp_path / "full" / "__0_0.distcp").stat().st_size <= 100_000
    worker.save_checkpoint(str(tmp_path / "policy"), save_optimizer=True)
    assert got + train(worker, [1]) == want
    with files_of_at_most(100_000), pytest.raises(DiskFullError, match="hf cannot be written: File too large"):
        worker.export_hf(str(tmp_path / "hf"))
    assert not list(tmp_path.glob("hf*"))
    worker.load_checkpoint(str(tmp_path / "policy"))
    assert train(worker, [1]) == want[1:]


def test_nothing_is_written_where_the_disk_has_too_little_space(make_worker, tmp_path, monkeypatch):
    worker = make_worker()
    free = os.statvfs(tmp_path)

    class AlmostFull:
        f_bavail, f_frsize, f_blocks = 10, 4096, free.f_blocks

    monkeypatch.setattr(os, "statvfs", lambda path: AlmostFull)
    with pytest.raises(DiskFullError, match=r"policy cannot be written: No space left .* needed, 41\.0 kB free"):
        worker.save_checkpoint(str(tmp_path / "policy"), save_optimizer=True)
    assert not list((tmp_path / "policy").iterdir())


def test_a_reused_plan_writes_its_own_step_and_another_structure_is_planned_anew(make_worker, tmp_path, monkeypatch):
    calls, gather = [], _DistWrapper.gather_object
    monkeypatch.setattr(_DistWrapper, "gather_object", lambda self, value: calls.append(value) or gather(self, value))
    worker = make_worker(tiny_policy(**CONSTANT))
    num_gathers, want, after = [], [], []
    for step in range(5):
        after.append(train(worker, [step]))
        want.append(logprobs(worker))
        calls.clear()
        worker.save_checkpoint(str(tmp_path / f"step_{step}"), save_optimizer=step < 4)
        num_gathers.append(len(calls))
    assert num_gathers == [2, 2, 1, 1, 2]  # saves that reuse the plan gather only what was written
    worker = make_worker(tiny_policy(), seed=99)
    for step in range(4):
        worker.load_checkpoint(str(tmp_path / f"step_{step}"))
        assert torch.equal(logprobs(worker), want[step])
        if step < 3:
            assert train(worker, [step + 1]) == after[step + 1]
    worker = make_worker(init_optimizer=False, seed=99)
    worker.load_checkpoint(str(tmp_path / "step_4"))
    assert torch.equal(logprobs(worker), want[4])


def save_where_files_are_full(rank, world_size, ports):
    """Saves with one file after another on a device that is always full, and at last with none."""
    root, said = Path(os.environ["SAVE_BELOW"]), {}
    worker = worker_of_rank(tiny_policy(tensor_model_parallel_size=2), rank, world_size, ports[0])
    train(worker, [0])
    for name in ("__0_0.distcp", "__1_0.distcp", ".metadata.tmp", "metadata.json", "layout.json.partial"):
        folder = root / name
        if rank == 0:
            folder.mkdir()
            (folder / name).symlink_to("/dev/full")
        torch.distributed.barrier()
        try:
            worker.save_checkpoint(str(folder), save_optimizer=True)
        except DiskFullError as error:
            said[name] = re.sub(r", \S+ \S+ free", "", str(error))  # each rank reads it itself, while others write
    train(worker, [1])
    sums = worker.save_checkpoint(str(root / "policy"), save_optimizer=True)
    want = logprobs(worker)
    worker.load_checkpoint(str(root / "policy"))
    assert torch.equal(logprobs(worker), want)
    worker.shutdown()
    return said, {name: found.rank for name, found in sums.items() if name.endswith("distcp")}


def test_an_error_of_one_ranks_disk_is_every_ranks(tmp_path, monkeypatch):
    monkeypatch.setenv("SAVE_BELOW", str(tmp_path))
    first, second = run_ranks(save_where_files_are_full, 2, num_ports=1)
    assert first == second
    said, ranks = first
    assert len(said) == 5, said
    for name, message in said.items():
        assert message.startswith(f"{tmp_path / name} cannot be written: No space left on device"), message
    assert ranks == {"__0_0.distcp": 0, "__1_0.distcp": 1}


def test_files_have_the_mode_of_the_users_umask(make_worker, tmp_path):
    worker = make_worker()
    before = os.umask(0o027)
    try:
        worker.save_checkpoint(str(tmp_path / "policy"), save_optimizer=True)
        worker.export_hf(str(tmp_path / "hf"))
    finally:
        os.umask(before)
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in tmp_path.rglob("*") if path.is_file()}
    assert {"__0_0.distcp", "layout.json", "model.safetensors", "config.json"} <= modes.keys()
    assert set(modes.values()) == {"0o640"}, modes


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "metadata.json", "layout.json"])
@pytest.mark.parametrize("damage", ["missing", "empty", "half", "other"])
def test_what_cannot_be_read_is_said_in_a_sentence(saved_checkpoint, name, damage):
    worker, folder = saved_checkpoint
    path = folder / name
    content = path.read_bytes()
    changed = {"missing": None, "empty": b"", "half": content[: len(content) // 2], "other": b"[1, 2]"}[damage]
    path.unlink() if changed is None else path.write_bytes(changed)
    try:
        with pytest.raises(ValueError, match=r"cannot be loaded: |is not a complete policy checkpoint") as caught:
            worker.load_checkpoint(str(folder))
    finally:
        path.write_bytes(content)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "damaged" not in str(caught.value)  # that is for the manifest to say


@pytest.fixture(scope="module")
def saved_checkpoint(tmp_path_factory):
    """Saves a checkpoint; tests must leave it and its worker unchanged."""
    worker = worker_of_rank(tiny_policy(), 0, 1, free_port())
    folder = tmp_path_factory.mktemp("policy")
    worker.save_checkpoint(str(folder), save_optimizer=True)
    yield worker, folder
    worker.shutdown()
