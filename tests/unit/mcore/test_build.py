"""Tests that a rank's model and process groups are freed again."""

import gc
import weakref

import pytest
import torch
from support.ranks import free_port, worker_of_rank
from support.tiny import random_batch, tiny_policy

from nemo_offload_rl.algorithms.losses import NLLLoss
from nemo_offload_rl.mcore import distributed


def test_a_worker_that_has_ended_leaves_no_model_behind():
    """Its parameters are fp32, and the optimizer's views of them hold autograd nodes that reference the model."""
    worker = worker_of_rank(tiny_policy(), 0, 1, free_port())
    worker.train(random_batch(8), NLLLoss(), gbs=8, mbs=2)
    held = [weakref.ref(worker.state.model[0]), weakref.ref(worker.state.optimizer)]
    worker.shutdown()
    del worker
    gc.collect()
    assert [reference() for reference in held] == [None, None]


def test_groups_that_cannot_all_be_made_are_left_again(make_worker, monkeypatch):
    """Fails to make the last group, as a GPU without memory does; with more memory the process may try again."""

    def no_memory(*_, **__):
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(distributed, "model_parallel_cuda_manual_seed", no_memory)
        with pytest.raises(torch.OutOfMemoryError):
            make_worker()
    make_worker().train(random_batch(8), NLLLoss(), gbs=8, mbs=2)


def test_a_schedule_whose_length_only_a_run_knows_is_refused(make_worker):
    policy = tiny_policy()
    policy["megatron_cfg"]["scheduler"]["lr_decay_iters"] = None
    with pytest.raises(ValueError, match=r"lr_decay_iters is null, which a run replaces by its number of steps"):
        make_worker(policy)
