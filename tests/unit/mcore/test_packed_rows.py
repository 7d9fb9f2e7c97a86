"""Tests that packed rows have the log-probs, losses and gradients of padded rows: SFT, GRPO and DPO, on one rank.

test_two_ranks has the parallel layouts, and test_architectures compares packed rows of every family with transformers.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.losses import PLAIN
from support.tiny import TINY_QWEN3, TINY_QWEN3_MOE, batch_of_lengths, packed_rows, tiny_policy, with_plain_sgd

from nemo_offload_rl.algorithms.losses import DPOLoss, NLLLoss
from nemo_offload_rl.data.batch import LOGPROB_COLUMNS, BatchedData

WINDOWED = TINY_QWEN3 | {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}
CHUNKS = {"use_fused_linear_logprobs": True, "fused_linear_logprobs_chunk_size": 100}
RECOMPUTED = {"activation_checkpointing": True}
OF_ATTENTION = RECOMPUTED | {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "windows, attention recomputed, logits in chunks": (WINDOWED, CHUNKS | OF_ATTENTION),
    "experts, recomputed": (TINY_QWEN3_MOE, RECOMPUTED),
}
# A prompt has 2 tokens, so the second row's answer is empty. A row of 300 tokens has no room for the first pair.
LENGTHS = [300, 2, 17, 120, 3, 64]


def results(make_worker, packing: dict[str, Any] | None, model: str, lengths: list[int]) -> dict[str, Any]:
    """Runs a step of SFT, then the passes and a step of GRPO, then a step of DPO on the rows as pairs."""
    hf_config, megatron = MODELS[model]
    policy = with_plain_sgd(tiny_policy(hf_config, **megatron), rate=0.1) | {"max_total_sequence_length": 300}
    if packing is not None:
        policy["sequence_packing"] = packing
    worker = make_worker(policy, init_reference_model=True)
    rows, mbs = len(lengths), min(2, len(lengths))
    steps = [worker.train(batch_of_lengths(lengths), NLLLoss(), gbs=rows, mbs=mbs)]
    data = batch_of_lengths(lengths, seed=1)
    sent = BatchedData({name: data[name] for name in LOGPROB_COLUMNS})  # by a worker group
    prev = worker.get_logprobs(sent, mbs=mbs)["logprobs"]
    reference = worker.get_reference_policy_logprobs(sent, mbs=mbs)["reference_logprobs"]
    advantages = torch.linspace(-1, 1, rows)[:, None] * data["token_mask"]
    data |= {"prev_logprobs": prev, "generation_logprobs": prev, "advantages": advantages}
    data["reference_policy_logprobs"] = reference
    steps.append(worker.train(data, replace(PLAIN, reference_policy_kl_penalty=0.1), gbs=rows, mbs=mbs))
    if rows % 2 == 0:
        steps.append(worker.train(data.in_groups(2), DPOLoss(0.1, 1.0, 0.1, False, False), gbs=rows // 2, mbs=1))
    return {
        "logprobs": prev,
        "reference": reference,
        "losses": torch.tensor([step["loss"] for step in steps]),
        "grad_norms": torch.tensor([step["grad_norm"] for step in steps]),
        "num_microbatches": [step["num_microbatches"] for step in steps],
        "weights": {name: weight.clone() for name, weight in worker.hf_weights()},
    }


@pytest.mark.parametrize("model", MODELS)
def test_packed_rows_compute_what_padded_rows_do(make_worker, model):
    want, got = (results(make_worker, packing, model, LENGTHS) for packing in (None, packed_rows(300)))
    assert (want.pop("num_microbatches"), got.pop("num_microbatches")) == ([3, 3, 3], [2, 2, 2])
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def test_a_row_alone_in_its_batch_is_padded_at_its_end(make_worker):
    want, got = (results(make_worker, packing, "experts, recomputed", [5]) for packing in (None, packed_rows(300)))
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
