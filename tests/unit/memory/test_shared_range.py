"""Tests ranges and buffers that a second process maps or opens."""

import dataclasses
import os
import socket

import pytest
import torch
from support.shared_memory import num_open_buffers, process_that_answers

from nemo_offload_rl.memory import shared_buffer
from nemo_offload_rl.memory.shared_buffer import SharedBufferError, make_shared_buffer
from nemo_offload_rl.memory.shared_range import DescriptorError, DescriptorOffer, make_shared_range

NBYTES = 5_000_000


def settle(tensor):
    if tensor.is_cuda:
        torch.cuda.synchronize()


def add_one(pipe):
    """Runs as the second process: adds 1 to every byte of a range or buffer; returns size and address."""
    peer = None
    while (handle := pipe.recv()) is not None:
        if handle == "close":
            peer = pipe.send(peer.close())
        elif hasattr(handle, "opened"):
            try:
                with handle.opened() as tensor:
                    tensor.add_(1)
                pipe.send(tensor.numel())
            except SharedBufferError as error:
                pipe.send(str(error))
        else:
            peer = peer or handle.make_peer()
            peer.map(handle)
            peer.tensor.add_(1)
            settle(peer.tensor)
            pipe.send((peer.tensor.data_ptr(), peer.tensor.numel()))
            peer.unmap()


@pytest.fixture(scope="module")
def other_process():
    with process_that_answers(add_one) as ask:
        yield ask


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_both_processes_see_one_memory_at_addresses_that_stay(other_process, device):
    shared = make_shared_range(NBYTES, torch.device(device))
    addresses = set()
    for value in (3, 40, 7):
        handle = shared.map()
        shared.tensor.fill_(value)
        settle(shared.tensor)
        peer_address, size = other_process(handle)
        assert size == NBYTES
        assert shared.tensor.eq(value + 1).all()
        addresses.add((shared.tensor.data_ptr(), peer_address))
        shared.unmap()
    assert len(addresses) == 1
    other_process("close")
    shared.close()


@pytest.mark.gpu
@pytest.mark.whole_gpu
def test_gpu_memory_is_given_back_once_neither_process_maps_it(other_process):
    shared = make_shared_range(2**30, torch.device("cuda"))
    other_process(shared.map())  # creates the other process's CUDA context
    shared.unmap()
    before = torch.cuda.mem_get_info()[0]
    for _ in range(3):
        other_process(shared.map())
        assert before - torch.cuda.mem_get_info()[0] >= 2**30
        shared.unmap()
        assert before - torch.cuda.mem_get_info()[0] < 2**28
    other_process("close")
    shared.close()


def test_host_memory_is_given_back_and_leaves_no_name():
    before = num_open_buffers()
    shared = make_shared_range(NBYTES, torch.device("cpu"))
    shared.map()
    shared.tensor.fill_(1)
    descriptor = shared._buffer.handle.descriptor
    assert os.fstat(descriptor).st_blocks * 512 >= NBYTES
    shared.unmap()
    assert os.fstat(descriptor).st_blocks == 0
    assert shared.tensor.eq(0).all()
    shared.close()
    assert num_open_buffers() == before


def test_a_descriptor_is_handed_over_to_the_same_user_until_its_offer_is_closed(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("content")
    offer, own = DescriptorOffer(os.open(tmp_path / "file", os.O_RDONLY)), os.getuid()
    for _ in range(2):
        with open(offer.address.receive()) as received:
            received.seek(0)
            assert received.read() == "content"
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: own + 1)
        with pytest.raises(DescriptorError, match="must belong to the same user"):
            offer.address.receive()
    offer.close()
    with pytest.raises(DescriptorError, match=rf"Cannot receive a file descriptor from process {os.getpid()}"):
        offer.address.receive()


def no_sockets(*arguments):
    raise OSError("too many open files")


def test_a_descriptor_that_cannot_be_offered_is_closed(tmp_path, monkeypatch):
    """Left open, it would keep GPU memory allocated after the refit has fallen back to another way."""
    (tmp_path / "file").touch()
    descriptor = os.open(tmp_path / "file", os.O_RDONLY)
    monkeypatch.setattr(socket, "socket", no_sockets)
    with pytest.raises(OSError, match="too many open files"):
        DescriptorOffer(descriptor)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


BUFFER_BYTES = 300_000


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_both_processes_see_one_buffer(other_process, device):
    buffer = make_shared_buffer(BUFFER_BYTES, torch.device(device))
    for value in (3, 40):  # a buffer may be opened repeatedly
        buffer.tensor.fill_(value)
        settle(buffer.tensor)
        assert other_process(buffer.handle) == BUFFER_BYTES
        assert buffer.tensor.eq(value + 1).all()
    buffer.close()


def test_host_memory_of_a_buffer_is_given_back_and_leaves_no_name():
    before, named = num_open_buffers(), os.listdir("/dev/shm")
    buffer = make_shared_buffer(BUFFER_BYTES, torch.device("cpu"))
    buffer.tensor.fill_(1)
    assert num_open_buffers() > before
    assert os.listdir("/dev/shm") == named
    buffer.close()
    assert num_open_buffers() == before


def test_a_process_that_has_gone_and_another_node_are_said(other_process, monkeypatch):
    buffer = make_shared_buffer(BUFFER_BYTES, torch.device("cpu"))
    gone = dataclasses.replace(buffer.handle, pid=2**22 + 1)  # larger than every process id
    assert "that process must be alive and of the same user" in other_process(gone)
    monkeypatch.setattr(shared_buffer, "_node", lambda: "elsewhere")
    with pytest.raises(SharedBufferError, match=r"cannot be opened on elsewhere: .* one node"), buffer.handle.opened():
        pass
    buffer.close()
