"""Copies the tensors of a checkpoint into host memory, where no later step can change them."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate, batched

import torch

from nemo_offload_rl.memory.pinned import HostSegment, PinnedArena, cut_at_locks
from nemo_offload_rl.memory.streams import CopyStream, Event, record_current_stream
from nemo_offload_rl.memory.units import round_up

Copy = tuple[torch.Tensor, torch.Tensor]
"""Destination and source, uint8 tensors of equal length."""

_ALIGNMENT = 256
_TENSORS_AT_ONCE = 32
"""Tensors whose copies are queued together, while Python prepares the next: 20 ms for the 820 tensors of 28 layers."""


class HostSnapshot:
    """Copies tensors of a checkpoint into host memory, page-locked where there is a GPU; reuses it for the next one.

    Args:
        arena: allocates the memory, at the first snapshot and when one is larger than those before.
        device: the device of the state.
    """

    def __init__(self, arena: PinnedArena, device: torch.device) -> None:
        self._arena = arena
        self._device = device
        self._stream = CopyStream(device)
        self._segment: HostSegment | None = None
        self._helper = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint-snapshot")
        self._copying: list[Future[None]] = []

    def start(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Starts to copy tensors, after the work that is queued on the current stream.

        The tensors that the previous call returned must have been dropped, since their memory is used again.

        Args:
            tensors: tensors of the GPU or the host; nothing may change or free them before `wait` has returned.

        Returns:
            CPU tensors of the same dtypes and shapes, each the whole of its storage; `wait` waits for their contents.

        Raises:
            HostMemoryError: the host has no room for the copies.
        """
        assert not self._copying, "the copies before have not been waited for"
        sizes = [round_up(tensor.nbytes, _ALIGNMENT) for tensor in tensors]
        self._reserve(sum(sizes))
        ready = record_current_stream(self._device)
        offsets = list(accumulate(sizes, initial=0))[:-1]
        for some in batched(zip(tensors, offsets, strict=True), _TENSORS_AT_ONCE):
            pairs = [pair for tensor, offset in some for pair in self._pairs(tensor, offset)]
            if pairs:
                self._copying.append(self._helper.submit(copy_all, self._stream, pairs, ready))
        return [self._window(tensor, offset) for tensor, offset in zip(tensors, offsets, strict=True)]

    def wait(self) -> None:
        """Waits until all copies that `start` has queued have ended."""
        copying, self._copying = self._copying, []
        for queued in copying:
            queued.result()
        if copying:
            self._stream.mark().wait()

    def close(self) -> None:
        """Stops the helper thread, waits for its copies and releases the memory."""
        self._helper.shutdown(wait=True)
        self._stream.mark().wait()
        self._release()

    def _reserve(self, nbytes: int) -> None:
        if nbytes and (self._segment is None or self._segment.nbytes < nbytes):
            self._release()
            self._segment = self._arena.allocate("checkpoints", nbytes)

    def _release(self) -> None:
        if self._segment is not None:
            segment, self._segment = self._segment, None
            self._arena.release(segment)

    def _window(self, tensor: torch.Tensor, offset: int) -> torch.Tensor:
        if tensor.nbytes == 0:
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        assert self._segment is not None
        # With a storage of its own: torch.save writes the whole storage behind a view.
        return self._segment.window(offset, tensor.nbytes).view(tensor.dtype).view(tensor.shape)

    def _pairs(self, tensor: torch.Tensor, offset: int) -> list[Copy]:
        if tensor.nbytes == 0:
            return []
        assert self._segment is not None
        source = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        return [
            (self._segment.tensor[begin:end], source[begin - offset : end - offset])
            for begin, end in cut_at_locks(offset, tensor.nbytes)
        ]


def copy_all(stream: CopyStream, pairs: Sequence[Copy], ready: Event) -> None:
    """Queues copies on a stream, after an event.

    One call queues them all without the GIL: the planning thread would give the GIL back only every 5 ms, in which the
    link copies 250 MB.
    """
    stream.follow(ready)
    with torch.no_grad(), torch.cuda.stream(stream.stream):
        torch._foreach_copy_([to for to, _ in pairs], [source for _, source in pairs], non_blocking=True)
