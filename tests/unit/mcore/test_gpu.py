"""Tests the worker on a CUDA GPU, with Transformer Engine and deterministic kernels: numbers compare exactly."""

import pytest
import torch
from support.gpu import EXACTLY, SHAPE
from support.tiny import TINY_QWEN3, packed_rows, random_batch, tiny_policy

from nemo_offload_rl.algorithms.losses import DPOLoss, NLLLoss

pytestmark = EXACTLY


def gpu_policy(packing=False, **megatron):
    policy = tiny_policy(TINY_QWEN3 | SHAPE, "bfloat16", **megatron)
    return policy | {"sequence_packing": packed_rows(48)} if packing else policy


OVERLAP = {"grad_reduce_in_fp32": False, "overlap_grad_reduce": True, "overlap_param_gather": True}


def assert_close(got, want, loss, grad_norm):
    assert got["loss"] == pytest.approx(want["loss"], rel=loss)
    assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=grad_norm)


def steps(worker, count=3):
    return [worker.train(random_batch(8, seed=seed), NLLLoss(), gbs=8, mbs=2) for seed in range(count)]


def test_log_probs_are_those_of_the_hugging_face_model(make_worker):
    from transformers import AutoModelForCausalLM

    worker = make_worker(gpu_policy())
    data = random_batch(4)
    got = worker.get_logprobs(data, mbs=4)["logprobs"]
    model = AutoModelForCausalLM.from_config(worker.state.bridge.hf_pretrained).cuda().float().eval()
    model.load_state_dict({name: weight.float() for name, weight in worker.hf_weights()})
    ids = data["input_ids"].cuda()
    with torch.no_grad():
        want = model(ids).logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1).cpu()
    for row, length in enumerate(data["input_lengths"].tolist()):
        torch.testing.assert_close(got[row, 1:length], want[row, : length - 1], rtol=0, atol=0.05)


def test_packed_losses_are_the_unpacked_ones(make_worker):
    padded, packed = make_worker(gpu_policy()), None
    data = random_batch(8)
    want = padded.get_logprobs(data, mbs=4)["logprobs"]
    want_steps = steps(padded)
    packed = make_worker(gpu_policy(packing=True))
    got = packed.get_logprobs(data, mbs=4)["logprobs"]
    got_steps = steps(packed)
    torch.testing.assert_close(got, want, rtol=0, atol=0.03)
    for a, b in zip(got_steps, want_steps, strict=True):
        assert_close(a, b, 5e-3, 2e-2)
    # 8 rows are 4 micro-batches of 2; packed rows of 48 tokens hold as many as fit.
    assert got_steps[0]["num_microbatches"] != want_steps[0]["num_microbatches"]


def test_packed_pairs_have_the_loss_and_gradient_of_padded_ones(make_worker):
    results = []
    for packing in (False, True):
        worker = make_worker(gpu_policy(packing=packing), init_reference_model=True, group_size=2)
        pairs = random_batch(8).in_groups(2)
        for _ in range(2):  # in the second step policy and reference differ
            reference = worker.get_reference_policy_logprobs(pairs, mbs=2)["reference_logprobs"]
            batch = pairs.in_groups(2)
            batch["reference_policy_logprobs"] = reference
            result = worker.train(batch, DPOLoss(0.1, 1.0, 0.1, False, False), gbs=4, mbs=2)
        results.append(result)
    padded, packed = results
    assert_close(packed, padded, 5e-3, 2e-2)
    assert packed["metrics"]["num_valid_samples"] == padded["metrics"]["num_valid_samples"] == 4


def test_memory_of_dpo_steps_does_not_grow_behind_the_first(make_worker):
    """NeMo-RL #2859: its second step ran out of memory, since the first had created the optimizer's state."""
    worker = make_worker(gpu_policy(), init_reference_model=True, group_size=2)
    batch = random_batch(8).in_groups(2)
    peaks = []
    for _ in range(4):
        batch["reference_policy_logprobs"] = worker.get_reference_policy_logprobs(batch, mbs=2)["reference_logprobs"]
        worker.train(batch, DPOLoss(0.1, 1.0, 0.0, False, False), gbs=4, mbs=2)
        peaks.append(worker.memory_stats()["gpu_peak_train_gib"])
    assert max(peaks[1:]) <= peaks[0] + 1 / 1024, peaks


@pytest.mark.parametrize("precision_aware", [False, True])
def test_a_resumed_run_continues_bit_for_bit(make_worker, tmp_path, precision_aware):
    policy = gpu_policy()
    policy["megatron_cfg"]["optimizer"]["use_precision_aware_optimizer"] = precision_aware
    worker = make_worker(policy)
    steps(worker)
    worker.offload_after_refit()
    worker.save_checkpoint(str(tmp_path / "policy"), save_optimizer=True)
    want = steps(worker)
    worker = make_worker(policy, seed=99)
    worker.load_checkpoint(str(tmp_path / "policy"))
    assert steps(worker) == want


@pytest.mark.parametrize("recomputed", [False, True])
def test_mlps_in_tiles_differ_by_rounding_and_in_one_tile_not_at_all(make_worker, recomputed):
    plain = steps(make_worker(gpu_policy(activation_checkpointing=recomputed)))
    tiled = {"activation_checkpointing": recomputed, "distributed_data_parallel_config": OVERLAP}
    assert steps(make_worker(gpu_policy(mlp_tile_tokens=1000, **tiled))) == plain
    for got, want in zip(steps(make_worker(gpu_policy(mlp_tile_tokens=7, **tiled))), plain, strict=True):
        assert_close(got, want, 0.01, 0.02)


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_gradients_are_added_where_they_are_computed(make_worker, graphs):
    """On another stream they would slow copies of activations (docs/decisions/activation-manager.md)."""
    megatron = {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["attn"]} if graphs else {}
    worker = make_worker(gpu_policy(**megatron))
    default, streams = torch.cuda.default_stream(), set()
    assert (torch.cuda.current_stream() == default) is not graphs
    for _, parameter in worker.state.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: streams.add(torch.cuda.current_stream()))
    steps(worker, 1)
    assert streams == {torch.cuda.current_stream()}
    worker.shutdown()
    assert torch.cuda.current_stream() == default
