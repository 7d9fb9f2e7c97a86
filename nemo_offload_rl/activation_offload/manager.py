"""Offloads the tensors that autograd saves inside chosen modules, and prefetches them for the backward pass.

megatron-core's layers mark the modules: they call a manager at the start and the end ("commit") of a group, which is
one module's forward pass in one layer, and autograd's saved-tensor hooks pass on the tensors saved in between. This
manager replaces megatron-core's own (docs/decisions/activation-manager.md says why). The life of a storage:

    saved -> its group commits -> the last group of its layer commits: copied to the host
          -> the compute stream has waited for that copy: the GPU memory is dropped
          -> a group before it in the backward pass begins: copied back -> unpacked: the compute stream waits -> used

Results do not depend on a plan made ahead, so micro-batches may change in number and length at any time. Three rules
keep the results right, each enforced in one place:

- GPU memory is held until the compute stream has waited for the copy out of it (`InflightOffloads`);
- host memory is reused only after the copy out of it: the next copy into it follows its handle (`PinnedHostPool`);
- unpacking waits for the copy back to the GPU, which follows the copy to the host (`SavedStorage.fetch`).

Passes that CUDA graphs capture take these steps once, and their replays repeat the copies (`Captures`).
"""

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from nemo_offload_rl.activation_offload.copies import CopyEngine
from nemo_offload_rl.activation_offload.graphs import Captures
from nemo_offload_rl.activation_offload.groups import (
    Chunk,
    Group,
    InflightOffloads,
    PackedTensor,
    PendingOffload,
    Saved,
)
from nemo_offload_rl.activation_offload.report import StepReport, Tally
from nemo_offload_rl.activation_offload.schedule import ActivationOptions, Profile
from nemo_offload_rl.activation_offload.storage import (
    ExcludedStorages,
    OffloadPath,
    PinnedHostPool,
    SavedStorage,
    as_resident,
    may_move,
    prefetch,
    unpack_resident,
)


