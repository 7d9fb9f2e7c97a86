"""Tests that auxiliary losses and expert biases count the samples' tokens alone, weighed as NeMo-RL weighs them."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.router import TopKRouter
from support.tiny import TINY_QWEN3_MOE, in_transformers, random_batch, tiny_policy

from nemo_offload_rl.algorithms.losses import NLLLoss
from nemo_offload_rl.mcore.batches import packed_microbatches, padded_microbatches
from tests.unit.mcore.test_aux_losses import EXPERTS, KINDS, TOPK, by_definition, routers

COEFFICIENT = 2.0
BALANCING = {name: {"moe_router_load_balancing_type": name} for name in ("aux_loss", "seq_aux_loss", "global_aux_loss")}
LOSSES = {name: kind | {"moe_aux_loss_coeff": COEFFICIENT} for name, kind in BALANCING.items()}
LOSSES["z_loss"] = {"moe_z_loss_coeff": COEFFICIENT}


def bias_experts(worker: Any) -> None:
    """Gives routers the expert bias of other families; none of those has a tiny model for a CPU."""
    config = worker.state.config
    config.moe_router_enable_expert_bias, config.moe_router_bias_update_rate = True, 1e-3
    for router in routers(worker):
        router.enable_expert_bias, router.score_function = True, "sigmoid"
        for name in ("expert_bias", "local_tokens_per_expert"):
            delattr(router, name)
            router.register_buffer(name, torch.zeros(EXPERTS))


def padded_to(length: int, **megatron: Any) -> dict[str, Any]:
    return tiny_policy(TINY_QWEN3_MOE, **megatron) | {"make_sequence_length_divisible_by": length}


@pytest.mark.parametrize("name", LOSSES)
def test_padding_changes_no_gradient(make_worker, name):
    """The last micro-batch has one row and one of filler, too."""
    data, results = random_batch(5), []
    for length in (12, 32):
        worker = make_worker(padded_to(length, **LOSSES[name]))
        results.append(worker.train(data, NLLLoss(), gbs=5, mbs=2)["grad_norm"])
    plain = make_worker(padded_to(12)).train(data, NLLLoss(), gbs=5, mbs=2)["grad_norm"]
    assert results[0] == pytest.approx(results[1], rel=1e-5)
    assert results[0] != pytest.approx(plain, rel=1e-2)


SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
RECOMPUTED = {"nothing": {}, "all": {"activation_checkpointing": True}}
RECOMPUTED["moe"] = RECOMPUTED["all"] | SELECTIVE


@pytest.mark.parametrize("recomputed", RECOMPUTED)
def test_padding_and_filler_change_no_expert_bias(make_worker, monkeypatch, recomputed):
    data, biases, counts = random_batch(5), [], []
    update = TopKRouter._apply_expert_bias

    def counted(router: Any, *args: Any, **kwargs: Any) -> None:
        before = router.local_tokens_per_expert.clone()
        update(router, *args, **kwargs)
        counts[-1] += float((router.local_tokens_per_expert - before).sum())

    monkeypatch.setattr(TopKRouter, "_apply_expert_bias", counted)
    for length in (12, 32):
        worker = make_worker(padded_to(length, **RECOMPUTED[recomputed]))
        bias_experts(worker)
        counts.append(0.0)
        worker.train(data, NLLLoss(), gbs=5, mbs=2)
        biases.append(torch.stack([router.expert_bias for router in routers(worker)]))
    assert biases[0].any()
    assert torch.equal(*biases)
    assert counts == [float(data["input_lengths"].sum()) * TOPK * len(biases[0])] * 2


def reference_norm(worker: Any, data: Any, mbs: int, name: str) -> float:
    """The gradient norm of a plain model with, for each layer and micro-batch of N tokens, N / G of its loss."""
    model = in_transformers(worker)
    logits: list[torch.Tensor] = []
    for layer in model.model.layers:
        gate = layer.mlp.gate
        gate.register_forward_pre_hook(lambda gate, args: logits.append(F.linear(args[0], gate.weight)))
    trained = (data["token_mask"][:, 1:] * data["sample_mask"][:, None]).sum()
    for rows in data.chunks(mbs):
        logits.clear()
        ids, mask = rows["input_ids"], rows["token_mask"][:, 1:]
        logprobs = model(ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        loss = -(logprobs * mask).sum()
        real = torch.arange(ids.shape[1]) < rows["input_lengths"][:, None]
        for of_layer in logits:
            aux = by_definition(of_layer.view(*ids.shape, EXPERTS), real)[name if name == "z_loss" else KINDS[name]]
            loss = loss + real.sum() * COEFFICIENT * aux
        (loss / trained).backward()
    return float(torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()]))


@pytest.mark.parametrize("name", ["aux_loss", "seq_aux_loss", "z_loss"])
def test_gradients_are_those_of_losses_over_trained_tokens(make_worker, name):
    """Of one and of three micro-batches; aux_loss is defined on a micro-batch, z_loss is the same in both."""
    data, norms = random_batch(6), []
    for mbs in (6, 2):
        worker = make_worker(padded_to(32, **LOSSES[name]))
        want = reference_norm(worker, data, mbs, name)
        norms.append(worker.train(data, NLLLoss(), gbs=6, mbs=mbs)["grad_norm"])
        assert norms[-1] == pytest.approx(want, rel=1e-4)
    assert (name == "z_loss") == (norms[0] == pytest.approx(norms[1], rel=1e-4))


def test_padding_is_what_no_sample_has():
    data = random_batch(3, longest=6)
    data["input_lengths"] = torch.tensor([6, 3, 2])
    padded = padded_microbatches(data, 2)
    assert padded[0].padding().tolist() == [[False] * 6, [False] * 3 + [True] * 3]
    assert padded[1].padding().tolist() == [[False] * 2 + [True] * 4, [True] * 6]
    (packed,) = packed_microbatches(data, [[1, 2, 0]], divisible_by=4, row_divisible_by=10)
    real, pad = [False], [True]
    assert packed.padding().tolist() == [real * 3 + pad + real * 2 + pad * 2 + real * 6 + pad * 6]
