"""Chooses the CUDA stream that a rank computes on."""

import torch


class ComputeStream:
    """Moves a thread's work from the default stream to one of its own, if CUDA graphs will be captured.

    A captured backward pass that touches the default stream fails with cudaErrorStreamCaptureInvalidated, and
    autograd's gradient-accumulation nodes run on the stream that they were created on. megatron-core's training has a
    stream for these nodes alone; here everything runs on one stream (docs/decisions/compute-stream.md).

    Args:
        device: the device that this rank computes on; a CPU has no streams.
        captures: whether CUDA graphs will be captured.
    """

    def __init__(self, device: torch.device, *, captures: bool) -> None:
        self._replaced: torch.cuda.Stream | None = None
        if device.type != "cuda" or not captures:
            return
        current, default = torch.cuda.current_stream(device), torch.cuda.default_stream(device)
        if current == default:
            self._replaced = default
            stream = torch.cuda.Stream(device)
            stream.wait_stream(default)
            torch.cuda.set_stream(stream)

    def close(self) -> None:
        """Make the default stream current again if it was replaced; it waits for the work queued so far."""
        if self._replaced is not None:
            self._replaced.wait_stream(torch.cuda.current_stream(self._replaced.device))
            torch.cuda.set_stream(self._replaced)
            self._replaced = None
