"""The reference policy's weights (KL penalty above 0): a host copy that is swapped in for its log-probs."""

import contextlib
from collections.abc import Iterable, Iterator

import torch


class ReferenceWeights:
    """The weights a run started from, kept on the host and swapped into the model for a while.

    Parameter objects and their addresses stay, so that optimizer, DDP buffers and captured graphs do not notice.

    Args:
        parameters: the model's parameters; what they hold now is the reference.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._reference = [self._to_host(p) for p in self._parameters]
        self._current = [torch.empty_like(host) for host in self._reference]

    @staticmethod
    def _to_host(parameter: torch.nn.Parameter) -> torch.Tensor:
        host = torch.empty(parameter.shape, dtype=parameter.dtype, pin_memory=torch.cuda.is_available())
        return host.copy_(parameter.detach())

    @contextlib.contextmanager
    @torch.no_grad()
    def swapped_in(self) -> Iterator[None]:
        """Compute with the reference weights; the policy's own come back at the end, whatever happens."""
        for parameter, current in zip(self._parameters, self._current, strict=True):
            current.copy_(parameter, non_blocking=True)
        try:
            for parameter, reference in zip(self._parameters, self._reference, strict=True):
                parameter.copy_(reference, non_blocking=True)
            yield
        finally:
            for parameter, current in zip(self._parameters, self._current, strict=True):
                parameter.copy_(current, non_blocking=True)
            torch.cuda.synchronize()
