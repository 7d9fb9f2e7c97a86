"""Tests CPU-optimizer checkpoints: resumed bit by bit, and loaded into every other way to keep the state."""

import pytest
import torch
from support.phases import checkpoint_entries, differing, run_steps
from torch.distributed.checkpoint import FileSystemReader

from nemo_offload_rl.mcore.checkpoint.optimizer_loading import split_masters
from nemo_offload_rl.mcore.optimizer.cpu_optimizer import cpu_optimizers
from nemo_offload_rl.residency.table import Phase
from tests.unit.mcore.test_cpu_optimizer import offloading, policy_of

# Fraction, and whether the optimizer is precision-aware.
WAYS = {"resident": (None, True), "half": (0.5, True), "whole": (1.0, True), "masters on the GPU": (0.5, False)}


def worker_of(make_worker, way, kind="bfloat16", seed=3):
    fraction, aware = WAYS[way]
    return make_worker(offloading(policy_of(fraction, kind, aware=aware)), seed=seed)


def saved_state(folder):
    """Returns weights, masters and moments; not the groups, in which the optimizers differ."""
    return {name: data for name, data in checkpoint_entries(folder).items() if "shard_0_1" not in name}


def save(worker, folder):
    # megatron-core pads shards with uninitialised memory, which this mode fills.
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        worker.save_checkpoint(str(folder), save_optimizer=True)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("way", "kind"), [("half", "moe bfloat16"), ("whole", "bfloat16"), ("half", "float32")])
def test_a_run_that_is_saved_in_any_phase_and_resumed_continues_bit_for_bit(make_worker, tmp_path, way, kind):
    worker = worker_of(make_worker, way, kind)
    run_steps(worker, 3, visit_phases=True)
    folders = []
    for phase in Phase:
        worker.residency.enter(phase)
        folders.append(tmp_path / phase)
        save(worker, folders[-1])
    first = saved_state(folders[0])
    assert [differing(first, saved_state(folder)) for folder in folders[1:]] == [[], [], []]
    want = run_steps(worker, 3, visit_phases=True)
    worker = worker_of(make_worker, way, kind, seed=99)
    worker.load_checkpoint(str(folders[-1]))
    assert {one.num_steps for one in cpu_optimizers(worker.state.optimizer)} == {3}
    assert run_steps(worker, 3, visit_phases=True) == want


@pytest.mark.parametrize("source", ["resident", "half"])
def test_every_way_loads_the_same_state_from_every_other(make_worker, tmp_path, source):
    worker = worker_of(make_worker, source)
    run_steps(worker, 2, visit_phases=False)
    save(worker, tmp_path / source)
    want = saved_state(tmp_path / source)
    for way in WAYS:
        if way == source:
            continue
        worker = worker_of(make_worker, way, seed=99)
        worker.load_checkpoint(str(tmp_path / source))
        save(worker, tmp_path / way)
        assert differing(want, saved_state(tmp_path / way)) == []
        assert run_steps(worker, 1, visit_phases=False)[0]["loss"] < 10


def test_remainders_of_masters_are_read(make_worker, tmp_path, monkeypatch):
    """Transformer Engine's precision-aware Adam saves masters so; test_gpu_cpu_optimizer.py tests it directly."""
    worker = worker_of(make_worker, "half")
    run_steps(worker, 2, visit_phases=False)
    (optimizer,) = cpu_optimizers(worker.state.optimizer)
    masters = {id(state["master_param"]): (param, state["master_param"]) for param, state in optimizer.state.items()}
    want = {id(param): master.clone() for param, master in masters.values()}

    def as_remainders(tensor):
        if id(tensor) not in masters:
            return tensor
        param, master = masters[id(tensor)]
        return split_masters(master, param)

    monkeypatch.setattr(type(worker.offloader), "checkpoint_reader", lambda _: as_remainders)
    save(worker, tmp_path / "policy")
    monkeypatch.undo()
    saved = FileSystemReader(str(tmp_path / "policy")).read_metadata().state_dict_metadata
    assert {entry.properties.dtype for name, entry in saved.items() if name.endswith(".param")} == {torch.int16}
    params = list(optimizer.state)
    with torch.no_grad():
        for _, master in masters.values():
            master.zero_()
    worker.load_checkpoint(str(tmp_path / "policy"))
    for param in params:
        assert torch.equal(optimizer.state[param]["master_param"], want[id(param)])
