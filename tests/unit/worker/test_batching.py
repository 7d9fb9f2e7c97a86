"""Tests how a worker uses the recipe's sizes of packed rows."""

import pytest
import torch

from nemo_offload_rl.worker.batching import MicroBatcher
from tests.support.tiny import tiny_policy


@pytest.mark.parametrize("key", ["train_mb_tokens", "logprob_mb_tokens"])
def test_a_worker_takes_no_number_that_is_left_open(key):
    policy = tiny_policy()
    policy["sequence_packing"] = {"enabled": True, "train_mb_tokens": 64, "logprob_mb_tokens": 64}
    MicroBatcher(policy, torch.device("cpu"))
    policy["sequence_packing"][key] = "auto"
    with pytest.raises(ValueError, match=rf"policy.sequence_packing.{key} is auto, which a run replaces by a number"):
        MicroBatcher(policy, torch.device("cpu"))
    policy["sequence_packing"]["enabled"] = False
    MicroBatcher(policy, torch.device("cpu"))
