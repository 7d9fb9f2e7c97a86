"""Tests loading masters saved in another form: whole, or as remainders of bf16 parameters."""

import torch

from nemo_offload_rl.mcore.checkpoint import optimizer_loading
from nemo_offload_rl.mcore.checkpoint.optimizer_loading import join_masters, split_masters


def every_upper_half():
    """Returns float32 of every finite bf16's sign, exponent and mantissa, each with lower halves around the middle."""
    high = torch.arange(2**16, dtype=torch.int32)
    high = high[(high & 0x7F80) != 0x7F80]
    lows = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    return ((high[:, None] << 16) | lows).flatten().view(torch.float32)


def test_remainders_and_parameters_give_back_every_bit(monkeypatch):
    monkeypatch.setattr(optimizer_loading, "_PIECE", 100_000)
    masters = every_upper_half()
    params = torch.empty(masters.shape, dtype=torch.bfloat16)
    remainders = split_masters(masters, params)
    assert remainders.dtype is torch.int16
    assert torch.equal(join_masters(params, remainders).view(torch.int32), masters.view(torch.int32))
    rounded = masters.bfloat16()
    differ = params.view(torch.int16) != rounded.view(torch.int16)
    assert (masters.view(torch.int32)[differ] & 0xFFFF == 0x8000).all()  # ties: rounded up there, to even elsewhere
    assert differ.sum() == every_upper_half().numel() // 6 // 2


def test_a_parameter_without_a_remainder_is_its_own_master():
    params = torch.randn(1000).bfloat16()
    assert torch.equal(join_masters(params, torch.zeros(1000, dtype=torch.int16)), params.float())


def test_remainders_are_what_the_arithmetic_of_transformer_engine_makes_of_a_master():
    """Repeats its kernel by hand: the upper 16 bits, plus one if the lower ones begin with 1; and the lower ones."""
    master = torch.tensor([0x3F80_8000, 0x3F80_7FFF, 0x3F81_8000], dtype=torch.int32).view(torch.float32)
    params = torch.empty(3, dtype=torch.bfloat16)
    assert split_masters(master, params).tolist() == [-32768, 32767, -32768]
    assert params.view(torch.int16).tolist() == [0x3F81, 0x3F80, 0x3F82]
