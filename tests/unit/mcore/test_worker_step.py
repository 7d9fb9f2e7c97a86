"""Tests the computation of a step on one rank, and the watch over updates that change no parameter."""

import hashlib
import inspect
import math

import pytest
import torch
from megatron.core.optimizer import ChainedOptimizer
from support.everyday import upstream_learning_rate
from support.tiny import TINY_QWEN3, TINY_QWEN3_MOE, batch_of_lengths, random_batch, tiny_policy, with_plain_sgd

from nemo_offload_rl.algorithms.losses import DPOLoss, NLLLoss
from nemo_offload_rl.mcore.build import UnchangedParametersError, make_scheduler
from nemo_offload_rl.run.setup import with_run_length
from nemo_offload_rl.worker.skipped_steps import TooManySkippedStepsError


def parameters_of(worker) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in worker.state.parameters()}


def gradients_of(worker) -> torch.Tensor:
    buffers = [b for chunk in worker.state.model for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    return torch.cat([buffer.grad_data.flatten().clone() for buffer in buffers])


def is_as_before(worker, before: dict[str, torch.Tensor]) -> bool:
    after = parameters_of(worker)
    return all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_micro_batches_never_change_the_gradient(make_worker):
    data = random_batch(8)
    found = []
    for mbs in (8, 4, 2, 3):
        worker = make_worker()
        result = worker.train(data, NLLLoss(), gbs=8, mbs=mbs)
        found.append((gradients_of(worker), (result["loss"], result["grad_norm"])))
        torch.testing.assert_close(found[-1][0], found[0][0], rtol=1e-5, atol=1e-6)
        assert found[-1][1] == pytest.approx(found[0][1], rel=1e-5)


@pytest.mark.parametrize("model", [TINY_QWEN3, TINY_QWEN3_MOE])
def test_the_padding_of_a_micro_batch_changes_no_number(make_worker, model):
    data, found = batch_of_lengths([5, 4, 30, 9, 3, 12, 7]), []
    for divisible_by in (2, 32):  # padded to 6, 30, 12 and 8 tokens; all to 32
        policy = with_plain_sgd(tiny_policy(model), rate=0.1) | {"make_sequence_length_divisible_by": divisible_by}
        worker = make_worker(policy, init_reference_model=True)
        steps = [worker.train(data, NLLLoss(), gbs=7, mbs=2) for _ in range(2)]
        pairs = data.slice(0, 6).in_groups(2)
        reference = worker.get_reference_policy_logprobs(pairs, mbs=1)["reference_logprobs"]
        assert reference.shape == (6, 30)
        logprobs = worker.get_logprobs(data, mbs=2)["logprobs"]
        assert logprobs.shape == data["input_ids"].shape
        pairs["reference_policy_logprobs"] = reference
        loss = DPOLoss(0.5, 1.0, 0.1, False, False)
        steps += [worker.evaluate(pairs, loss, mbs=1), worker.train(pairs, loss, gbs=3, mbs=1)]
        numbers = [torch.tensor((step["loss"], step["grad_norm"], *step["metrics"].values())) for step in steps[:2]]
        pair_losses = torch.tensor([step["loss"] for step in steps[2:]])
        found.append((numbers, pair_losses, logprobs, reference, parameters_of(worker)))
    torch.testing.assert_close(found[0], found[1], rtol=1e-6, atol=1e-6)


def sampling(backend: str, **settings: float) -> dict:
    return tiny_policy() | {"generation": {"backend": backend, "colocated": {"enabled": False}, **settings}}


def test_log_probs_follow_the_sampling_temperature(make_worker):
    warm = make_worker().get_logprobs(random_batch(2), mbs=2)["logprobs"]
    cold = make_worker(sampling("transformers", temperature=0.5)).get_logprobs(random_batch(2), mbs=2)["logprobs"]
    assert not torch.allclose(warm, cold)


def test_log_probs_follow_the_filter_of_an_engine_that_reports_them_filtered(make_worker):
    settings = {"temperature": 0.7, "top_k": 3, "top_p": 0.8}
    data = random_batch(4)
    unfiltered = make_worker(sampling("transformers", **settings)).get_logprobs(data, mbs=2)["logprobs"]
    worker = make_worker(sampling("vllm", **settings), init_reference_model=True)
    filtered = worker.get_logprobs(data, mbs=2)["logprobs"]
    real = torch.arange(data["input_ids"].shape[1])[None] < data["input_lengths"][:, None]
    real[:, 0] = False
    assert (filtered[real] > unfiltered[real]).all()  # filtered-out tokens give their probability to the rest
    reference = worker.get_reference_policy_logprobs(data, mbs=2)["reference_logprobs"]
    torch.testing.assert_close(reference, unfiltered)  # for the KL penalty: over all tokens
    seen = []

    def loss(logprobs, data, counts):
        seen.extend([logprobs.detach().clone(), data["unfiltered_logprobs"].detach().clone()])
        return -logprobs.mean() - data["unfiltered_logprobs"].mean(), {}

    worker.train(data, loss, gbs=4, mbs=4)
    torch.testing.assert_close(seen, [filtered, unfiltered])


def test_training_learns_and_follows_the_schedule(make_worker):
    worker = make_worker()
    results = [worker.train(random_batch(8), NLLLoss(), gbs=8, mbs=8) for _ in range(20)]
    assert results[-1]["loss"] < 0.8 * results[0]["loss"]
    # The rate warms up over two steps from 1e-4 to 1e-3.
    assert [round(r["lr"], 6) for r in results[:3]] == [1e-4, 5.5e-4, 1e-3]
    assert results[0]["num_steps"] == 1
    assert results[0]["tokens"] == int(random_batch(8)["input_lengths"].sum())


def poisoned_loss(logprobs, data, counts):
    return logprobs.sum() * float("nan"), {}


def loss_with_poisoned_gradient(logprobs, data, counts):
    zero = (logprobs - logprobs.detach()).sum()
    return zero.sqrt() - logprobs.sum() / counts.valid_toks, {}  # sqrt is finite at 0; its derivative is not


@pytest.mark.parametrize("loss", [poisoned_loss, loss_with_poisoned_gradient])
def test_a_step_that_is_not_finite_is_skipped_and_counted(make_worker, loss):
    worker = make_worker(tiny_policy() | {"max_skipped_steps": 1})
    before = parameters_of(worker)
    result = worker.train(random_batch(4), loss, gbs=4, mbs=4)
    assert (result["num_skipped"], result["num_steps"]) == (1, 0)
    assert is_as_before(worker, before)
    with pytest.raises(TooManySkippedStepsError, match=r"policy\.max_skipped_steps 1"):
        worker.train(random_batch(4), loss, gbs=4, mbs=4)


def test_steps_that_were_skipped_before_a_checkpoint_count_on(make_worker, tmp_path):
    worker = make_worker(tiny_policy() | {"max_skipped_steps": 2})
    worker.save_checkpoint(str(tmp_path / "policy"), save_optimizer=True)
    worker.load_checkpoint(str(tmp_path / "policy"), num_skipped=1)
    worker.train(random_batch(4), poisoned_loss, gbs=4, mbs=4)
    with pytest.raises(TooManySkippedStepsError, match="in 3 steps of this run"):
        worker.train(random_batch(4), poisoned_loss, gbs=4, mbs=4)


def decaying(**scheduler):
    linear = {"lr_decay_style": "linear", "weight_decay_incr_style": "linear"}
    return tiny_policy(optimizer={"min_lr": 1e-4}, scheduler=linear | scheduler)


def weight_decay(optimizer) -> float:
    return max(group["weight_decay"] for group in optimizer.param_groups)


def test_the_schedule_ticks_once_a_call_as_in_nemo_rl(make_worker, tmp_path):
    """Each call has four optimizer steps; a checkpoint that counted those goes on at the run's step."""
    shape = {"style": "linear", "init": 1e-5, "peak": 1e-3, "floor": 1e-4, "warmup": 2, "decay": 6}
    worker = make_worker(decaying(lr_warmup_init=1e-5, lr_warmup_iters=2, lr_decay_iters=6, end_weight_decay=0.07))
    for call in range(4):
        assert weight_decay(worker.state.optimizer) == pytest.approx(0.01 + 0.01 * call)
        result = worker.train(random_batch(8, seed=call), NLLLoss(), gbs=2, mbs=2)
        assert (result["num_steps"], result["num_microbatches"]) == (4, 4)
        assert result["lr"] == pytest.approx(upstream_learning_rate(call, **shape))
    worker.save_checkpoint(str(tmp_path / "policy"), save_optimizer=True)
    worker.load_checkpoint(str(tmp_path / "policy"))
    rates = [worker.train(random_batch(2), NLLLoss(), gbs=2, mbs=2)["lr"]]
    worker.load_checkpoint(str(tmp_path / "policy"), num_train_calls=3)
    rates.append(worker.train(random_batch(2), NLLLoss(), gbs=2, mbs=2)["lr"])
    assert rates == pytest.approx([upstream_learning_rate(call, **shape) for call in (4, 3)])


def test_schedules_that_the_run_ends_have_nemo_rls_lengths(make_worker):
    """Weight decay changes over the run's 3 steps, and a warm-up of 9 steps ends with the last, but for one sample."""
    policy = decaying(lr_warmup_iters=9, lr_decay_iters=None, end_weight_decay=0.04) | {"train_global_batch_size": 2}
    worker = make_worker(with_run_length(policy, 3))
    for call in range(3):
        assert weight_decay(worker.state.optimizer) == pytest.approx(0.01 + 0.01 * call)
        lr = worker.train(random_batch(2), NLLLoss(), gbs=2, mbs=2)["lr"]
        assert lr == pytest.approx(1e-4 + (1e-3 - 1e-4) * call / 2.5)


def test_without_a_run_weight_decay_changes_over_the_decay_of_the_learning_rate():
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    scheduler, decays = make_scheduler(decaying(lr_decay_iters=4, end_weight_decay=0.05), optimizer), []
    for _ in range(6):
        decays.append(weight_decay(optimizer))
        scheduler.step(increment=1)
    assert decays == pytest.approx([0.01, 0.02, 0.03, 0.04, 0.05, 0.05])


def state_of(worker) -> list[torch.Tensor]:
    [part] = worker.state.optimizer.chained_optimizers
    moments = [state[name] for state in part.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    return [tensor.detach().clone() for tensor in [*parameters_of(worker).values(), *moments]]


def test_a_batch_without_trained_tokens_changes_nothing(make_worker):
    """Adam's momentum and weight decay would move the weights; the next batch of the same call is trained."""
    worker = make_worker(tiny_policy() | {"max_skipped_steps": 0})
    worker.train(random_batch(4), NLLLoss(), gbs=4, mbs=2)
    before = state_of(worker)
    masked = random_batch(4, seed=1)
    masked["sample_mask"] = torch.zeros(4)
    result = worker.train(masked, NLLLoss(), gbs=4, mbs=2)
    assert all(torch.equal(*pair) for pair in zip(before, state_of(worker), strict=True))
    assert (result["num_steps"], result["num_skipped"]) == (0, 0)
    assert result["metrics"]["num_skipped_no_tokens"] == 1
    assert math.isnan(result["loss"])  # 0 would be the best of all, also for checkpointing.metric_name: train:loss
    half = random_batch(8, seed=2)
    half["sample_mask"] = torch.tensor([0.0] * 4 + [1.0] * 4)
    result = worker.train(half, NLLLoss(), gbs=4, mbs=2)
    assert (result["num_steps"], result["metrics"]["num_skipped_no_tokens"]) == (1, 1)
    assert result["loss"] > 0 and result["grad_norm"] > 0


def test_a_gradient_above_the_threshold_is_not_applied(make_worker):
    norm = make_worker().train(random_batch(4), NLLLoss(), gbs=4, mbs=2)["grad_norm"]
    for factor, num_steps in ((1.01, 1), (0.99, 0)):
        worker = make_worker(tiny_policy(optimizer={"grad_norm_skip_threshold": factor * norm}))
        before = parameters_of(worker)
        result = worker.train(random_batch(4), NLLLoss(), gbs=4, mbs=2)
        assert (result["num_steps"], result["num_skipped"]) == (num_steps, 0)
        assert result["metrics"].get("num_skipped_large_norm", 0) == 1 - num_steps
        assert result["grad_norm"] == pytest.approx(norm)
        assert is_as_before(worker, before) == (num_steps == 0)


def test_zeros_in_the_gradient_are_counted(make_worker):
    assert "num_zeros_in_grad" not in make_worker().train(random_batch(4), NLLLoss(), gbs=4, mbs=4)["metrics"]
    untied = TINY_QWEN3 | {"tie_word_embeddings": False}
    worker = make_worker(tiny_policy(untied, optimizer={"log_num_zeros_in_grad": True}))
    data = random_batch(4)
    data["input_ids"].clamp_(max=4)  # the embeddings of the other tokens get no gradient
    found = worker.train(data, NLLLoss(), gbs=4, mbs=4)["metrics"]["num_zeros_in_grad"]
    gradients = [parameter.main_grad for _, parameter in worker.state.parameters()]
    assert found == sum(int((gradient == 0).sum()) for gradient in gradients) >= 9 * 64


def test_the_update_follows_the_source_of_this_megatron_core():
    """`step._clip_and_update` repeats ChainedOptimizer.step, apart from parameters with a norm of their own."""
    source = inspect.getsource(ChainedOptimizer.step)
    changed = "megatron-core's ChainedOptimizer.step has changed: compare it with mcore/step.py, and write its hash"
    assert hashlib.sha256(source.encode()).hexdigest()[:16] == "c2b301e02ec29f4e", changed


def test_evaluation_changes_nothing_and_equals_the_loss_of_training(make_worker):
    worker = make_worker()
    before = parameters_of(worker)
    evaluated = worker.evaluate(random_batch(6), NLLLoss(), mbs=4)
    assert is_as_before(worker, before)
    trained = worker.train(random_batch(6), NLLLoss(), gbs=6, mbs=2)
    assert evaluated["loss"] == pytest.approx(trained["loss"], rel=1e-5)


def test_what_a_worker_cannot_compute_is_refused(make_worker):
    worker = make_worker()
    for words, call in (
        ("not a multiple of the 4 rows", lambda: worker.train(random_batch(6), NLLLoss(), gbs=4, mbs=2)),
        (r"policy\.max_total_sequence_length 32", lambda: worker.get_logprobs(random_batch(2, longest=40), mbs=2)),
        ("init_reference_model=True", lambda: worker.get_reference_policy_logprobs(random_batch(2), mbs=2)),
    ):
        with pytest.raises(ValueError, match=words):
            call()


def test_recomputing_activations_changes_no_number(make_worker):
    data = random_batch(4)
    plain = make_worker().train(data, NLLLoss(), gbs=4, mbs=2)
    again = make_worker(tiny_policy(activation_checkpointing=True)).train(data, NLLLoss(), gbs=4, mbs=2)
    assert (again["loss"], again["grad_norm"]) == (plain["loss"], plain["grad_norm"])


def test_a_frozen_router_does_not_move(make_worker):
    worker = make_worker(tiny_policy(TINY_QWEN3_MOE, freeze_moe_router=True))
    before = parameters_of(worker)
    worker.train(random_batch(4), NLLLoss(), gbs=4, mbs=4)
    moved = {name for name, after in worker.state.parameters() if not torch.equal(before[name], after)}
    assert any(".experts." in name for name in moved)
    assert not any(".router." in name for name in moved)


def test_unused_memory_goes_back_before_each_optimizer_step_and_from_level_2_on_behind_it(make_worker, monkeypatch):
    worker, calls = make_worker(), []
    step = worker.state.optimizer.step_with_ready_grads
    monkeypatch.setattr(worker.state.optimizer, "step_with_ready_grads", lambda: (calls.append("step"), step())[1])
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty_cache"))
    found = {}
    for level in (0, 1, 2):
        worker._empty_unused_memory_level = level
        calls.clear()
        worker.train(random_batch(8), NLLLoss(), gbs=4, mbs=4)
        found[level] = list(calls)
    assert found == {0: ["step"] * 2, 1: ["empty_cache", "step"] * 2, 2: ["empty_cache", "step", "empty_cache"] * 2}


def train(worker, count):
    for seed in range(count):
        worker.train(random_batch(4, seed=seed), NLLLoss(), gbs=4, mbs=4)


def test_an_optimizer_that_reaches_no_parameter_is_an_error(make_worker, monkeypatch):
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda *_, **__: None)
    worker = make_worker()
    train(worker, 2)
    with pytest.raises(UnchangedParametersError, match=r"changed none .*norm is \S+ and the learning rate 0\.001"):
        train(worker, 1)


def test_gradients_of_next_to_nothing_may_change_nothing(make_worker):
    worker = make_worker()
    for _ in range(5):
        worker.state.watch.before_step()
        worker.state.watch.after_step(1e-7, [1e-3], torch.device("cpu"))


def test_steps_that_are_not_to_change_anything_are_none(make_worker, monkeypatch):
    train(make_worker(tiny_policy(scheduler={"lr_warmup_init": 0.0, "lr_warmup_iters": 5})), 2)
    worker = make_worker()
    worker.train(random_batch(4), NLLLoss(), gbs=4, mbs=4)
    monkeypatch.setattr("nemo_offload_rl.mcore.step._clip_and_update", lambda *_: None)
    for group in worker.state.optimizer.param_groups:
        group["lr"] = 0.0
    monkeypatch.setattr(worker.state.scheduler, "step", lambda increment: None)
    train(worker, 4)
