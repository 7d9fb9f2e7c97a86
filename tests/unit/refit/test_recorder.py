"""What may be recorded as a CUDA graph; fake tensors say where they would be, also without a GPU."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from nemo_offload_rl.refit.recorder import CaptureError, CudaRecorder, RepeatableOnly, addresses_of, why_not_recorded


@pytest.mark.parametrize(
    ("work", "why"),
    [
        (lambda gpu, cpu: gpu[cpu.long()], r"aten\.index.* uses both host memory and the GPU"),
        (lambda gpu, cpu: gpu * cpu[0], r"aten\.mul.* uses both host memory and the GPU"),
        (lambda gpu, cpu: gpu.cpu(), r"uses both host memory and the GPU"),
        (lambda gpu, cpu: cpu.copy_(gpu), r"aten\.copy_.* uses both host memory and the GPU"),
        (lambda gpu, cpu: gpu.sum().item(), r"aten\._local_scalar_dense.* waits for a result"),
    ],
)
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
