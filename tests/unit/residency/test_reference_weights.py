"""Tests swaps between policy and reference weights that fail: at every copy, in both directions."""

import contextlib
import sys
from types import SimpleNamespace

import pytest
import torch
from support.jobs import CPU, assert_equal, make_job, run_steps, visit
from support.ranges import CHUNK_BYTES, small_chunks

from nemo_offload_rl.memory.pinned import PinnedArena
from nemo_offload_rl.residency import reference_weights
from nemo_offload_rl.residency.table import Phase, Target
from nemo_offload_rl.residency.target import ResidencyError
from nemo_offload_rl.residency.transfer import BackedRange, Mover

pytestmark = pytest.mark.usefixtures("no_leak")

NUM_CHUNKS = 4  # of the params of a job with seven layers
SWAP_IN = range(2 * NUM_CHUNKS)  # each chunk is saved, then the other weights are copied in
SWAP_BACK = range(NUM_CHUNKS)
ERRORS = [MemoryError, KeyboardInterrupt]


def each_pair(values):
    """Returns cases (value, is_late, error) that contain every pair of these."""
    return [(value, is_late, ERRORS[(value + is_late) % 2]) for value in values for is_late in (False, True)]


class FailingCopies:
    """Makes a mover's copies of chunks fail.

    Attributes:
        copies_left: how many succeed before the failure; None for any number.
        lasts: whether all later copies fail, or only one.
        is_late: whether the failing copy has been made.
    """

    def __init__(self, monkeypatch, mover, error):
        self.copies_left, self.lasts, self.is_late, self._error = None, False, False, error
        for name in ("_copy_out", "_copy_back"):
            monkeypatch.setattr(mover, name, self._failing(getattr(mover, name)))

    def arm(self, copies_left, *, lasts, is_late=False):
        self.copies_left, self.lasts, self.is_late = copies_left, lasts, is_late

    def disarm(self):
        self.copies_left = None

    def _failing(self, copy):
        def copy_or_fail(backed, chunk):
            fails = self.copies_left is not None and self.copies_left <= 0
            if not fails or self.is_late:
                copy(backed, chunk)
            if self.copies_left is not None:
                self.copies_left -= 1
            if fails:
                if not self.lasts:
                    self.disarm()
                raise self._error("no copy, as the test has it")

        return copy_or_fail


def trained(offloaders, monkeypatch, error=MemoryError):
    """Returns an offloader in LOGPROB after two steps, its job, initial and own weights, and copies that may fail."""
    job = make_job(num_layers=7)
    first = weights(job)
    offloader = offloaders(job, with_reference=True)
    run_steps(job, 2, offloader)
    offloader.residency.require(Target.OPTIMIZER_STATE)  # waits, so that its late copies are not those that fail
    offloader.residency.enter(Phase.LOGPROB)
    backed_ranges = offloader.targets[Target.PARAMS].flat_buffer.backed_ranges
    assert sum(len(backed.range.chunks) for backed in backed_ranges) == NUM_CHUNKS
    return offloader, job, first, weights(job), FailingCopies(monkeypatch, offloader.context.mover, error)


def weights(job):
    return {name: parameter.detach().clone() for name, parameter in job.model.named_parameters()}


def assert_all_works(offloader, job, first, own):
    assert_equal(weights(job), own)
    with offloader.reference.swapped_in():
        assert_equal(weights(job), first)
    assert_equal(weights(job), own)
    visit(offloader, Phase.GENERATE, Phase.LOGPROB)
    assert_equal(weights(job), own)


def uses(offloader, job):
    """Yields every use of the weights, from LOGPROB on."""
    inputs = torch.ones(8, 512)
    yield lambda: job.model(inputs)
    yield lambda: offloader.residency.require(Target.PARAMS)
    for phase in (Phase.LOGPROB, Phase.TRAIN, Phase.REFIT, Phase.GENERATE):
        yield lambda phase=phase: offloader.residency.enter(phase)
    yield offloader.checkpoint_reader  # to save
    yield offloader.load_all_to_gpu  # to load
    yield lambda: offloader.reference.swapped_in().__enter__()


def assert_every_use_is_refused(offloader, job):
    for use in uses(offloader, job):
        with pytest.raises(ResidencyError, match=r"weights are lost.*restart the worker from the last checkpoint"):
            use()


def fail_at_the_end(offloader, copies, number, *, is_late, body_fails):
    with offloader.reference.swapped_in():
        copies.arm(number, lasts=False, is_late=is_late)
        if body_fails:
            raise KeyError("out of the block")


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("is_late", [False, True], ids=["before the copy", "after it"])
def test_a_swap_in_that_fails_once_leaves_the_policy_as_it_was(offloaders, monkeypatch, error, is_late):
    offloader, job, first, own, copies = trained(offloaders, monkeypatch, error)
    for number in SWAP_IN:
        copies.arm(number, lasts=False, is_late=is_late)
        with pytest.raises(error, match="as the test has it"), offloader.reference.swapped_in():
            raise AssertionError("the swap did not fail")
        assert_all_works(offloader, job, first, own)


