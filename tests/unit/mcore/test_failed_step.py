"""Tests that a failed or skipped step leaves nothing behind, on one rank, and where two gather parameters."""

import gc
import signal
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP, SharedExpertState
from megatron.core.transformer.transformer_layer import TransformerLayer
from support.late_copies import assert_empty
from support.phases import checksums
from support.ranks import off_and_on, run_ranks, worker_of_rank
from support.tiny import TINY_QWEN3, TINY_QWEN3_MOE, offloading_activations, random_batch, tiny_policy
from torch.multiprocessing.reductions import StorageWeakRef

from nemo_offload_rl.algorithms.losses import NLLLoss
from nemo_offload_rl.mcore.patches.layer_state import clear_saved_state_on_failure
from tests.unit.mcore.test_activations import AGAIN, ATTENTION
from tests.unit.mcore.test_router_losses import bias_experts

ALL_GATHER = {"moe_token_dispatcher_type": "allgather"}


def modules_of(worker: Any, kind: type) -> list[Any]:
    return [module for chunk in worker.state.model for module in chunk.modules() if isinstance(module, kind)]


def failing(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError


def failing_backward(logprobs: torch.Tensor, data: Any, counts: Any) -> Any:
    logprobs.register_hook(failing)
    return NLLLoss()(logprobs, data, counts)


def fail(worker: Any, where: str) -> None:
    """Fails a step of two micro-batches in the loss, in its backward pass, or in a part of the third layer."""
    loss = {"loss": failing, "backward": failing_backward}.get(where, NLLLoss())
    layer: Any = modules_of(worker, TransformerLayer)[2]
    part = {"attention": layer.self_attention, "mlp": layer.mlp, "experts": getattr(layer.mlp, "experts", None)}
    with pytest.MonkeyPatch.context() as patch:
        if where in part:
            patch.setattr(part[where], "forward", failing)
        with pytest.raises(ZeroDivisionError):
            worker.train(random_batch(4), loss, gbs=4, mbs=2)


CONFIGS = {"dense": (TINY_QWEN3, {}), "experts": (TINY_QWEN3_MOE, {}), "all-gather": (TINY_QWEN3_MOE, ALL_GATHER)}
CONFIGS["recomputed norms"] = (TINY_QWEN3, AGAIN)
OFFLOADING = [("dense", "mlp"), ("dense", "backward"), ("experts", "loss"), ("experts", "mlp"), ("experts", "experts")]
OFFLOADING += [("all-gather", "experts"), ("recomputed norms", "mlp")]
# Without offloading only Megatron's own saved tensors could stay: each place of a failure once.
PLAIN = [("dense", "attention"), ("all-gather", "mlp"), ("all-gather", "loss")]
PLAIN += [("experts", "experts"), ("experts", "backward")]


CASES = [*((*of, True) for of in OFFLOADING), *((*of, False) for of in PLAIN)]


@pytest.mark.parametrize(("kind", "where", "offloads"), CASES)
@pytest.mark.usefixtures("late", "recomputing")
def test_a_failed_step_leaves_no_activation_alive(make_worker, once, kind, where, offloads):
    config, megatron = CONFIGS[kind]
    policy = tiny_policy(config, **megatron)

    def steps(worker: Any) -> list[Any]:
        return [worker.train(random_batch(4), NLLLoss(), gbs=4, mbs=2) for _ in range(2)]

    reports = once(kind, lambda: steps(make_worker(policy)))
    worker = make_worker(offloading_activations(policy, ATTENTION) if offloads else policy)
    assert worker.train(random_batch(4), NLLLoss(), gbs=4, mbs=2) == reports[0]
    seen: list[StorageWeakRef] = []

    def see(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        seen.extend(StorageWeakRef(tensor.untyped_storage()) for tensor in tensors if tensor.grad_fn is not None)

    modules = [module for layer in modules_of(worker, TransformerLayer) for module in layer.modules()]
    hooks = [module.register_forward_pre_hook(see, with_kwargs=True) for module in modules]
    fail(worker, where)
    for hook in hooks:
        hook.remove()
    gc.collect()
    assert len(seen) > 8
    assert not [storage for storage in seen if not storage.expired()]
    if offloads:
        assert worker.activations.offloader.report.total().moved_bytes > 0
        assert_empty(worker.activations.offloader.host_pool)
    assert worker.train(random_batch(4), NLLLoss(), gbs=4, mbs=2) == reports[1]


@pytest.mark.parametrize("num_before", [0, 1])
def test_a_failed_reduction_of_gradients_does_not_spoil_the_next(make_worker, num_before):
    """Fails between two buckets; in the first backward pass megatron-core also counts the gradients of each."""
    ddp = {"overlap_grad_reduce": True, "bucket_size": 1000}

    def train(worker: Any) -> Any:
        return worker.train(random_batch(4), NLLLoss(), gbs=4, mbs=4)

    def steps(spoil: Callable[[Any], None]) -> tuple[Any, ...]:
        worker = make_worker(tiny_policy(distributed_data_parallel_config=ddp))
        assert len(worker.state.model[0].bucket_groups) > 4
        for _ in range(num_before):
            train(worker)
        spoil(worker)
        return train(worker), train(worker), checksums(worker)

    def fail_between(worker: Any) -> None:
        hook = modules_of(worker, TransformerLayer)[2].register_full_backward_pre_hook(failing)
        with pytest.raises(ZeroDivisionError):
            train(worker)
        hook.remove()

    assert steps(fail_between) == steps(lambda _: None)


def test_shared_experts_beside_the_exchange_of_tokens_begin_anew():
    """The parts of shared experts must run in order, or are refused; the overlap itself needs a GPU."""
    experts = SharedExpertMLP.__new__(SharedExpertMLP)
    torch.nn.Module.__init__(experts)
    experts.config = SimpleNamespace(moe_shared_expert_overlap=True)
    experts.cached_fc1_input = torch.ones(1, requires_grad=True) * 2
    experts._overlap_state = SharedExpertState.PRE_FORWARD_COMM_DONE
    with pytest.raises(ZeroDivisionError), clear_saved_state_on_failure([experts]):
        failing()
    assert (experts.cached_fc1_input, experts._overlap_state) == (None, SharedExpertState.IDLE)


def balance(worker: Any, by: str) -> None:
    """Gives routers the balancing of other families; none of those has a tiny model for a CPU."""
    if by == "expert bias":
        bias_experts(worker)
        return
    worker.state.config.moe_router_load_balancing_type = "quantile_balancing"
    buffers = {"qb_beta": torch.zeros(4), "qb_beta_accum": torch.zeros(4), "qb_beta_count": torch.tensor(0)}
    for router in modules_of(worker, TopKRouter):
        router.routing_type, router.score_function = "quantile_balancing", "sigmoid"
        for name, value in buffers.items():
            delattr(router, name)
            router.register_buffer(name, value.clone())


def numbers_of_routers(worker: Any, *names: str) -> list[list[float]]:
    routers = modules_of(worker, TopKRouter)
    return [getattr(router, name).tolist() for router in routers for name in names if getattr(router, name) is not None]


def not_finite(logprobs: torch.Tensor, data: Any, counts: Any) -> Any:
    loss, metrics = NLLLoss()(logprobs, data, counts)
    return loss * float("nan"), metrics


def skip(worker: Any) -> None:
    assert worker.train(random_batch(6, seed=5), not_finite, gbs=6, mbs=2)["num_skipped"] == 1


@pytest.mark.parametrize("spoiled_by", ["skipping", "loss", "experts"])
@pytest.mark.parametrize("by", ["expert bias", "quantiles"])
def test_routers_biases_are_those_of_a_run_without_it(make_worker, once, by, spoiled_by):
    def two_steps(between: Callable[[Any], None]) -> tuple[Any, ...]:
        schedule = {"lr_warmup_iters": 0}  # a skipped step moves the schedule, too
        worker = make_worker(tiny_policy(TINY_QWEN3_MOE, "bfloat16", scheduler=schedule) | {"max_skipped_steps": 1})
        balance(worker, by)
        first = worker.train(random_batch(4), NLLLoss(), gbs=4, mbs=2)
        before = numbers_of_routers(worker, "expert_bias", "qb_beta")
        assert all(any(bias) for bias in before)
        between(worker)
        assert numbers_of_routers(worker, "expert_bias", "qb_beta") == before
        counts = numbers_of_routers(worker, "local_tokens_per_expert", "qb_beta_accum")
        assert counts == [[0.0] * 4] * 4
        second = worker.train(random_batch(4, seed=1), NLLLoss(), gbs=4, mbs=2)
        after = numbers_of_routers(worker, "expert_bias", "qb_beta", "local_tokens_per_expert", "qb_beta_accum")
        assert after != before
        return first, second, checksums(worker), after

    want = once(by, lambda: two_steps(lambda _: None))
    assert two_steps(skip if spoiled_by == "skipping" else partial(fail, where=spoiled_by)) == want


TIMEOUT_S = 60
"""After which a rank that hangs is killed; a step takes less than one."""


def worker_that(gathers: bool, rank: int, world_size: int, port: int) -> Any:
    ddp = {"overlap_grad_reduce": True, "overlap_param_gather": gathers}
    return worker_of_rank(tiny_policy(distributed_data_parallel_config=ddp), rank, world_size, port)


def error_on_one_rank(rank: int, world_size: int, ports: list[int]) -> list[str]:
    """Returns what each of two calls raises if the loss fails on rank 1 alone, the first time between micro-batches."""

    worker = worker_that(True, rank, world_size, ports[0])
    worker.train(random_batch(4, seed=rank), NLLLoss(), gbs=8, mbs=2)
    num_calls = 0

    def loss(logprobs: torch.Tensor, data: Any, counts: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if rank == 1 and num_calls == 2:
            raise ZeroDivisionError("of rank 1")
        return NLLLoss()(logprobs, data, counts)

    signal.alarm(TIMEOUT_S)  # kills this process, because an exception would not end a wait for another rank
    try:
        worker.train(random_batch(4, seed=rank), loss, gbs=8, mbs=2)
    except Exception as error:  # noqa: BLE001  (rank 0 gets gloo's message that rank 1 has gone)
        signal.alarm(0)
        hooks = [len(chunk.remove_forward_pre_hook_handles) for chunk in worker.state.model]
        return [type(error).__name__, *map(str, hooks)]
    return []


@pytest.mark.slow
def test_an_error_of_one_rank_arrives():
    of_rank_0, of_rank_1 = run_ranks(error_on_one_rank, 2, num_ports=1, timeout_s=120)
    assert of_rank_1 == ["ZeroDivisionError", "0"]
    assert of_rank_0 != []


def log_probs(worker: Any) -> Any:
    return worker.get_logprobs(random_batch(4), mbs=2)["logprobs"].tolist()


def trained(worker: Any) -> Any:

    dp_rank = worker.parallel_ranks()["dp_rank"]
    losses = [worker.train(random_batch(4, seed=dp_rank), NLLLoss(), gbs=8, mbs=2)["loss"] for _ in range(2)]
    return losses, checksums(worker)


def sent(worker: Any) -> Any:
    worker.offload_before_refit()
    return {name: weight.double().sum().item() for name, weight in worker.hf_weights()}


def generated(worker: Any) -> Any:
    worker.offload_after_refit()
    return log_probs(worker)


def saved(worker: Any) -> Any:

    from nemo_offload_rl.mcore.checkpoint import checkpoint

    out: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:  # saving starts a writer process, which a daemon process may not
        patch.setattr(checkpoint, "save", lambda *_, **__: out.append(checksums(worker)))
        worker.save_checkpoint("", save_optimizer=True)
    return out


VERBS = {verb.__name__: verb for verb in (log_probs, trained, sent, generated, saved)}


def behind_an_error(verb: str, rank: int, world_size: int, port: int, *, gathers: bool) -> Any:
    """Returns the result of a verb after `train` has failed on both ranks, between a step and the next forward pass."""

    worker = worker_that(gathers, rank, world_size, port)
    data = random_batch(8, longest=40, seed=rank)
    data["input_lengths"][:4] = data["input_lengths"][:4].clamp(max=12)
    data["input_lengths"][4] = 40  # a row of the second global batch exceeds max_total_sequence_length 32
    with pytest.raises(ValueError, match="40"):
        worker.train(data, NLLLoss(), gbs=8, mbs=2)
    out = VERBS[verb](worker)
    assert not any(chunk.remove_forward_pre_hook_handles for chunk in worker.state.model)
    worker.shutdown()
    return out


def all_verbs(rank: int, world_size: int, ports: list[int]) -> dict[str, tuple[Any, Any]]:
    return off_and_on(VERBS, ports, lambda verb, port, on: behind_an_error(verb, rank, world_size, port, gathers=on))


@pytest.fixture(scope="module")
def both() -> list[dict[str, tuple[Any, Any]]]:
    return run_ranks(all_verbs, 2, num_ports=2 * len(VERBS))


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS)
def test_parameters_are_whole_behind_an_error(both, verb):
    for rank, verbs in enumerate(both):
        plain, gathered = verbs[verb]
        assert gathered == plain, f"rank {rank}"
