import pytest
import torch

from nemo_offload_rl.refit import checksum
from nemo_offload_rl.refit.checksum import merge_checksums, require_equal_checksums, tensor_checksum

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.float8_e4m3fn]


def _reference(tensor: torch.Tensor) -> int:
    """The same hash in Python's unbounded integers, element by element (arithmetic shifts on signed 64-bit values)."""

    def wrap(value: int) -> int:
        return (value + (1 << 63)) % (1 << 64) - (1 << 63)

    words = tensor.contiguous().view(-1).view(checksum._WORD_DTYPES[tensor.element_size()]).tolist()
    total = 0
    for index, word in enumerate(words):
        mixed = wrap((index + 1) * 0x9E3779B97F4A7C15 + word)
        mixed = wrap((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9)
        mixed = wrap((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB)
        total = wrap(total + (mixed ^ (mixed >> 31)))
    return total


@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_the_hash_worked_out_in_unbounded_integers(dtype):
    tensor = torch.randn(7, 5, generator=torch.Generator().manual_seed(0)).mul(9).abs().to(dtype)
    assert tensor_checksum(tensor) == _reference(tensor)


@pytest.mark.parametrize("dtype", DTYPES)
def test_changes_with_one_bit_and_with_the_order(dtype):
    tensor = torch.arange(1, 25).view(4, 6).to(dtype)
    one_bit = tensor.clone()
    one_bit.view(torch.uint8).view(-1)[5] ^= 1
    swapped = tensor.clone()
    swapped[0, 0], swapped[3, 5] = tensor[3, 5], tensor[0, 0]
    rolled = torch.cat([tensor[1:], tensor[:1]])
    sums = [tensor_checksum(t) for t in (tensor, one_bit, swapped, rolled, tensor.T)]
    assert len(set(sums)) == len(sums)


def test_chunking_and_strides_do_not_change_it(monkeypatch):
    tensor = torch.randn(33, 17, 3)
    views = [tensor.permute(2, 0, 1), tensor[:, ::2], tensor[..., 1]]
    whole = [tensor_checksum(t) for t in (tensor, *(v.contiguous() for v in views))]
    monkeypatch.setattr(checksum, "CHUNK_ELEMENTS", 100)
    assert [tensor_checksum(t) for t in (tensor, *views)] == whole


def test_scalars_and_empty_tensors_and_the_sign_of_zero():
    assert tensor_checksum(torch.tensor([0.0])) != tensor_checksum(torch.tensor([-0.0]))
    assert tensor_checksum(torch.tensor(1.5)) == tensor_checksum(torch.tensor([1.5]))
    assert tensor_checksum(torch.empty(0, 4)) == 0
    assert tensor_checksum(torch.nn.Parameter(torch.ones(3))) == tensor_checksum(torch.ones(3))


@pytest.mark.gpu
def test_is_the_same_on_the_gpu():
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    for dtype in (torch.float32, torch.bfloat16):
        tensor = torch.randn(3000, 1001).to(dtype)
        assert tensor_checksum(tensor.cuda()) == tensor_checksum(tensor)


def test_a_disagreement_names_the_tensors():
    require_equal_checksums({"a": 1, "b": 2}, {"a": 1, "b": 2})
    with pytest.raises(RuntimeError, match=r"1 missing \(c\); 1 not sent \(d\); 1 different \(b\)"):
        require_equal_checksums({"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 5, "d": 3})


def test_what_ranks_have_sent_is_put_together_and_compared():
    assert merge_checksums([{"a": 1}, {}, {"b": 2, "a": 1}]) == {"a": 1, "b": 2}
    with pytest.raises(RuntimeError, match="Two ranks of the policy sent different weights under the name b"):
        merge_checksums([{"a": 1, "b": 2}, {"b": 3}])
