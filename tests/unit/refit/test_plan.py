import pytest
import torch
from support.mixed_weights import MIXED, require_mixed

from nemo_offload_rl.refit.plan import BucketLayout, ExportPlan, buffer_sizes


@pytest.mark.parametrize(
    ("num_bytes", "buckets"),
    [
        ((4, 6, 1, 9, 1), [["t0", "t1"], ["t2", "t3"], ["t4"]]),
        ((), []),
        ((3, 50, 3), [["t0"], ["t1"], ["t2"]]),  # a larger tensor has a bucket of its own
        ((50, 3, 3), [["t0"], ["t1", "t2"]]),
    ],
)
def test_buckets_fill_up_to_the_limit_and_keep_the_order(num_bytes, buckets):
    plan = ExportPlan.of((f"t{index}", torch.zeros(size, dtype=torch.uint8)) for index, size in enumerate(num_bytes))
    assert plan.num_bytes == sum(num_bytes)
    assert [[spec.name for spec in bucket.tensors] for bucket in plan.buckets(10)] == buckets
    with pytest.raises(ValueError, match="must be positive"):
        plan.buckets(0)


@pytest.mark.parametrize(
    ("num_bytes", "sizes"), [((64, 640, 128, 0, 192), [192, 640]), ((64,), [64]), ((0, 64), [1, 64]), ((), [])]
)
def test_buckets_alternate_between_buffers(num_bytes, sizes):
    assert buffer_sizes([BucketLayout((), (), size) for size in num_bytes], 2) == sizes


def test_every_tensor_has_its_place_in_a_buffer():
    plan = ExportPlan.of(MIXED)
    assert plan.num_bytes == 60 + 42 + 4 + 0 + 5 + 96
    (bucket,) = plan.buckets(1000)
    assert bucket.offsets == (0, 64, 128, 192, 192, 256)
    assert bucket.num_bytes == 256 + 128
    buffer = torch.full((bucket.num_bytes,), 7, dtype=torch.uint8)
    for (_, slot), (_, tensor) in zip(bucket.views(buffer), MIXED, strict=True):
        slot.copy_(tensor)
    require_mixed(dict(bucket.views(buffer)))


def test_an_export_that_keeps_to_its_plan_is_passed_on_as_it_is_drawn():
    drawn = []

    def weights():
        for name, tensor in MIXED:
            drawn.append(name)
            yield name, tensor

    checked = ExportPlan.of(MIXED).checked(weights())
    assert next(checked)[1] is MIXED[0][1]
    assert drawn == ["a"]
    assert [name for name, _ in checked] == [name for name, _ in MIXED[1:]]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([MIXED[1], MIXED[0]], r"yields 'b' as torch.bfloat16 \[7, 3\] where the first one yielded 'a'"),
        ([("a", torch.zeros(5, 3)), MIXED[1]], r"yields 'a' as torch.float32 \[5, 3\] where .* 'a' .* \[3, 5\]"),
        ([("a", torch.zeros(3, 5).half()), MIXED[1]], r"yields 'a' as torch.float16"),
        (MIXED[:1], "yields no further tensor where the first one yielded 'b'"),
        (MIXED[:3], "yields 'scalar' .* where the first one yielded no further tensor"),
    ],
)
def test_an_export_that_leaves_its_plan_is_stopped(weights, message):
    plan = ExportPlan.of(MIXED[:2])
    with pytest.raises(ValueError, match=message):
        list(plan.checked(weights))
