"""Changes phases: `residency.enter(phase)` moves the targets whose placement differs from the table, and no others."""

import contextlib
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping

import torch

from nemo_offload_rl.residency.metrics import Meter, Started
from nemo_offload_rl.residency.table import Phase, Placement, Table, Target
from nemo_offload_rl.residency.target import NoRoomError, OffloadTarget, ResidencyError
from nemo_offload_rl.residency.transfer import ChunkError

MEMORY_ERRORS = (MemoryError, torch.OutOfMemoryError, ChunkError)
_ON_GPU = (Placement.GPU, Placement.STREAMED)
"""Placements in which a target has GPU memory, for all of it or for a window, and may be used."""
_LEAVES_THE_GPU = (Placement.HOST, Placement.DROPPED)
_OTHERS_NEED_MEMORY = (Phase.REFIT, Phase.GENERATE)
"""Phases in which a generator in another process takes memory: torch's cache is released."""


class Residency:
    """Tracks where each target is, and moves it to its placement in a phase.

    Args:
        targets: the mechanisms; everything starts on the GPU if it can be there, else on the host.
        table: where each target lives in each phase; every target needs a placement in every phase.
        meter: takes the measurements.
        room: by phase, bytes that have to be free on the GPU when `enter` returns, as far as offloads free them.
        generator_bytes: free GPU memory that is enough for a generator in another process; while so much is free,
            torch's allocator keeps its cache. None if it is not known: the cache is always released.
        check: called before a phase is entered or a target required; raises if the process cannot go on.

    Raises:
        ValueError: if the table lacks a placement or asks for one that a target cannot live in.
    """

    def __init__(
        self,
        targets: Mapping[Target, OffloadTarget],
        table: Table,
        *,
        meter: Meter | None = None,
        room: Mapping[Phase, int] | None = None,
        generator_bytes: int | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        for phase in Phase:
            for target, mechanism in targets.items():
                placement = table[phase].get(target) if phase in table else None
                if placement is None:
                    raise ValueError(f"The residency table has no placement for {target} in phase {phase}; add one.")
                _require_possible(target, mechanism, placement, f"{placement} in phase {phase}")
        self._targets = dict(targets)
        self._table = table
        self._where = {
            name: next((placement for placement in _ON_GPU if placement in target.placements), Placement.HOST)
            for name, target in targets.items()
        }
        self._last: dict[Target, Started] = {}
        self._prefetched: set[Target] = set()
        self._meter = meter or Meter(torch.device("cpu"))
        self._room = dict(room or {})
        self._generator_bytes = generator_bytes
        self._check = check
        self._in_place: set[Target] = set()
        self._lent: dict[Target, Callable[[], None]] = {}
        self._gave_cache_back = False  # since the last phase was entered
        self.phase: Phase | None = None

    def where(self, target: Target) -> Placement:
        """Returns the placement that a target has, or is moving to."""
        return self._where[target]

    def enter(self, phase: Phase, *, wait: bool = True) -> None:
        """Move every target to its placement in `phase`; a second call in a row is a no-op.

        Copies start at once on streams of their own. When this returns, the current stream waits for all targets on the
        GPU but those with a lazy wait (optimizer state: before the optimizer's step), which may still be arriving.
        Copies to the host may still run, too, except for GENERATE, which hands the GPU to another process.

        Args:
            phase: the phase to enter.
            wait: False if that process already has the memory that it needs: GENERATE then does not wait for copies to
                the host either, and torch's allocator keeps its cache.

        Raises:
            NoRoomError: a target could not move; those that had moved for this phase are back where they were.
            ResidencyError: CUDA has failed; this process cannot go on.
        """
        self._check()
        start, before = time.perf_counter(), self._meter.memory()
        if wait and phase in _OTHERS_NEED_MEMORY and phase is not self.phase and not self._gave_cache_back:
            self._give_back_cache()  # before the copies, since this waits for every stream
        self._gave_cache_back = False
        is_switch = self._move(self._differing(phase), phase) or phase is not self.phase
        if phase is Phase.GENERATE and wait:
            for target, placement in self._where.items():
                if placement in _LEAVES_THE_GPU:
                    self._wait(target)
        elif phase in self._room:
            self._make_room(self._room[phase])
        self.phase = phase
        if is_switch:
            held = {name: target.mapped_bytes for name, target in self._targets.items()}
            self._meter.record_transition(phase, time.perf_counter() - start, before, held)

    def place(self, placements: Mapping[Target, Placement]) -> None:
        """Move single targets and leave the others where they are, for trainers that move each kind of state alone.

        It copies and waits as `enter` does, and metrics count the moves in the phase that was entered last (train
        before the first). `wait_until_released` waits for the memory of targets that leave the GPU. Targets are dropped
        only when the others have moved: if one that comes to the GPU needs their memory, drop them in an earlier call.

        Args:
            placements: the new placement of each target; with `Placement.UNCHANGED` it stays.

        Raises:
            ValueError: there is no such target, or it cannot live there; nothing has moved.
            NoRoomError: a target could not move; those that had moved in this call are back where they were.
            ResidencyError: CUDA has failed; this process cannot go on.
        """
        self._check()
        for target, placement in placements.items():
            if target not in self._targets:
                raise ValueError(
                    f"Cannot place {target}: there is no such target; the targets are {', '.join(self._targets)}."
                )
            _require_possible(target, self._targets[target], placement, placement)
        self._move(self._changes(placements), self.phase or Phase.TRAIN)

    def lend(self, target: Target, wait: Callable[[], None]) -> None:
        """Keep the host memory of a target unchanged until a reader is done with it.

        Moves to the GPU only read that memory, and are still made.

        Args:
            target: a target that is on the host now.
            wait: waits for the reader; called before the next move that writes there.
        """
        assert self._where[target] is Placement.HOST, f"{target} is {self._where[target]}, and not on the host"
        self._lent[target] = wait

    def take_back(self, target: Target) -> None:
        """End `lend` for a target's host memory, if it is lent: its reader is done with it."""
        self._lent.pop(target, None)

    def prefetch(self, phase: Phase, reserve_bytes: int = 0, *, with_dropped: bool = False) -> None:
        """Start to copy targets that `phase` needs on the GPU back from the host, as far as memory allows.

        Args:
            phase: the one that will be entered next.
            reserve_bytes: memory that stays free, since the present phase may still take it. A target that finds no
                memory nevertheless is moved when it is needed.
            with_dropped: whether to start to map memory for dropped targets, too, if no other phase comes before:
                requested later, behind long copies, it would wait for them.
        """
        sources = (Placement.HOST, Placement.DROPPED) if with_dropped else (Placement.HOST,)
        coming = [
            t
            for t, placement in self._differing(phase).items()
            if placement is Placement.GPU and self._where[t] in sources
        ]
        for target in coming:
            # Read before the free memory: what is mapped between the two is then reserved needlessly, and not missed.
            reserved = reserve_bytes + self._bytes_to_map()
            free = self._meter.memory().gpu_free
            if free is None or free - reserved >= self._targets[target].nbytes:
                with contextlib.suppress(NoRoomError):
                    self._start(target, Placement.GPU, phase)
                    self._prefetched.add(target)

    def end_prefetches(self) -> None:
        """Wait for all prefetches; a target that found no memory is then where it was, and no error is raised."""
        for target in tuple(self._prefetched):
            self._wait(target)

    def start_leaving(self, phase: Phase) -> None:
        """Start to move targets that `phase` has on the host or dropped; they must not be needed before.

        A target that finds no host memory now, or that is lent to a reader, leaves when the phase is entered. If a copy
        fails, the next call that waits for its target raises.

        Args:
            phase: the one that will be entered next.
        """
        self._check()
        if phase in _OTHERS_NEED_MEMORY:
            self._give_back_cache()  # now, while no copy runs that it would wait for
            self._gave_cache_back = True
        for target, placement in self._differing(phase).items():
            if placement in _LEAVES_THE_GPU and target not in self._lent:
                with contextlib.suppress(NoRoomError):
                    self._start(target, placement, phase)

    def require(self, target: Target) -> None:
        """Makes later work of the current stream wait until a target is in place.

        Raises:
            ResidencyError: the target is not on the GPU in this phase.
            NoRoomError: the GPU has no memory for it; it is on the host, unharmed.
        """
        self._check()
        self.end_access_in_place(target)
        if self._where[target] not in _ON_GPU:
            phase = f"in phase {self.phase}" if self.phase else "now"
            raise ResidencyError(
                f"{target} is needed on the GPU, but it is {self._where[target]} {phase}; enter a phase that has it on "
                "the GPU first (residency.enter; prepare_for_training or prepare_for_lp_inference of the worker), or "
                "move it there (the move methods of an adopted state)."
            )
        self._wait(target, hold=True)

    def require_contents(self, target: Target) -> None:
        """Does what `require` does, for code that reads or writes a target's tensors itself.

        Raises:
            ResidencyError: also if the target is streamed, since its tensors then hold no values; nothing is raised
                while `allow_access_in_place` lasts.
        """
        if target in self._in_place:
            self._check()
            return
        if Placement.STREAMED in self._targets[target].placements:
            raise ResidencyError(
                f"{target} is streamed from the host, so its tensors hold no values here; access them inside of `with "
                "offloader.streamed_state_on_host():`, or read each by the function that offloader.checkpoint_reader() "
                "returns."
            )
        self.require(target)

    def allow_access_in_place(self, targets: Iterable[Target]) -> None:
        """Let `require_contents` of targets pass wherever they are: the caller knows how to access them there.

        It lasts until they move or are required on the GPU, or until `end_access_in_place`.
        """
        self._in_place.update(targets)

    def end_access_in_place(self, target: Target) -> None:
        """End `allow_access_in_place` for a target."""
        self._in_place.discard(target)

    def wait_until_released(self, *, without: Container[Target] = ()) -> None:
        """Waits until all targets that leave the GPU, but those in `without`, have released their memory."""
        for target, placement in self._where.items():
            if placement in _LEAVES_THE_GPU and target not in without:
                self._wait(target)

    def _differing(self, phase: Phase) -> dict[Target, Placement]:
        return self._changes({target: self._table[phase][target] for target in self._targets})

    def _bytes_to_map(self) -> int:
        """Returns the GPU memory that moves which are under way have not taken yet."""
        return sum(
            max(0, self._targets[target].nbytes - self._targets[target].mapped_bytes)
            for target, last in self._last.items()
            if last.goal in _ON_GPU and not last.move.is_queued
        )

    def _changes(self, goals: Mapping[Target, Placement]) -> dict[Target, Placement]:
        return {
            target: placement
            for target, placement in goals.items()
            if placement not in (Placement.UNCHANGED, self._where[target])
        }

    def _move(self, goals: Mapping[Target, Placement], phase: Phase) -> bool:
        """Start the moves, those to the host first, and wait for targets without a lazy wait.

        Targets are dropped last, since their contents do not come back if another target cannot move.
        """
        order = sorted(
            (target for target in goals if goals[target] is not Placement.DROPPED), key=lambda t: goals[t] in _ON_GPU
        )
        sources = {target: self._where[target] for target in order}
        done: list[Target] = []
        try:
            for target in order:
                self._start(target, goals[target], phase)
                done.append(target)
            for target, placement in self._where.items():
                if placement is Placement.GPU and not self._targets[target].lazy_wait:
                    self._wait(target, hold=True)
        except NoRoomError:
            self._roll_back({target: sources[target] for target in reversed(done)}, phase)
            raise
        for target in goals:
            if goals[target] is Placement.DROPPED:
                self._start(target, Placement.DROPPED, phase)
        return bool(goals)

    def _start(self, target: Target, placement: Placement, phase: Phase) -> None:
        # A target that is offloaded again before its first use must have arrived first: hence `hold`.
        try:
            self._wait(target, hold=self._where[target] in _ON_GPU, retry=False)
        except NoRoomError:
            if self._where[target] is not placement:
                raise
        source = self._where[target]
        if source is placement:
            return
        self.end_access_in_place(target)
        if placement is not Placement.GPU and target in self._lent:
            self._lent.pop(target)()
        with self._explain_errors(target, placement, phase):
            move = self._targets[target].start(placement)
        self._last[target], self._where[target] = Started(phase, target, source, placement, move), placement
        self._meter.record_start(self._last[target])

    def _wait(self, target: Target, *, hold: bool = False, retry: bool = True) -> None:
        """Waits for a target's last move; with `hold`, makes the current stream wait.

        With `hold` and `retry`, a prefetch that found no memory is made again, since the target is needed now.
        """
        if target not in self._last:
            return
        last = self._last[target]
        try:
            with self._explain_errors(target, last.goal, last.phase):
                if hold:
                    last.move.wait_on_current_stream()
                else:
                    last.move.wait()
        except NoRoomError:
            del self._last[target]
            self._meter.forget(last.move)
            self._where[target] = last.source
            if target not in self._prefetched:
                raise
            self._prefetched.remove(target)
            if hold and retry:
                self._start(target, last.goal, last.phase)
                self._wait(target, hold=True)
        else:
            self._prefetched.discard(target)

    def _roll_back(self, sources: Mapping[Target, Placement], phase: Phase) -> None:
        for target, placement in sources.items():
            with contextlib.suppress(NoRoomError):  # then it has not moved either
                self._wait(target)
            if self._where[target] is not placement:
                self._start(target, placement, phase)
                self._wait(target, hold=placement in _ON_GPU)

    def _give_back_cache(self) -> None:
        """Releases the cache of torch's allocator to the driver, unless enough memory is free.

        With the 1.5 B model on an H200, 38 ms passed between the optimizer's last kernel and the next move when the
        cache was released, and 1 ms when it was not; the next training step takes the memory again.
        """
        if self._generator_bytes is not None:
            free = self._meter.memory().gpu_free
            if free is not None and free >= self._generator_bytes:
                return
        self._meter.give_back_cache()

    def _make_room(self, nbytes: int) -> None:
        for target in sorted(self._last, key=lambda target: self._targets[target].nbytes):
            free = self._meter.memory().gpu_free
            if free is None or free >= nbytes:
                return
            if self._where[target] in _LEAVES_THE_GPU:
                self._wait(target)

    @contextlib.contextmanager
    def _explain_errors(self, target: Target, placement: Placement, phase: Phase) -> Iterator[None]:
        """Turns an error of a move into one that says which target could not move where."""
        doing = "to the GPU" if placement in _ON_GPU else "off the GPU"
        try:
            yield
        except MEMORY_ERRORS as error:
            name = self._targets[target].name_for_error(error)
            raise NoRoomError(
                f"Cannot move {target} {doing} for phase {phase}: out of memory for {name} ({error}); "
                f"{self._meter.memory().describe()}. Targets that had already moved were moved back. Free memory "
                "with a smaller share for the generator, smaller micro-batches, or another placement in "
                "policy.residency.table."
            ) from error
        except ResidencyError:
            raise
        except RuntimeError as error:  # CUDA errors are sticky: every later call fails, too
            raise ResidencyError(
                f"Cannot move {target} {doing} for phase {phase}: {error} This process cannot continue; restart it "
                "from the last checkpoint."
            ) from error


def _require_possible(target: Target, mechanism: OffloadTarget, placement: Placement, wish: str) -> None:
    if placement is not Placement.UNCHANGED and placement not in mechanism.placements:
        known = ", ".join(sorted(mechanism.placements | {Placement.UNCHANGED}))
        raise ValueError(f"{target} does not support placement {wish}; it supports {known}.")
