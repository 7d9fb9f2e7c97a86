"""Batches on their way between processes, as NumPy arrays.

Ray hands arrays over without pickling their contents. And megatron-core replaces a function of torch's, so that a
tensor pickled beside it names megatron-core: the driver would import all of that, 3 s and 500 MiB, to read log-probs.
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
        group_size: That of the batch.
    """

    tensors: dict[str, tuple[np.ndarray, torch.dtype]]
    lists: dict[str, list]
    group_size: int

    @classmethod
    def pack(cls, batch: BatchedData) -> Self:
        """Take over a batch, whose tensors may be on any device."""
        tensors, lists = {}, {}
        for name, column in batch.items():
            if isinstance(column, torch.Tensor):
                array = column.detach().cpu().contiguous().view(torch.uint8).numpy()
                tensors[name] = (array, column.dtype)
            else:
                lists[name] = column
        return cls(tensors, lists, batch.group_size)

    def unpack(self) -> BatchedData:
        """The batch, with tensors on the host that share no memory with anything else."""
        tensors = {name: torch.from_numpy(array.copy()).view(dtype) for name, (array, dtype) in self.tensors.items()}
        batch = BatchedData(tensors | self.lists)
        batch.group_size = self.group_size
        return batch
