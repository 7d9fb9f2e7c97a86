"""The stream that a rank computes on."""

import torch


class ComputeStream:
    """Keeps a thread's work on its stream, or puts it on another one where that may not be the default.

    A captured backward pass must not touch the default stream, or it ends with cudaErrorStreamCaptureInvalidated; and
    autograd's nodes that add up gradients run on the stream that they were made on. megatron-core's training has a
    stream for these nodes alone; here everything is on one (docs/decisions/compute-stream.md).

    Args:
        device: the device that this rank computes on; a CPU has no streams.
        captures: whether CUDA graphs will be captured.
    """

    def __init__(self, device: torch.device, *, captures: bool) -> None:
        self._left: torch.cuda.Stream | None = None
        if device.type != "cuda" or not captures:
            return
        current, default = torch.cuda.current_stream(device), torch.cuda.default_stream(device)
        if current == default:
            self._left = default
            stream = torch.cuda.Stream(device)
            stream.wait_stream(default)
            torch.cuda.set_stream(stream)

    def close(self) -> None:
        """Give this thread the default stream back if it had it; what it queues then follows what it has queued."""
        if self._left is not None:
            self._left.wait_stream(torch.cuda.current_stream(self._left.device))
            torch.cuda.set_stream(self._left)
            self._left = None
