"""Tests the user's message, and the state left behind, when activation offloading fails; without a GPU."""

import gc

import pytest
from megatron.core.pipeline_parallel.fine_grained_activation_offload import PipelineOffloadManager
from support.late_copies import LateCopies
from support.tiny import offloading_activations, random_batch, tiny_policy

from nemo_offload_rl.algorithms.losses import NLLLoss
from nemo_offload_rl.mcore.patches import activation_offload
from nemo_offload_rl.memory.pinned import PinnedArena

MODULES = ["qkv_linear", "core_attn", "attn_proj"]


class DriverError(RuntimeError):
    pass


class Failing(LateCopies):
    """Fails from the third request on."""

    def out(self, spans, after):
        if self.num_out > 2:
            raise DriverError
        return super().out(spans, after)

    def wait(self, handle):
        if self.num_out > 2:
            raise RuntimeError("the GPU has failed")
        super().wait(handle)


def test_no_room_for_streams_is_what_is_said(make_worker, monkeypatch):
    def no_stream(device, graphs):
        raise DriverError

    monkeypatch.setattr(activation_offload, "CudaCopies", no_stream)
    before = activation_offload.CheckpointWithoutOutput.checkpoint
    with pytest.raises(DriverError):
        make_worker(offloading_activations(tiny_policy(), MODULES))
    gc.collect()  # the error's frames hold views of the memory
    assert PinnedArena.live_bytes() == 0
    assert not isinstance(PipelineOffloadManager.OFFLOAD_MGR, activation_offload.ActivationOffloader)
    assert activation_offload.CheckpointWithoutOutput.checkpoint is before


def test_a_worker_that_never_trains_leaves_megatron_core_as_it_is(make_worker):
    make_worker(offloading_activations(tiny_policy(), MODULES), init_optimizer=False)
    assert PipelineOffloadManager.OFFLOAD_MGR is None


def test_a_refused_copy_is_what_is_said_though_the_worker_ends_behind_it(make_worker, monkeypatch):
    monkeypatch.setattr(activation_offload, "CudaCopies", lambda device, graphs: Failing(eager_share=0.0))
    worker = make_worker(offloading_activations(tiny_policy(), MODULES))

    def train() -> None:
        try:
            worker.train(random_batch(4), NLLLoss(), gbs=4, mbs=2)
        finally:
            worker.shutdown()

    with pytest.raises(DriverError) as caught:
        train()
    assert "Cleanup after this error failed, too: RuntimeError: the GPU has failed" in caught.value.__notes__
    del caught
    gc.collect()
    assert PinnedArena.live_bytes() == 0
