import pytest
import torch
from support.mixed_weights import MIXED, require_mixed
from torch._subclasses.fake_tensor import FakeTensorMode

from nemo_offload_rl.refit import checksum
from nemo_offload_rl.refit.checksum import merge_checksums, require_equal_checksums, tensor_checksum
from nemo_offload_rl.refit.plan import BucketLayout, ExportPlan, buffer_sizes
from nemo_offload_rl.refit.recorder import CaptureError, CudaRecorder, RepeatableOnly, addresses_of, why_not_recorded

# A tensor that is larger than the limit of 10 has a bucket of its own.
BUCKETS = [
    ((4, 6, 1, 9, 1), [["t0", "t1"], ["t2", "t3"], ["t4"]]), ((), []),
    ((3, 50, 3), [["t0"], ["t1"], ["t2"]]), ((50, 3, 3), [["t0"], ["t1", "t2"]]),
]  # fmt: skip


@pytest.mark.parametrize(("num_bytes", "buckets"), BUCKETS)
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


OFF_PLAN = [
    ([MIXED[1], MIXED[0]], r"yields 'b' as torch.bfloat16 \[7, 3\] where the first one yielded 'a'"),
    ([("a", torch.zeros(5, 3)), MIXED[1]], r"yields 'a' as torch.float32 \[5, 3\] where .* 'a' .* \[3, 5\]"),
    ([("a", torch.zeros(3, 5).half()), MIXED[1]], r"yields 'a' as torch.float16"),
    (MIXED[:1], "yields no further tensor where the first one yielded 'b'"),
    (MIXED[:3], "yields 'scalar' .* where the first one yielded no further tensor"),
]


@pytest.mark.parametrize(("weights", "message"), OFF_PLAN)
def test_an_export_that_leaves_its_plan_is_stopped(weights, message):
    plan = ExportPlan.of(MIXED[:2])
    with pytest.raises(ValueError, match=message):
        list(plan.checked(weights))


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


NOT_REPEATED = [
    (lambda gpu, cpu: gpu[cpu.long()], r"aten\.index.* uses both host memory and the GPU"),
    (lambda gpu, cpu: gpu * cpu[0], r"aten\.mul.* uses both host memory and the GPU"),
    (lambda gpu, cpu: gpu.cpu(), r"uses both host memory and the GPU"),
    (lambda gpu, cpu: cpu.copy_(gpu), r"aten\.copy_.* uses both host memory and the GPU"),
    (lambda gpu, cpu: gpu.sum().item(), r"aten\._local_scalar_dense.* waits for a result"),
]


@pytest.mark.parametrize(("work", "why"), NOT_REPEATED)
def test_what_a_graph_could_not_repeat_is_refused(work, why):
    with FakeTensorMode(allow_non_fake_inputs=True), RepeatableOnly():
        gpu, cpu = torch.zeros(4, device="cuda"), torch.zeros(2)
        with pytest.raises(CaptureError, match=why):
            work(gpu, cpu)


def test_what_stays_on_one_device_passes():
    with FakeTensorMode(), RepeatableOnly():
        gpu, cpu = torch.zeros(4, 2, device="cuda"), torch.zeros(2)
        assert torch.cat([gpu.T.contiguous(), gpu.view(2, 4) + 1]).shape == (4, 4)
        assert gpu[gpu[:, 0].long()].shape == (4, 2)
        assert (cpu + 1).shape == (2,)


def test_weights_on_a_cpu_or_without_an_address_are_not_recorded():
    assert why_not_recorded([]) == why_not_recorded([torch.zeros(1)]) == "the weights are not on a GPU"
    with FakeTensorMode():
        fake = torch.zeros(1, device="cuda")
    assert why_not_recorded([fake]) == "a weight is a FakeTensor, whose address is not known"
    tensor = torch.zeros(4)
    assert addresses_of([tensor, tensor[1:]]) == (tensor.data_ptr(), tensor.data_ptr() + 4)


@pytest.mark.gpu
def test_a_failed_capture_leaves_the_gpu_as_it_was():
    recorder = CudaRecorder()
    source, result = torch.arange(8.0, device="cuda"), torch.zeros(8, device="cuda")
    stream = torch.cuda.current_stream()

    def synchronizes():
        result.copy_(source * 2)
        torch.cuda.synchronize()

    for bad in (synchronizes, lambda: result.fill_(source.sum().item())):
        with pytest.raises(CaptureError):
            recorder.record(bad)
        assert torch.cuda.current_stream() == stream
        assert not torch.cuda.is_current_stream_capturing()
        assert torch.rand(8, device="cuda").cpu().pin_memory().unique().numel() > 1
    recorder.forget()
    replay = recorder.record(lambda: result.copy_((source * 2).flip(0)))
    for value in (1.0, 5.0):
        source.fill_(value)
        replay()
        assert result.eq(2 * value).all()
    del replay
    replay = recorder.record(lambda: result.copy_(source + 1))  # in another pool than that of the graph that is gone
    replay()
    assert result.eq(6).all()
    del replay
    recorder.forget()
    big = torch.empty(2**28, device="cuda")  # the allocator still gives and takes
    del big
    torch.cuda.empty_cache()