class ActivationOffloader:
    """Offloads activations for megatron-core's layers; implements what they use of `PipelineOffloadManager`.

    Args:
        options: what to offload.
        memory: uint8 [nbytes] of host memory, for the activations of all micro-batches in flight.
        copies: makes the copies.
        excluded: storages that are never offloaded: those of parameters and buffers.
    """

    cuda_graph_stream: Any = None
    """The stream on which graphs with copies inside are replayed, one after the other."""
    cuda_graph_event: Any = None
    """Recorded in each of these graphs where its computation ends; copies may still be under way then."""

    def __init__(
        self,
        options: ActivationOptions,
        memory: torch.Tensor,
        copies: CopyEngine,
        excluded: Iterable[torch.UntypedStorage] = (),
    ) -> None:
        self.options = options
        self.host_pool = PinnedHostPool(memory)
        self.copies = copies
        self.captures = Captures(self.host_pool, copies)
        self.report = StepReport({}, 0, 0, 0)
        """The report of the last step."""
        self._excluded = ExcludedStorages(excluded)
        self._enabled = True
        self._path = OffloadPath(self.host_pool, copies)
        self._chunk: Chunk | None = None
        self._chunks: deque[Chunk] = deque()
        self._active: list[tuple[Chunk, Group] | None] = []
        self._inflight = InflightOffloads(copies)
        self._profiles: dict[int, Profile] = {}
        self._resident: weakref.WeakSet[SavedStorage] = weakref.WeakSet()
        self._hooks = saved_tensors_hooks(self.save, self.unpack)
        self._delayed: list[Callable[[], None]] = []
        self._saves_aliases = False
        self._in_replay = False  # megatron-core sets it

    def offloaded_modules(self) -> set[str]:
        """Returns the modules that the next pass offloads, according to the profiles of earlier passes."""
        return set().union(*(profile.offloaded_modules() for profile in self._profiles.values()))

    # Methods that megatron-core calls, with its names.

    def init_model_chunk_offload_handler(
        self, pp_rank: int, vp_size: int | None, vp_stage: int | None, *_: Any, **__: Any
    ) -> None:
        """Begin a micro-batch's forward pass through a model chunk."""
        self._end_forward()
        if not (self._enabled and torch.is_grad_enabled()):
            return
        self._chunk = Chunk(self, vp_stage or 0, self._path, self.options.fraction)
        self._chunks.append(self._chunk)
        self._path.tally.num_chunks += 1

    def pop_forward_chunk(self, name: str) -> None:
        """Start a group: tensors saved from now on are part of it.

        It returns no chunk, for which megatron-core would put a node into the autograd graph: this manager has nothing
        to do where the group's backward pass ends, and a node costs the host some time in both passes.
        """
        chunk = self.cur_forward_chunk()
        if chunk is not None:
            chunk.start_group(name)

    def cur_forward_chunk(self) -> Chunk | None:
        """Return the chunk whose forward pass is under way; None if nothing is saved for a backward pass."""
        if not (self._enabled and torch.is_grad_enabled()):
            return None
        return self._captured_chunk() if self.copies.is_capturing() else self._chunk

    def __enter__(self) -> None:
        chunk = self.cur_forward_chunk()
        self._active.append((chunk, chunk.open[-1]) if chunk is not None else None)
        if chunk is not None:
            self._hooks.__enter__()

    def __exit__(self, *_: object) -> None:
        if self._active.pop() is not None:
            self._hooks.__exit__()

    @staticmethod
    def mark_not_offload(tensor: torch.Tensor | None) -> None:
        """Mark a tensor to stay on the GPU."""
        if tensor is not None:
            tensor._do_not_offload = True  # type: ignore[attr-defined]

    def disable_offload(self) -> None:
        """Switch offloading off, for instance while Transformer Engine warms up before a capture."""
        self._enabled = False

    def enable_offload(self) -> None:
        """Switches offloading on again."""
        self._enabled = True

    @contextmanager
    def saving_to_recompute(self) -> Iterator[None]:
        """Treat tensors saved inside as aliases: selective recomputation saves its inputs detached."""
        was, self._saves_aliases = self._saves_aliases, True
        try:
            yield
        finally:
            self._saves_aliases = was

    def exclude_recomputed(self, storage: torch.UntypedStorage) -> None:
        """Never offload a storage that selective recomputation empties, and fills again in the backward pass."""
        if self.cur_forward_chunk() is not None:
            self._excluded.add_recomputed(storage)

    def flush_delayed_groups(self) -> None:
        """Commit the groups whose commits waited for a graph's replay."""
        delayed, self._delayed = self._delayed, []
        for commit in delayed:
            commit()

    def reset(self) -> None:
        """End a step after its schedule has run or failed, and make its report."""
        self._chunk = None  # its backward pass has not begun, and will not
        self._in_replay = False  # a layer that failed after its replay leaves it True
        try:
            self._inflight.abandon()
        finally:
            for chunk in filter(None, (*self._chunks, self.captures.chunk)):
                chunk.abandon()
            self._chunks.clear()
            self._active.clear()
            self._delayed.clear()
            self._excluded.forget_recomputed()
            self.captures.chunk = None
        if self.cuda_graph_stream is not None:  # copies of the last graphs may be under way
            torch.cuda.current_stream().wait_stream(self.cuda_graph_stream)
        if self._path.tally.num_chunks:  # not after forward-only passes, nor after captures
            tally, self._path.tally = self._path.tally, Tally()
            tally.add(self.captures.take_report())
            kept = self.captures.regions.nbytes
            self.report = StepReport(
                tally.modules, tally.num_chunks, self.host_pool.nbytes, self.host_pool.peak_bytes, kept
            )
            self.host_pool.forget_reached()  # here, while the GPU has work, and not at the start of the next step
            self.host_pool.peak_bytes = self.host_pool.used_bytes

    def close(self) -> None:
        """Free the host memory, once no copy uses it; nothing can be offloaded afterwards."""
        with ExitStack() as stack:  # each of them, from the last to the first, even if a failed GPU raises
            stack.callback(self.host_pool.close)
            if self.cuda_graph_stream is not None:
                stack.callback(self.cuda_graph_stream.synchronize)
            stack.callback(self.copies.synchronize)
            stack.callback(self.reset)

    def end_group(self, chunk: Chunk, name: str, *, delay: bool) -> None:
        """End a group: commit it now, or after a graph's replay that is running if `delay` (`flush_delayed_groups`)."""
        if delay and self._in_replay:
            self._delayed.append(lambda: chunk.end_group(name))
        else:
            chunk.end_group(name)

    # CUDA graphs.

    def prepare_capture(self) -> None:
        """Prepare for captures; the GPU must be idle, with no copy under way."""
        self.host_pool.forget_reached()

    def exclude_graph_input(self, storage: torch.UntypedStorage) -> None:
        """Never offload a graph's input: each replay reads it at this address."""
        self.captures.graph_inputs.add(storage._cdata)

    def end_capture(self, *, forward: bool) -> None:
        """End a layer's captured pass; must be the last call in it."""
        self.captures.end(forward=forward)

    def count_replay(self) -> None:
        """Count a replay of a layer's forward graph with copies inside."""
        self.captures.count_replay()

    def forget_captures(self) -> None:
        """Drop all captures after their graphs were deleted or one failed, perhaps in Transformer Engine's warm-up."""
        self.captures.abandon()
        self.captures = Captures(self.host_pool, self.copies)
        self._enabled = True

    def _captured_chunk(self) -> Chunk:
        if self.captures.chunk is None:
            self.captures.chunk = Chunk(self, 0, self.captures.path, self.options.fraction)  # stage 0 is the only one
        return self.captures.chunk

    # Forward.

    def commit(self, chunk: Chunk, group: Group) -> None:
        """Decide whether a group whose forward pass is queued is offloaded; request copies at the end of a layer."""
        saved, fresh = group.settle()
        is_captured = chunk.path is self.captures.path
        group.report.distinct_bytes += group.nbytes
        profile = self._profiles.get(chunk.stage)
        is_resident = bool(fresh) and self._is_resident(profile, chunk, group, fresh)
        for stored in fresh:
            stored.is_resident = is_resident
        for one in saved:
            if one.stored.is_resident:
                one.make_resident()
            elif one.stored not in fresh:  # the group that saved this storage first offloads it
                one.release()
        if is_resident:
            group.report.resident_bytes += group.nbytes
        elif fresh:
            # A new layer, and the last one made no request: in the profiled pass it was too short to be offloaded.
            if any(one.group.name == group.name for one in chunk.pending):
                chunk.offload(self._inflight)
            chunk.pending.append(PendingOffload(group, fresh, [one for one in saved if one.stored in fresh]))
        if is_captured:
            chunk.offload(self.captures.inflight)  # the wait follows at the end of the graph
            return
        max_inflight = self.options.max_inflight
        if profile is None or max_inflight is not None or group.key in profile.asks:
            chunk.offload(self._inflight)
        in_flight = len(self.options.modules) if profile is None else profile.per_layer * profile.lead
        self._inflight.release(max_held=in_flight if max_inflight is None else max_inflight)

    def _is_resident(self, profile: Profile | None, chunk: Chunk, group: Group, fresh: Sequence[SavedStorage]) -> bool:
        offloads = None if profile is None else profile.offloads.get(group.key)
        if offloads is None:  # the profile does not have its size
            offloads = chunk.pace.offloads(group.nbytes)
        if not offloads:
            return True
        limit = self.options.resident_bytes
        if limit and sum(stored.nbytes for stored in self._resident) + group.nbytes <= limit:
            self._resident.update(fresh)
            return True
        return False

    def drain(self) -> None:
        """Makes the caller's stream wait for all copies to the host, and drops the GPU memory that they read.

        Called before the logits are computed: most memory is in use for them and the loss.
        """
        self.flush_delayed_groups()  # the last layer's: no later replay commits them
        if self._chunk is not None:
            self._chunk.offload(self._inflight)
        self._inflight.release(max_held=0)

    def _end_forward(self) -> None:
        chunk, self._chunk = self._chunk, None
        if chunk is not None:
            self.flush_delayed_groups()
        if chunk is None or not chunk.groups:
            return
        chunk.offload(self._inflight)
        chunk.num_not_prefetched = len(chunk.groups)
        profile = self._profiles.get(chunk.stage)
        is_whole = not self.captures.regions.nbytes  # a pass with graph replays shows only its eager groups
        if profile is None or (is_whole and profile.is_outdated_by(chunk.groups)):
            has_margin = chunk.stage == self.options.margin_stage
            profile = Profile(chunk.groups, self.options.fraction, has_margin=has_margin)
            if profile.per_layer:  # else the pass was too short for a profile
                self._profiles[chunk.stage] = profile
        chunk.lead = profile.lead

    @contextmanager
    def group(self, name: str) -> Iterator[Group]:
        """Treat the tensors that autograd saves inside, or `save` is given, as one module's; gradients are on."""
        chunk = self.cur_forward_chunk()
        assert chunk is not None
        chunk.start_group(name)
        with self:
            yield chunk.open[-1]
        self.end_group(chunk, name, delay=False)

    def save(self, tensor: torch.Tensor) -> Saved:
        """Returns what `unpack` needs to return this tensor in the backward pass, from the GPU or the host."""
        # Cheap checks first: most tensors that modules save are small or parameters.
        active = self._active[-1]
        assert active is not None
        chunk, group = active
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
            return as_resident(tensor, group.name)
        storage = tensor.untyped_storage()
        number = storage._cdata
        if number in self._excluded.addresses or number in self.captures.graph_inputs:
            return as_resident(tensor, group.name)
        nbytes = storage.nbytes()
        if nbytes < self.options.min_elements * tensor.element_size():
            group.report.small_bytes += nbytes
            return as_resident(tensor, group.name)
        if not may_move(tensor):
            return as_resident(tensor, group.name)
        known = chunk.storages.get(number)
        stored = known() if known is not None else None
        if stored is None or stored.version != tensor._version:  # a new storage, or changed in place since
            stored = SavedStorage(storage, tensor._version, group.report, chunk.path)
            chunk.storages[number] = weakref.ref(stored)
        elif stored.report is not group.report:
            group.report.duplicate_bytes += nbytes
        saved = PackedTensor(tensor, group, stored, is_alias=self._saves_aliases)
        group.saved.append(saved)
        return saved

    # Backward.

    def reach(self, group: Group) -> None:
        """Begins a group's backward pass, if it has not begun; for a group whose tensors may all have stayed."""
        if group.in_backward:
            return
        group.in_backward = True
        chunk = group.chunk()
        if chunk is not None:
            self.begin_backward(chunk, group)

    def begin_backward(self, chunk: Chunk, group: Group) -> None:
        """Prefetch for the groups that follow one whose backward pass is about to be queued."""
        if group.index < 0:  # its commit is delayed
            return
        self._end_forward()  # of this chunk or, on a pipeline's earlier stages, of a later one
        if chunk.num_not_prefetched is None:
            chunk.num_not_prefetched = len(chunk.groups)
        if group.index > chunk.prefetch_from:
            return
        first = group.index - chunk.lead * chunk.num_modules
        if first < chunk.num_not_prefetched:
            self._prefetch_groups(chunk, first, group)
        if first < 0:
            follower = self._next_backward(chunk)
            if follower is not None:
                self._prefetch_groups(follower, len(follower.groups) + first, group)
        if group.index == 0 and chunk in self._chunks:
            self._chunks.remove(chunk)

    def _next_backward(self, chunk: Chunk) -> Chunk | None:
        """Return the oldest other chunk of this stage whose forward pass is done: 1F1B takes them in order."""
        return next(
            (c for c in self._chunks if c is not chunk and c.num_not_prefetched and c.stage == chunk.stage), None
        )

    def _prefetch_groups(self, chunk: Chunk, first: int, begun: Group) -> None:
        """Request the copies of groups from `first` on that are not requested yet; those of `begun` count as late."""
        assert chunk.num_not_prefetched is not None
        due = chunk.groups[max(0, first) : chunk.num_not_prefetched]
        if not due:
            return
        requests = [[group] for group in reversed(due)]  # one request each, so that each can be waited for
        if len(due) == 1:
            # Prefetches are in step with the backward pass, `lead` layers ahead of it: then one request takes a whole
            # layer. Each request costs host time, and one a module would cost it as often as a layer has modules.
            start = max(0, due[0].index - chunk.num_modules + 1)
            requests = [chunk.groups[start : chunk.num_not_prefetched][::-1]]
        for groups in requests:
            on_host_only: dict[SavedStorage, bool] = {}
            for group in groups:
                for stored in group.on_host_only():
                    on_host_only.setdefault(stored, group is begun)
            prefetch(list(on_host_only))
            for stored, is_late in on_host_only.items():
                stored.report.count_prefetch(stored.nbytes, is_late=is_late)
        chunk.num_not_prefetched = requests[-1][-1].index

    def unpack(self, packed: Saved) -> torch.Tensor:
        """Returns a saved tensor; the first one of a group requests the copies of those that follow.

        Raises:
            InPlaceError: it was never offloaded, and has changed.
        """
        if not isinstance(packed, PackedTensor):
            return unpack_resident(packed)
        self.reach(packed.group)
        if packed.stored.storage is None:
            prefetch([packed.stored])
            packed.stored.report.count_prefetch(packed.stored.nbytes, is_late=True)
        return packed.unpacked()
