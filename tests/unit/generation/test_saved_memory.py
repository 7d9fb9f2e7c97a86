"""Tensors whose GPU memory goes for a while."""

import pytest
import torch

from nemo_offload_rl.generation.saved_memory import SavedMemory


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_whole_storages_come_back_to_their_addresses(device):
    whole = torch.arange(10, device=device)
    other = torch.ones(3, 2, dtype=torch.bool, device=device)
    saved = SavedMemory([whole[3:5], whole[:2], other.T])
    assert saved.nbytes == 10 * 8 + 6
    saved.restore()  # nothing has been saved
    for number in range(2):
        whole[7] = number
        saved.save()
        whole.zero_()
        other.zero_()
        saved.restore()  # comes before what is computed next
        assert whole.tolist() == [0, 1, 2, 3, 4, 5, 6, number, 8, 9]
        assert other.all()
        whole[0] = 0
        saved.restore()  # only once
