import json

import pytest
import torch
from support.tiny import random_batch, tiny_policy

from nemo_offload_rl.algorithms.losses import NLLLoss


def train(worker, seeds):
    return [worker.train(random_batch(4, seed=seed), NLLLoss(), gbs=4, mbs=2) for seed in seeds]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("distributed", [True, False])
def test_a_resumed_run_continues_bit_for_bit(make_worker, tmp_path, precision, distributed):
    policy = tiny_policy(precision=precision)
    policy["megatron_cfg"]["optimizer"]["use_distributed_optimizer"] = distributed
    worker = make_worker(policy)
    train(worker, [0, 1, 2])
    worker.save_checkpoint(str(tmp_path / "policy"), save_optimizer=True)
    want = train(worker, [3, 4, 5])

    worker = make_worker(policy, seed=99)
    worker.load_checkpoint(str(tmp_path / "policy"))
    assert train(worker, [3, 4, 5]) == want


def test_another_layout_is_refused(make_worker, tmp_path):
    worker = make_worker()
    worker.save_checkpoint(str(tmp_path / "policy"), save_optimizer=True)
    layout = tmp_path / "policy" / "layout.json"
    found = json.loads(layout.read_text())
    found["parallel"]["tensor"] = 2
    layout.write_text(json.dumps(found))
    with pytest.raises(ValueError, match="tensor parallel size 2 there and 1 here"):
        worker.load_checkpoint(str(tmp_path / "policy"))


def test_a_checkpoint_without_optimizer_cannot_be_resumed(make_worker, tmp_path):
    worker = make_worker()
    worker.save_checkpoint(str(tmp_path / "policy"), save_optimizer=False)
    with pytest.raises(ValueError, match=r"checkpointing\.save_optimizer was false"):
        worker.load_checkpoint(str(tmp_path / "policy"))


def test_an_unfinished_checkpoint_is_refused(make_worker, tmp_path):
    with pytest.raises(ValueError, match=r"it has no layout\.json"):
        make_worker().load_checkpoint(str(tmp_path))


def test_weights_alone_load_into_a_policy_that_does_not_train(make_worker, tmp_path):
    worker = make_worker()
    train(worker, [0, 1])
    want = worker.get_logprobs(random_batch(3), mbs=3)["logprobs"]
    worker.save_checkpoint(str(tmp_path / "policy"), save_optimizer=False)
    worker = make_worker(init_optimizer=False, seed=99)
    worker.load_checkpoint(str(tmp_path / "policy"))
    assert torch.equal(worker.get_logprobs(random_batch(3), mbs=3)["logprobs"], want)
