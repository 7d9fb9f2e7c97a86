import pytest
import torch

from nemo_offload_rl.refit.interface import bucketize


def _named(*num_bytes: int):
    return [(f"t{index}", torch.zeros(size, dtype=torch.uint8)) for index, size in enumerate(num_bytes)]


def _names(buckets):
    return [[name for name, _ in bucket] for bucket in buckets]


def test_buckets_fill_up_to_the_limit_and_keep_the_order():
    assert _names(bucketize(_named(4, 6, 1, 9, 1), 10)) == [["t0", "t1"], ["t2", "t3"], ["t4"]]


def test_a_larger_tensor_is_a_bucket_of_its_own():
    assert _names(bucketize(_named(3, 50, 3), 10)) == [["t0"], ["t1"], ["t2"]]
    assert _names(bucketize(_named(50), 10)) == [["t0"]]


def test_nothing_gives_no_bucket():
    assert list(bucketize([], 10)) == []


def test_tensors_are_drawn_only_as_needed():
    drawn = []

    def weights():
        for name, tensor in _named(6, 6, 6):
            drawn.append(name)
            yield name, tensor

    buckets = bucketize(weights(), 10)
    next(buckets)
    assert drawn == ["t0", "t1"]


def test_a_bucket_size_of_zero_is_refused_at_once():
    with pytest.raises(ValueError, match="must be positive"):
        bucketize(_named(1), 0)
