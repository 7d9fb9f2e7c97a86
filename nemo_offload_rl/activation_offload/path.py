"""Which way the activations of a pass go: to which host memory, by which copies, counted by whom."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from nemo_offload_rl.activation_offload.copies import CopyEngine, CopyHandle
from nemo_offload_rl.activation_offload.host_pool import Region
from nemo_offload_rl.activation_offload.report import Tally


class HostMemory(Protocol):
    """Hands out host memory by bytes, as `PinnedHostPool` does."""

    @property
    def memory(self) -> torch.Tensor:
        """All of it: uint8 [nbytes]."""
        ...

    def take_all(self, sizes: Sequence[int]) -> list[Region] | None:
        """A region for each number of bytes; None, and nothing taken, if there is no room for all of them."""
        ...

    def give_back(self, region: Region, after: CopyHandle | None) -> None:
        """Return a region; `after` is the copy that reads it last, if it may still be under way."""
        ...


@dataclass
class OffloadPath:
    """Of the passes that run eagerly, or of those that are captured in CUDA graphs."""

    host: HostMemory
    copies: CopyEngine
    tally: Tally = field(default_factory=Tally)