@pytest.mark.parametrize(("number", "is_late", "error"), each_pair(SWAP_IN))
def test_a_swap_in_after_which_no_copy_works_is_undone_or_refused(offloaders, monkeypatch, number, is_late, error):
    offloader, job, first, own, copies = trained(offloaders, monkeypatch, error)
    copies.arm(number, lasts=True, is_late=is_late)
    with pytest.raises((error, ResidencyError)), offloader.reference.swapped_in():
        raise AssertionError("the swap did not fail")
    copies.disarm()
    if number == 0:  # nothing had been copied in
        assert_all_works(offloader, job, first, own)
    else:
        assert_every_use_is_refused(offloader, job)


@pytest.mark.parametrize(("body_fails", "is_late", "error"), each_pair([False, True]))
def test_a_swap_back_that_fails_once_is_made_again(offloaders, monkeypatch, body_fails, is_late, error):
    offloader, job, first, own, copies = trained(offloaders, monkeypatch, error)
    for number in SWAP_BACK:
        with pytest.raises(error, match="as the test has it"):
            fail_at_the_end(offloader, copies, number, is_late=is_late, body_fails=body_fails)
        assert_all_works(offloader, job, first, own)


@pytest.mark.parametrize(("number", "is_late", "error"), each_pair(SWAP_BACK))
def test_a_swap_back_after_which_no_copy_works_is_told_by_every_use(offloaders, monkeypatch, number, is_late, error):
    offloader, job, _, _, copies = trained(offloaders, monkeypatch, error)
    with pytest.raises((error, ResidencyError)), offloader.reference.swapped_in():
        copies.arm(number, lasts=True, is_late=is_late)
    copies.disarm()
    assert_every_use_is_refused(offloader, job)


def swap_interrupted_at(offloader, number):
    """Swaps in and back with a Ctrl-C at the module's `number`-th executed line; returns how many lines ran."""
    lines, was = [], sys.gettrace()

    def trace(frame, event, _):
        if frame.f_code.co_filename != reference_weights.__file__:
            return None
        if event == "line":
            lines.append(frame.f_lineno)
            if len(lines) == number:
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        with contextlib.suppress(KeyboardInterrupt), offloader.reference.swapped_in():
            pass
    finally:
        sys.settrace(was)
    return len(lines)


def test_a_ctrl_c_at_any_line_leaves_the_policy_as_it_was(offloaders, monkeypatch):
    offloader, job, first, own, _ = trained(offloaders, monkeypatch)
    num_lines = swap_interrupted_at(offloader, None)
    assert num_lines > 20
    for number in range(1, num_lines + 1):
        swap_interrupted_at(offloader, number)
        assert_all_works(offloader, job, first, own)


def test_a_swap_inside_a_swap_is_refused_before_it_saves_over_the_policys_own(offloaders, monkeypatch):
    offloader, job, first, own, _ = trained(offloaders, monkeypatch)
    with offloader.reference.swapped_in():
        with pytest.raises(ResidencyError, match="are already swapped in; exit"), offloader.reference.swapped_in():
            pass
        assert_equal(weights(job), first)
    assert_all_works(offloader, job, first, own)


def test_weights_that_have_never_moved_are_refused_too(offloaders, monkeypatch):
    """No move of these weights exists that could be waited for."""
    job = make_job(num_layers=7)
    offloader = offloaders(job, with_reference=True)
    FailingCopies(monkeypatch, offloader.context.mover, MemoryError).arm(3, lasts=True)
    with pytest.raises(ResidencyError, match="weights are lost") as raised, offloader.reference.swapped_in():
        pass
    assert isinstance(raised.value.__cause__, MemoryError)
    assert_every_use_is_refused(offloader, job)


class FullRing:
    """Fails while staging buffers have copies in flight."""

    def to_host(self, source, destination, stream):
        raise KeyboardInterrupt

    def close(self):
        pass


def test_copies_through_staging_buffers_have_ended_when_a_failure_is_told(monkeypatch):
    """The copies that restore the weights use the same buffers at once."""
    with PinnedArena() as arena:
        mover, host_range = Mover(CPU, arena), small_chunks(CHUNK_BYTES, CPU, CHUNK_BYTES)
        backed = BackedRange(host_range, arena.allocate("test", CHUNK_BYTES))
        host_range.map(0)
        mover._staging, waited = FullRing(), []
        monkeypatch.setattr(mover, "_is_staged", lambda backed: True)
        monkeypatch.setattr(mover._out, "mark", lambda: SimpleNamespace(wait=lambda: waited.append("out")))
        with pytest.raises(KeyboardInterrupt):
            mover.save([backed])
        assert waited == ["out"]
        mover.close()
        host_range.close()
        arena.release(backed.host)
