"""Tests that a run resumes between all ways to keep optimizer state: resident, streamed, or partly on the CPU.

test_streamed_state.py tests the other pairs.
"""

import pytest
import torch
from support.late_streams import LateStream
from support.phases import checkpoint_entries, differing, run_steps, save
from torch.distributed.checkpoint import FileSystemReader

from nemo_offload_rl.mcore.checkpoint import optimizer_loading
from nemo_offload_rl.mcore.checkpoint.optimizer_loading import join_masters, split_masters
from nemo_offload_rl.mcore.optimizer.cpu_optimizer import cpu_optimizers
from nemo_offload_rl.residency.streamed import window
from nemo_offload_rl.residency.table import Phase
from tests.unit.mcore import test_cpu_optimizer as on_cpu
from tests.unit.mcore import test_streamed_state as streamed

PINNED, PAGEABLE = {"use_pinned_optimizer_offload": True}, {"use_pinned_optimizer_offload": False}
STAYS = {"offload_optimizer_for_refit": False}


@pytest.fixture(autouse=True)
def _late_copies(monkeypatch):
    monkeypatch.setattr(window, "CopyStream", LateStream)


def policy_of(way, kind="bfloat16"):
    """Returns a policy whose optimizer state is resident, streamed, or stepped on the CPU by a fraction."""
    if way == "streamed":
        return streamed.policy_of(kind.replace("float", "fp"))
    fraction = {"resident": None, "masters on the GPU": 0.5}.get(way, way)
    return on_cpu.offloading(on_cpu.policy_of(fraction, kind, aware=way != "masters on the GPU"))


def saved_state(folder):
    """Returns weights, masters and moments; not the groups, in which the optimizers differ."""
    return {name: data for name, data in checkpoint_entries(folder).items() if "shard_0_1" not in name}


@pytest.mark.parametrize(
    ("source", "kind", "ways"),
    [
        ("streamed", "bfloat16", ["resident", 0.5, 1.0]),
        (0.3, "bfloat16", ["streamed", 1.0]),
        ("resident", "bfloat16", [0.5, 1.0, "masters on the GPU"]),
        (0.5, "bfloat16", ["resident", "masters on the GPU"]),
        (0.5, "moe bfloat16", ["streamed"]),
        (0.5, "float32", ["streamed"]),
        (1.0, "bfloat16", ["streamed", "resident", 0.5]),
    ],
)
def test_a_checkpoint_of_one_way_is_trained_on_in_the_others(make_worker, tmp_path, source, kind, ways):
    worker = make_worker(policy_of(source, kind))
    run_steps(worker, 2, visit_phases=True)
    save(worker, tmp_path / "source")
    saved, want = saved_state(tmp_path / "source"), run_steps(worker, 2, visit_phases=True)
    for way in ways:
        worker = make_worker(policy_of(way, kind), seed=99)
        run_steps(worker, 1, visit_phases=False)  # loading must replace its counts and moments
        worker.load_checkpoint(str(tmp_path / "source"))
        save(worker, tmp_path / str(way))
        assert differing(saved, saved_state(tmp_path / str(way))) == [], way
        got = run_steps(worker, 2, visit_phases=True)
        if {way, source} == {"resident", "streamed"}:
            assert got == want, way
        # One side clips gradients in bf16, and with AVX-512 Adam's kernel on the CPU rounds otherwise than the one for
        # the rest. A step count of 0 would make a difference of 0.016.
        assert [one["loss"] for one in got] == pytest.approx([one["loss"] for one in want], abs=1e-3), way


@pytest.mark.parametrize(
    ("fraction", "kind", "here"),
    [(0.5, "moe bfloat16", PAGEABLE), (0.5, "float32", PAGEABLE), (1.0, "bfloat16", PINNED)],
)
def test_the_cpu_optimizer_resumes_bit_for_bit_from_every_phase_wherever_its_gpu_share_goes(
    make_worker, tmp_path, fraction, kind, here
):
    worker = make_worker(policy_of(fraction, kind) | here)
    run_steps(worker, 2, visit_phases=True)
    for phase in Phase:
        worker.residency.enter(phase)
        save(worker, tmp_path / phase)
    want = run_steps(worker, 2, visit_phases=True)
    saved = checkpoint_entries(tmp_path / Phase.TRAIN)
    for phase, there in zip(Phase, (PAGEABLE, PINNED, STAYS, PAGEABLE), strict=True):
        assert differing(checkpoint_entries(tmp_path / phase), saved) == []
        worker = make_worker(policy_of(fraction, kind) | there, seed=99)
        worker.load_checkpoint(str(tmp_path / phase))
        assert {one.num_steps for one in cpu_optimizers(worker.state.optimizer)} == {2}
        assert run_steps(worker, 2, visit_phases=True) == want, phase


def test_remainders_of_masters_are_read(make_worker, tmp_path, monkeypatch):
    """Transformer Engine's precision-aware Adam saves masters so; test_gpu_cpu_optimizer.py tests it."""
    worker = make_worker(policy_of(0.5))
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


def every_upper_half():
    """Returns float32 of every finite bf16's sign, exponent and mantissa, each with lower halves around the middle."""
    high = torch.arange(2**16, dtype=torch.int32)
    high = high[(high & 0x7F80) != 0x7F80]
    lows = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    return ((high[:, None] << 16) | lows).flatten().view(torch.float32)


def test_remainders_and_parameters_give_back_every_bit(monkeypatch):
    monkeypatch.setattr(optimizer_loading, "_PIECE", 100_000)
    masters = every_upper_half()
    params = torch.empty(masters.shape, dtype=torch.bfloat16)
    remainders = split_masters(masters, params)
    assert remainders.dtype is torch.int16
    assert torch.equal(join_masters(params, remainders).view(torch.int32), masters.view(torch.int32))
    rounded = masters.bfloat16()
    differ = params.view(torch.int16) != rounded.view(torch.int16)
    assert (masters.view(torch.int32)[differ] & 0xFFFF == 0x8000).all()  # ties: rounded up there, to even elsewhere
    assert differ.sum() == every_upper_half().numel() // 6 // 2


def test_remainders_are_what_the_arithmetic_of_transformer_engine_makes_of_a_master():
    """Repeats its kernel by hand: the upper 16 bits, plus one if the lower ones begin with 1; and the lower ones."""
    master = torch.tensor([0x3F80_8000, 0x3F80_7FFF, 0x3F81_8000], dtype=torch.int32).view(torch.float32)
    params = torch.empty(3, dtype=torch.bfloat16)
    assert split_masters(master, params).tolist() == [-32768, 32767, -32768]
    assert params.view(torch.int16).tolist() == [0x3F81, 0x3F80, 0x3F82]
