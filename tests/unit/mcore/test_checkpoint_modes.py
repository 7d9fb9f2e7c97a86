"""Tests that a run resumes between all ways to keep optimizer state: resident, streamed, or partly on the CPU.

test_streamed_state.py and test_cpu_optimizer_checkpoint.py test the other pairs.
"""

import pytest
from support.late_streams import LateStream
from support.phases import checkpoint_entries, differing, run_steps

from nemo_offload_rl.residency.streamed import window
from nemo_offload_rl.residency.table import Phase
from tests.unit.mcore import test_cpu_optimizer as on_cpu
from tests.unit.mcore import test_streamed_state as streamed
from tests.unit.mcore.test_cpu_optimizer_checkpoint import save, saved_state

PINNED, PAGEABLE = {"use_pinned_optimizer_offload": True}, {"use_pinned_optimizer_offload": False}
STAYS = {"offload_optimizer_for_refit": False}


@pytest.fixture(autouse=True)
def _late_copies(monkeypatch):
    monkeypatch.setattr(window, "CopyStream", LateStream)


def policy_of(way, kind="bfloat16"):
    """Returns a policy whose optimizer state is resident, streamed, or stepped on the CPU by a fraction."""
    if way == "streamed":
        return streamed.policy_of(kind.replace("float", "fp"))
    return on_cpu.offloading(on_cpu.policy_of(None if way == "resident" else way, kind))


@pytest.mark.parametrize(
    ("source", "kind", "ways"),
    [
        ("streamed", "bfloat16", ["resident", 0.5, 1.0]),
        (0.3, "bfloat16", ["streamed", 1.0]),
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
        if isinstance(way, str) and isinstance(source, str):
            assert got == want, way
        # One side clips gradients in bf16, and with AVX-512 Adam's kernel on the CPU rounds otherwise than the one for
        # the rest. A step count of 0 would make a difference of 0.016.
        assert [one["loss"] for one in got] == pytest.approx([one["loss"] for one in want], abs=1e-3), way


@pytest.mark.parametrize(("fraction", "here"), [(0.5, PAGEABLE), (1.0, PINNED)])
def test_the_cpu_optimizer_resumes_bit_for_bit_from_every_phase_wherever_its_gpu_share_goes(
    make_worker, tmp_path, fraction, here
):
    worker = make_worker(policy_of(fraction) | here)
    run_steps(worker, 2, visit_phases=True)
    for phase in Phase:
        worker.residency.enter(phase)
        save(worker, tmp_path / phase)
    want = run_steps(worker, 2, visit_phases=True)
    saved = checkpoint_entries(tmp_path / Phase.TRAIN)
    for phase, there in zip(Phase, (PAGEABLE, PINNED, STAYS, PAGEABLE), strict=True):
        assert differing(checkpoint_entries(tmp_path / phase), saved) == []
        worker = make_worker(policy_of(fraction) | there, seed=99)
        worker.load_checkpoint(str(tmp_path / phase))
        assert run_steps(worker, 2, visit_phases=True) == want, phase
