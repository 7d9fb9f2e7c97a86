"""Tests tensors whose GPU memory is released for a while."""

import math

import pytest
import torch

from nemo_offload_rl.generation.saved_memory import SavedMemory

on_each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@on_each_device
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
        saved.restore()  # must come before the next computation
        assert whole.tolist() == [0, 1, 2, 3, 4, 5, 6, number, 8, 9]
        assert other.all()
        whole[0] = 0
        saved.restore()  # a second restore does nothing


@on_each_device
@pytest.mark.parametrize("size", [0, 1, 7, 8, 4096, 4099])  # whole words of eight bytes, and others
def test_only_what_is_not_zero_is_copied_and_every_bit_comes_back(device, size):
    zeros, ones = (torch.full((size,), value, dtype=torch.uint8, device=device) for value in (0, 1))
    saved = SavedMemory([zeros, ones])
    for _ in range(2):
        saved.save()
        assert saved.host_nbytes == size  # of the ones
        zeros.fill_(255)
        ones.fill_(255)
        saved.restore()
        assert zeros.tolist() == [0] * size
        assert ones.tolist() == [1] * size


@on_each_device
@pytest.mark.parametrize("last", [-0.0, math.nan, 2.0**-149])
def test_zeros_become_other_values_and_zeros_again(device, last):
    state = torch.zeros(1001, device=device)
    saved = SavedMemory([state])
    for value, host_nbytes in ((0.0, 0), (last, 4004), (0.0, 4004), (1.0, 4004)):
        state.zero_()
        state[-1] = value
        before = state.view(torch.int32).tolist()
        saved.save()
        assert saved.host_nbytes == host_nbytes
        state.fill_(-1)
        saved.restore()
        assert state.view(torch.int32).tolist() == before
