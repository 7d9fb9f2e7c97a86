"""Tests that auxiliary losses of experts are logged as by NeMo-RL: names, layers, micro-batches, steps and ranks."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.moe.router import TopKRouter
from support.ranks import rows_of, run_ranks, worker_of_rank
from support.tiny import TINY_QWEN3_MOE, batch_of_lengths, layout_of, random_batch, tiny_policy

from nemo_offload_rl.algorithms.losses import NLLLoss

EXPERTS, TOPK = 4, 2
KINDS = {"aux_loss": "load_balancing_loss", "seq_aux_loss": "seq_load_balancing_loss"}
THREE = {"moe_router_load_balancing_type": [*KINDS], "moe_aux_loss_coeff": [0.5, 0.25], "moe_z_loss_coeff": 0.1}
GLOBAL = {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 0.5}
NUM_LAYERS = TINY_QWEN3_MOE["num_hidden_layers"]


def policy_with(losses: dict[str, Any], **megatron: Any) -> dict[str, Any]:
    return tiny_policy(TINY_QWEN3_MOE, **losses, **megatron)


def of_experts(report: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in report["metrics"].items() if name.startswith("moe/")}


def routers(worker: Any) -> list[Any]:
    return [module for chunk in worker.state.model for module in chunk.modules() if isinstance(module, TopKRouter)]


def by_definition(logits: torch.Tensor, real: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns the losses, without coefficients, of a micro-batch's router logits [B, S, experts] at its real tokens."""
    scores = logits.softmax(-1)
    chosen = F.one_hot(scores.topk(TOPK).indices, EXPERTS).sum(-2)
    tokens, probs = ((values * real[..., None]).sum(1) for values in (chosen, scores))  # [B, experts]

    def balance(tokens: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        mean_length = real.sum() / len(tokens)  # megatron-core's, also for rows of unequal lengths
        return (tokens * probs).sum(-1).mean() * EXPERTS / (TOPK * mean_length**2)

    return {
        "load_balancing_loss": balance(tokens.sum(0, keepdim=True), probs.sum(0, keepdim=True)),
        "seq_load_balancing_loss": balance(tokens, probs),
        "z_loss": logits.logsumexp(-1)[real].square().mean(),
    }


@pytest.mark.parametrize("recomputed", [False, True])
def test_they_are_means_over_layers_and_the_micro_batches_of_all_steps(make_worker: Any, recomputed: bool) -> None:
    """The expected values are worked out from the routers' inputs and weights in each pass with a gradient."""
    policy = policy_with(THREE, moe_per_layer_logging=True, activation_checkpointing=recomputed)
    worker = make_worker(policy | {"make_sequence_length_divisible_by": 16})
    seen: list[list[torch.Tensor]] = [[] for _ in range(NUM_LAYERS)]

    def keep(router: Any, args: Any) -> None:
        if torch.is_grad_enabled() and router.training:
            seen[router.layer_number - 1].append(F.linear(args[0], router.weight).detach().transpose(0, 1))

    for router in routers(worker):
        router.register_forward_pre_hook(keep)
    for seed in range(2):  # the second call starts anew
        data = random_batch(8, seed=seed)
        for of_layer in seen:
            of_layer.clear()
        worker.get_logprobs(data, mbs=2)
        report = worker.train(data, NLLLoss(), gbs=4, mbs=2)
        assert [len(of_layer) for of_layer in seen] == [4] * NUM_LAYERS
        real = torch.arange(16) < data["input_lengths"].view(4, 2, 1)  # of 4 micro-batches with 2 rows
        losses = [list(map(by_definition, of_layer, real)) for of_layer in seen]
        want: dict[str, float] = {}
        for name in losses[0][0]:
            per_layer = [float(sum(one[name] for one in of_layer)) / 4 for of_layer in losses]
            want[f"moe/{name}"] = sum(per_layer) / NUM_LAYERS
            want |= {f"moe/moe/{name}_layer_{layer}": value for layer, value in enumerate(per_layer)}
        assert of_experts(report) == pytest.approx(want, rel=1e-4)


def test_steps_of_unequal_numbers_of_micro_batches_count_by_these(make_worker: Any) -> None:
    worker = make_worker(policy_with(GLOBAL))
    losses, tracker = worker._aux_losses, get_moe_metrics_tracker()
    losses.start()
    for values in ([1.0, 2.0, 6.0], [5.0]):
        tracker.record("global_load_balancing_loss", torch.tensor(100.0), 1, NUM_LAYERS)  # of a pass before the step
        with losses.step(len(values)):
            for value in values:
                tracker.record("global_load_balancing_loss", torch.tensor(value), 2, NUM_LAYERS)
    assert losses.metrics() == {"moe/global_load_balancing_loss": 14.0 / 4 / NUM_LAYERS}


ABSENT = [{"moe_aux_loss_coeff": 0.0}, {"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.1}]


@pytest.mark.parametrize("losses", ABSENT)
def test_losses_that_the_model_does_not_have_are_not_logged(make_worker: Any, losses: dict[str, Any]) -> None:
    worker = make_worker(policy_with(losses | {"moe_z_loss_coeff": 0.0}, moe_per_layer_logging=True))
    assert of_experts(worker.train(random_batch(4), NLLLoss(), gbs=4, mbs=2)) == {}


LAYOUTS = ["dp2", "global dp2", "tp2 sp", "pp2 vpp2"]
ROWS = batch_of_lengths([12] * 8)


def of_layouts(rank: int, world_size: int, ports: list[int]) -> dict[str, Any]:
    torch.set_num_threads(1)
    out = {}
    for name, port in zip(LAYOUTS, ports, strict=True):
        # The micro-batches are those of one rank, but the loss of all ranks' tokens takes two of them together.
        losses, mbs = (GLOBAL, 4) if name.startswith("global") else (THREE, 2)
        policy = policy_with(losses, moe_per_layer_logging=True, **layout_of(name))
        worker = worker_of_rank(policy, rank, world_size, port)
        mine = ROWS.slice(*rows_of(worker, 8))
        out[name] = of_experts(worker.train(mine, NLLLoss(), gbs=8, mbs=mbs))
        worker.shutdown()
    return out


@pytest.mark.slow
def test_they_are_the_same_on_one_rank_and_on_each_of_two(make_worker: Any) -> None:
    def alone(losses: dict[str, Any], mbs: int) -> dict[str, float]:
        worker = make_worker(policy_with(losses, moe_per_layer_logging=True))
        return of_experts(worker.train(ROWS, NLLLoss(), gbs=8, mbs=mbs))

    three, of_all_tokens = alone(THREE, 2), alone(GLOBAL, 8)
    assert (len(three), len(of_all_tokens)) == (3 * (1 + NUM_LAYERS), 1 + NUM_LAYERS)
    assert all(value > 0 for value in (*three.values(), *of_all_tokens.values()))
    for results in run_ranks(of_layouts, 2, num_ports=len(LAYOUTS)):
        for name, got in results.items():
            assert got == pytest.approx(of_all_tokens if name.startswith("global") else three, rel=1e-4), name
