"""Sends batches between processes as NumPy arrays.

Ray passes arrays without pickling their contents. Besides, megatron-core replaces a function of torch, so that a tensor
pickled in its process refers to megatron-core: the driver would have to import it, 3 s and 500 MiB, to read log-probs.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch

from nemo_offload_rl.data.batch import BatchedData


@dataclass(frozen=True)
class WireBatch:
    """Carries a `BatchedData` between processes, with NumPy arrays in place of tensors.

    Attributes:
        tensors: Column name -> (the tensor's bytes, uint8 [B, ..., bytes], and its dtype).
        lists: The other columns.
        group_size: The batch's group size.
    """

    tensors: dict[str, tuple[np.ndarray, torch.dtype]]
    lists: dict[str, list]
    group_size: int

    @classmethod
    def pack(cls, batch: BatchedData) -> Self:
        """Convert a batch, whose tensors may be on any device."""
        tensors, lists = {}, {}
        for name, column in batch.items():
            if isinstance(column, torch.Tensor):
                array = column.detach().cpu().contiguous().view(torch.uint8).numpy()
                tensors[name] = (array, column.dtype)
            else:
                lists[name] = column
        return cls(tensors, lists, batch.group_size)

    def unpack(self) -> BatchedData:
        """Returns the batch, with tensors on the host that share no memory with other objects."""
        tensors = {name: torch.from_numpy(array.copy()).view(dtype) for name, (array, dtype) in self.tensors.items()}
        batch = BatchedData(tensors | self.lists)
        batch.group_size = self.group_size
        return batch
