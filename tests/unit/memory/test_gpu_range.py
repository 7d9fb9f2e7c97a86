import gc

import psutil
import pytest
import torch

from nemo_offload_rl.memory.gpu_range import CHUNK_BYTES, MIB, GpuRange, HostRange, OutOfGpuMemoryError, make_range

CPU = torch.device("cpu")


def rss() -> int:
    return psutil.Process().memory_info().rss


def map_all(gpu_range: GpuRange) -> None:
    for index in range(len(gpu_range.chunks)):
        gpu_range.map(index)


def test_chunks_cover_the_range_and_the_last_is_what_is_left():
    gpu_range = make_range(5 * MIB + 3, CPU, 2 * MIB)
    assert gpu_range.chunks == (slice(0, 2 * MIB), slice(2 * MIB, 4 * MIB), slice(4 * MIB, 5 * MIB + 3))
    assert gpu_range.nbytes == gpu_range.tensor.numel() == 5 * MIB + 3
    assert gpu_range.mapped_bytes == 0
    gpu_range.map(2)
    gpu_range.map(0)
    with pytest.raises(AssertionError, match="chunk 0 is mapped already"):
        gpu_range.map(0)
    assert gpu_range.mapped_bytes == 3 * MIB + 3
    gpu_range.tensor[4 * MIB :].fill_(1)
    gpu_range.unmap(0)  # whose last page does not reach into another chunk
    with pytest.raises(AssertionError, match="chunk 0 is not mapped"):
        gpu_range.unmap(0)
    assert gpu_range.mapped_bytes == MIB + 3
    assert gpu_range.tensor[4 * MIB :].eq(1).all()
    gpu_range.close()


def test_a_chunk_alone_can_be_used_and_given_back():
    gpu_range = make_range(64 * MIB, CPU, 16 * MIB)
    address = gpu_range.tensor.data_ptr()
    map_all(gpu_range)
    gpu_range.tensor.fill_(7)
    before = rss()
    gpu_range.unmap(1)
    gpu_range.unmap(2)
    assert before - rss() > 30 * MIB
    assert gpu_range.tensor[: 16 * MIB].eq(7).all()
    assert gpu_range.tensor[48 * MIB :].eq(7).all()
    gpu_range.map(1)
    assert gpu_range.tensor[16 * MIB : 32 * MIB].eq(0).all()  # unmapping has lost its contents
    assert gpu_range.tensor.data_ptr() == address
    gpu_range.close()


def test_a_closed_range_gives_its_pages_back_and_leaves_its_views_harmless():
    gpu_range = HostRange(32 * MIB, 2 * MIB)
    map_all(gpu_range)
    view = gpu_range.tensor[16:32]
    gpu_range.tensor.fill_(1)
    before = rss()
    gpu_range.close()
    assert before - rss() > 30 * MIB
    assert view.eq(0).all()
    address = view.data_ptr()
    del view, gpu_range
    gc.collect()
    with open("/proc/self/maps") as maps:
        ranges = (line.split()[0].split("-") for line in maps)
        assert not any(int(start, 16) <= address < int(end, 16) for start, end in ranges)


@pytest.mark.gpu
@pytest.mark.whole_gpu
def test_a_range_on_the_gpu_leaves_the_drivers_books_and_keeps_its_address():
    device = torch.device("cuda", torch.cuda.current_device())
    gpu_range = make_range(4 * CHUNK_BYTES + 5, device)
    map_all(gpu_range)
    gpu_range.tensor.fill_(3)
    assert int(gpu_range.tensor.sum(dtype=torch.int64)) == 3 * gpu_range.nbytes
    torch.cuda.synchronize()
    address, free = gpu_range.tensor.data_ptr(), torch.cuda.mem_get_info(device)[0] + gpu_range.mapped_bytes
    assert gpu_range.mapped_bytes >= 4 * CHUNK_BYTES + 5
    for index in range(len(gpu_range.chunks)):
        gpu_range.unmap(index)
    assert torch.cuda.mem_get_info(device)[0] == free
    gpu_range.map(0)
    gpu_range.tensor[:10] = 4
    assert gpu_range.tensor[:10].eq(4).all()
    assert gpu_range.tensor.data_ptr() == address
    gpu_range.close()
    assert torch.cuda.mem_get_info(device)[0] == free


@pytest.mark.gpu
@pytest.mark.whole_gpu
def test_a_full_gpu_is_an_error_of_its_own_and_not_a_sticky_one():
    device = torch.device("cuda", torch.cuda.current_device())
    hog = torch.empty(torch.cuda.mem_get_info(device)[0] - 1024 * MIB, dtype=torch.uint8, device=device)
    gpu_range = make_range(2048 * MIB, device)
    with pytest.raises(OutOfGpuMemoryError, match=f"{CHUNK_BYTES // MIB} MiB"):
        map_all(gpu_range)
    assert 0 < gpu_range.mapped_bytes < gpu_range.nbytes
    gpu_range.close()
    hog[:10] = 1
    assert hog[:10].eq(1).all()
    del hog
    torch.cuda.empty_cache()
