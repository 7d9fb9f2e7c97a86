"""Tests buffers that a second process opens."""

import dataclasses
import os

import pytest
import torch
from support.shared_memory import num_open_buffers, process_that_answers

from nemo_offload_rl.memory import shared_buffer
from nemo_offload_rl.memory.shared_buffer import SharedBufferError, make_shared_buffer

NBYTES = 300_000


def add_one(pipe):
    """Runs as the second process: adds 1 to every byte of each buffer whose handle it receives."""
    while (handle := pipe.recv()) is not None:
        try:
            with handle.opened() as tensor:
                tensor.add_(1)
            pipe.send(tensor.numel())
        except SharedBufferError as error:
            pipe.send(str(error))


@pytest.fixture(scope="module")
def other_process():
    with process_that_answers(add_one) as ask:
        yield ask


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_both_processes_see_one_memory(other_process, device):
    buffer = make_shared_buffer(NBYTES, torch.device(device))
    for value in (3, 40):  # a buffer may be opened repeatedly
        buffer.tensor.fill_(value)
        if device == "cuda":
            torch.cuda.synchronize()
        assert other_process(buffer.handle) == NBYTES
        assert buffer.tensor.eq(value + 1).all()
    buffer.close()


def test_host_memory_is_given_back_and_leaves_no_name():
    before, named = num_open_buffers(), os.listdir("/dev/shm")
    buffer = make_shared_buffer(NBYTES, torch.device("cpu"))
    buffer.tensor.fill_(1)
    assert num_open_buffers() > before
    assert os.listdir("/dev/shm") == named
    buffer.close()
    assert num_open_buffers() == before


def test_a_process_that_has_gone_and_another_node_are_said(other_process, monkeypatch):
    buffer = make_shared_buffer(NBYTES, torch.device("cpu"))
    gone = dataclasses.replace(buffer.handle, pid=2**22 + 1)  # larger than every process id
    assert "that process must be alive and of the same user" in other_process(gone)
    monkeypatch.setattr(shared_buffer, "_node", lambda: "elsewhere")
    with pytest.raises(SharedBufferError, match=r"cannot be opened on elsewhere: .* one node"), buffer.handle.opened():
        pass
    buffer.close()
