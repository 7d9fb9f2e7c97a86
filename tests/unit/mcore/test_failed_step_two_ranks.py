"""Tests steps that fail while forward passes gather parameters, on two gloo ranks."""

import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.ranks import off_and_on, run_ranks, worker_of_rank
from support.tiny import random_batch, tiny_policy

TIMEOUT_S = 60
"""After which a rank that hangs is killed; a step takes less than one."""


def worker_that(gathers: bool, rank: int, world_size: int, port: int) -> Any:
    ddp = {"grad_reduce_in_fp32": False, "overlap_grad_reduce": True, "overlap_param_gather": gathers}
    return worker_of_rank(tiny_policy(distributed_data_parallel_config=ddp), rank, world_size, port)


def error_on_one_rank(rank: int, world_size: int, ports: list[int]) -> list[str]:
    """Returns what each of two calls raises if the loss fails on rank 1 alone, the first time between micro-batches."""
    from nemo_offload_rl.algorithms.losses import NLLLoss

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
    from support.phases import checksums

    from nemo_offload_rl.algorithms.losses import NLLLoss

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
    from support.phases import checksums

    from nemo_offload_rl.mcore.checkpoint import checkpoint

    out: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:  # saving starts a writer process, which a daemon process may not
        patch.setattr(checkpoint, "save", lambda *_, **__: out.append(checksums(worker)))
        worker.save_checkpoint("", save_optimizer=True)
    return out


VERBS: dict[str, Callable[[Any], Any]] = {
    "get_logprobs": log_probs,
    "train": trained,
    "send_weights": sent,
    "offload_after_refit": generated,
    "save_checkpoint": saved,
}


def behind_an_error(verb: str, rank: int, world_size: int, port: int, *, gathers: bool) -> Any:
    """Returns the result of a verb after `train` has failed on both ranks, between a step and the next forward pass."""
    from nemo_offload_rl.algorithms.losses import NLLLoss

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
