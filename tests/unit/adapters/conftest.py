import gc

import pytest
from support.tiny_megatron import each_device, one_rank

from nemo_offload_rl.memory.pinned import PinnedArena


@pytest.fixture(params=each_device())
def rank():
    with one_rank():
        yield
    gc.collect()  # models are reference cycles, and each holds gloo threads until collected
    assert PinnedArena.live_bytes() == 0
