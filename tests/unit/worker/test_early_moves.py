"""Tests what a rank moves before the phase that needs it."""

from types import SimpleNamespace

import pytest

from nemo_offload_rl.memory.units import GIB
from nemo_offload_rl.residency.table import DEFAULT_TABLE, Phase, Placement, Target
from nemo_offload_rl.worker.offloader import EarlyMoves

PADDED = {
    "logprob_batch_size": 4, "max_total_sequence_length": 30, "make_sequence_length_divisible_by": 8, "generation": {},
    "sequence_packing": {"enabled": False}, "megatron_cfg": {"context_parallel_size": 1},
}  # fmt: skip
PACKED = PADDED | {"sequence_packing": {"enabled": True, "logprob_mb_tokens": 512}}


class Asked:
    """Records the requests that a residency gets."""

    def __init__(self):
        self.calls = []

    def prefetch(self, phase, reserve_bytes=0, *, with_dropped=False):
        self.calls.append((phase, "with gradients" if with_dropped else reserve_bytes / GIB))

    def start_leaving(self, phase):
        self.calls.append(f"leave for {phase}")


def early(config=PADDED, logprob=Placement.UNCHANGED):
    asked = Asked()
    plan = SimpleNamespace(table={**DEFAULT_TABLE, Phase.LOGPROB: {Target.OPTIMIZER_STATE: logprob}})
    return EarlyMoves(asked, config, plan), asked.calls


@pytest.mark.parametrize(("config", "tokens"), [(PADDED, 4 * 32), (PACKED, 512)])
def test_params_return_first_and_the_state_leaves_room_for_the_largest_pass(config, tokens):
    moves, calls = early(config)
    moves.after_generation(logprobs=True)
    assert calls == [(Phase.LOGPROB, 0)]  # no pass has been measured yet
    calls.clear()
    moves.note_logprobs(64, 0.5)
    moves.note_logprobs(64, 0.25)
    moves.after_generation(logprobs=True)
    assert calls == [(Phase.LOGPROB, 0), (Phase.TRAIN, pytest.approx(1.1 * tokens * 0.5 / 64))]


def test_state_that_is_to_be_on_the_host_in_log_prob_passes_does_not_return_beside_them():
    moves, calls = early(logprob=Placement.HOST)
    moves.note_logprobs(64, 0.5)
    moves.after_generation(logprobs=True)
    moves.after_generation(logprobs=False)  # without passes in between all of training returns
    assert calls == [(Phase.LOGPROB, 0), (Phase.TRAIN, "with gradients")]


def test_state_leaves_with_the_end_of_training_only_where_a_refit_follows():
    without = {name: value for name, value in PADDED.items() if name != "generation"}
    for config, wanted in ((PADDED, ["leave for refit"]), (without, [])):
        moves, calls = early(config)
        moves.after_training()
        assert calls == wanted
