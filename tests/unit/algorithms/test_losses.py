import math
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.losses import PLAIN

from nemo_offload_rl.algorithms.losses import ClippedPGLoss, NLLLoss, estimate_kl
from nemo_offload_rl.data.batch import BatchedData, GlobalCounts
from tests.unit.algorithms.test_dpo_loss import VARIANTS as DPO_VARIANTS
from tests.unit.algorithms.test_dpo_loss import dpo, random_pairs

LOG2 = math.log(2)


def truncated(kind: str, high: float, low: float | None) -> dict[str, object]:
    """Returns settings of truncated importance sampling."""
    return {
        "use_importance_sampling_correction": True,
        "truncated_importance_sampling_type": kind,
        "truncated_importance_sampling_ratio": high,
        "truncated_importance_sampling_ratio_min": low,
    }


VARIANTS = {
    "plain": {},
    "clip higher": {"ratio_clip_max": 0.4},
    "dual clip": {"ratio_clip_c": 1.3},
    "KL k1": {"reference_policy_kl_penalty": 0.3, "reference_policy_kl_type": "k1"},
    "KL k2": {"reference_policy_kl_penalty": 0.3, "reference_policy_kl_type": "k2"},
    "KL k3": {"reference_policy_kl_penalty": 0.3},
    "KL clamped": {"reference_policy_kl_penalty": 0.3, "kl_input_clamp_value": 0.4, "kl_output_clamp_value": 0.05},
    "KL unclamped": {"reference_policy_kl_penalty": 0.3, "kl_input_clamp_value": None, "kl_output_clamp_value": None},
    "KL on policy": {"reference_policy_kl_penalty": 0.3, "use_on_policy_kl_approximation": True},
    "KL on policy, clamped": {
        "reference_policy_kl_penalty": 0.3, "reference_policy_kl_type": "k1", "use_on_policy_kl_approximation": True,
        "kl_input_clamp_value": 0.4, "kl_output_clamp_value": 0.3,
    },
    "sample level": {"token_level_loss": False, "reference_policy_kl_penalty": 0.3},
    "sampler correction": {"use_importance_sampling_correction": True},
    "TIS": truncated("tis", 1.3, None),
    "TIS from below, too": truncated("tis", 1.3, 0.8),
    "TIS of samples": {
        **truncated("tis", 1.3, 0.8), "sequence_level_importance_ratios": True, "token_level_loss": False,
    },
    "ICE-POP": truncated("icepop", 1.4, 0.7),
    "samples masked": truncated("seq-mask-tis", 1.3, 0.8),
    "GSPO": {
        "sequence_level_importance_ratios": True, "token_level_loss": False, "use_importance_sampling_correction": True,
    },
    "REINFORCE": {"disable_ppo_ratio": True},
    "CISPO": {"use_cispo": True},
    "CISPO, clip higher": {"use_cispo": True, "ratio_clip_min": 0.1, "ratio_clip_max": 0.4},
    "CISPO with the KL": {"use_cispo": True, "reference_policy_kl_penalty": 0.3},
    "CISPO with the KL on policy": {
        "use_cispo": True, "reference_policy_kl_penalty": 0.3, "use_on_policy_kl_approximation": True,
    },
    "CISPO with sampler correction": {"use_cispo": True, "use_importance_sampling_correction": True},
    "CISPO with TIS": {"use_cispo": True, **truncated("tis", 1.3, 0.8)},
    "CISPO with ICE-POP": {"use_cispo": True, **truncated("icepop", 1.4, 0.7)},
    "CISPO with samples masked": {"use_cispo": True, **truncated("seq-mask-tis", 1.3, 0.8)},
    "forced ratio": {"force_on_policy_ratio": True, "reference_policy_kl_penalty": 0.1},
}  # fmt: skip


def random_batch(num_samples=6, width=7, seed=0, spread=0.4) -> tuple[torch.Tensor, BatchedData]:
    """Returns log-probs and a batch with unequal lengths, prompts, and one sample that is masked out."""
    rng = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, width + 1, (num_samples,), generator=rng)
    positions = torch.arange(width)
    valid = (positions < lengths[:, None]).float()
    token_mask = valid * (positions >= 2)
    logprobs = -torch.rand(num_samples, width, generator=rng) * 2 - 0.1

    def near(values):
        return (values + spread * torch.randn(num_samples, width, generator=rng)).clamp(max=-0.01) * valid

    sample_mask = torch.ones(num_samples)
    sample_mask[1] = 0
    data = BatchedData(
        input_ids=torch.randint(0, 9, (num_samples, width), generator=rng),
        input_lengths=lengths,
        token_mask=token_mask,
        sample_mask=sample_mask,
        prev_logprobs=near(logprobs),
        generation_logprobs=near(logprobs) * token_mask,
        reference_policy_logprobs=near(logprobs),
        advantages=torch.randn(num_samples, 1, generator=rng) * token_mask,
    )
    return logprobs * valid, data


def evaluated(loss, logprobs: torch.Tensor, data: BatchedData) -> tuple[float, torch.Tensor, dict[str, float]]:
    """Returns the loss, its gradient with respect to the log-probs, and its metrics."""
    current = logprobs.clone().requires_grad_()
    value, metrics = loss(current, data, GlobalCounts.of(data))
    value.backward()
    assert not any(metric.requires_grad for metric in metrics.values())
    return value.item(), current.grad, {name: metric.item() for name, metric in metrics.items()}


def loss_by_loops(loss: ClippedPGLoss, logprobs: np.ndarray, data: BatchedData, base: np.ndarray) -> float:
    """Computes the loss one token at a time, in float64 and without torch.

    ``base`` holds the log-probs to use where the gradient stops: the log-probs themselves for the loss's value; for
    finite differences, the log-probs around which they are taken.
    """
    columns = {name: data[name].double().numpy() for name in data}
    kept = [row for row in range(len(logprobs)) if columns["sample_mask"][row] > 0]
    num_tokens = sum(columns["token_mask"][row, 1:].sum() for row in kept)
    total = 0.0
    for row in kept:
        tokens = [t for t in range(1, logprobs.shape[1]) if columns["token_mask"][row, t] > 0]
        previous = base[row] if loss.force_on_policy_ratio else columns["prev_logprobs"][row]
        drawn_with = columns["generation_logprobs"][row] if loss.use_on_policy_kl_approximation else base[row]
        log_ratios = {t: logprobs[row, t] - previous[t] for t in tokens}
        log_weights = {t: previous[t] - columns["generation_logprobs"][row, t] for t in tokens}
        per_token = []
        for t in tokens:
            advantage = columns["advantages"][row, t]
            ratio = math.exp(log_ratios[t])
            weight = math.exp(log_weights[t])
            if loss.sequence_level_importance_ratios:
                ratio = math.exp(sum(log_ratios.values()) / len(tokens))
                weight = math.exp(sum(log_weights.values()))
            kind, high = loss.truncated_importance_sampling_type, loss.truncated_importance_sampling_ratio
            low = loss.truncated_importance_sampling_ratio_min or 0.0
            if kind == "tis":
                weight = min(max(weight, low), high)
            elif kind is not None:
                judged = weight if kind == "icepop" else math.exp(sum(log_weights.values()) / len(tokens))
                weight = weight if low <= judged <= high else 0.0
            clipped = min(max(ratio, 1 - loss.ratio_clip_min), 1 + loss.ratio_clip_max)
            if loss.disable_ppo_ratio:
                ratio = clipped = logprobs[row, t]
            value = max(-advantage * ratio, -advantage * clipped)
            if loss.use_cispo:
                at_base = math.exp(base[row, t] - previous[t])  # the weight has no gradient
                weight_of_token = min(max(at_base, 1 - loss.ratio_clip_min), 1 + loss.ratio_clip_max)
                value = -advantage * weight_of_token * logprobs[row, t]
            if loss.ratio_clip_c is not None and advantage < 0:
                value = min(value, -advantage * loss.ratio_clip_c)
            if loss.use_importance_sampling_correction:
                value *= weight
            if loss.reference_policy_kl_penalty:
                d = columns["reference_policy_logprobs"][row, t] - logprobs[row, t]
                drawn_now = logprobs[row, t]
                if loss.kl_input_clamp_value is not None and abs(d) > loss.kl_input_clamp_value:
                    d = math.copysign(loss.kl_input_clamp_value, d)
                    drawn_now = base[row, t]  # a clamped value has no gradient
                kl = {"k1": -d, "k2": d * d / 2, "k3": math.exp(d) - 1 - d}[loss.reference_policy_kl_type]
                kl *= math.exp(drawn_now - drawn_with[t])
                if loss.kl_output_clamp_value is not None:
                    kl = min(max(kl, -loss.kl_output_clamp_value), loss.kl_output_clamp_value)
                value += loss.reference_policy_kl_penalty * kl
            per_token.append(value)
        total += sum(per_token) / num_tokens if loss.token_level_loss else sum(per_token) / len(tokens) / len(kept)
    return total


@pytest.mark.parametrize("name", VARIANTS)
def test_value_and_gradient_against_plain_loops(name):
    loss = replace(PLAIN, **VARIANTS[name])
    for seed in range(3):
        logprobs, data = random_batch(seed=seed)
        value, gradient, _ = evaluated(loss, logprobs, data)
        exact, step = logprobs.double().numpy(), 1e-6
        assert value == pytest.approx(loss_by_loops(loss, exact, data, base=exact), rel=1e-5, abs=1e-6)
    differences = np.zeros_like(exact)
    for index in np.ndindex(*exact.shape):
        up, down = exact.copy(), exact.copy()
        up[index] += step
        down[index] -= step
        above, below = (loss_by_loops(loss, moved, data, base=exact) for moved in (up, down))
        differences[index] = (above - below) / (2 * step)
    np.testing.assert_allclose(gradient.numpy(), differences, rtol=1e-3, atol=1e-5)
    assert np.abs(differences).max() > 1e-3


OVERFLOWS = [
    # The weight of the first sample's first token, exp(100), is above float32 and counts as 0; the others are 1.
    ({"use_importance_sampling_correction": True}, -3 / 4, None),
    (truncated("tis", 2.0, None), -3 / 4, 0.0),
    (truncated("tis", 2.0, 0.5), -3.5 / 4, 1 / 4),
    (truncated("icepop", 2.0, 0.5), -3 / 4, 1 / 4),
    (truncated("seq-mask-tis", 2.0, 0.5), -2 / 4, 1 / 2),
    (truncated("seq-mask-tis", 1e30, 0.5), -3 / 4, 0.0),
    # The weight of the first sample is 0, its tokens' ratio 1.
    ({**VARIANTS["GSPO"]}, -1 / 2, None),
    ({**VARIANTS["GSPO"], **truncated("tis", 2.0, 0.25)}, -1.25 / 2, 1 / 2),
    ({**VARIANTS["GSPO"], **truncated("icepop", 2.0, 0.25)}, -1 / 2, 1 / 2),
]


@pytest.mark.parametrize(("change", "loss", "outside"), OVERFLOWS)
def test_weights_above_float32_count_as_zero(change, loss, outside):
    logprobs, sampler = torch.full((2, 3), -1.0), torch.full((2, 3), -1.0)
    sampler[0, 1] = -101.0
    data = BatchedData(
        token_mask=torch.tensor([[0.0, 1, 1], [0, 1, 1]]),
        sample_mask=torch.ones(2),
        prev_logprobs=logprobs,
        generation_logprobs=sampler,
        advantages=torch.ones(2, 3),
    )
    value, gradient, metrics = evaluated(replace(PLAIN, **change), logprobs, data)
    assert (value, gradient.sum().item()) == pytest.approx((loss, loss))
    assert metrics.get("is_oob_ratio") == (None if outside is None else pytest.approx(outside))


def test_a_kl_weight_above_float32_counts_as_zero():
    change = {"reference_policy_kl_penalty": 1.0, "use_on_policy_kl_approximation": True}
    loss, gradient, metrics = one_token(replace(PLAIN, **change), sampler=math.exp(-100), reference=0.25)
    assert (metrics["kl_penalty"], loss, gradient) == (0, -1, -1)


def one_token(loss: ClippedPGLoss, *, current=0.5, previous=0.5, sampler=0.5, reference=0.5, advantage=1.0):
    """Returns loss, gradient with respect to the log-prob, and metrics of one sample with one trained token."""
    data = BatchedData(
        token_mask=torch.tensor([[0.0, 1]]),
        sample_mask=torch.ones(1),
        prev_logprobs=torch.tensor([[0.0, math.log(previous)]]),
        generation_logprobs=torch.tensor([[0.0, math.log(sampler)]]),
        reference_policy_logprobs=torch.tensor([[0.0, math.log(reference)]]),
        advantages=torch.tensor([[0.0, advantage]]),
    )
    value, gradient, metrics = evaluated(loss, torch.tensor([[0.0, math.log(current)]]), data)
    return value, gradient[0, 1].item(), metrics


BY_HAND = [
    ({}, {"current": 0.55, "advantage": 2.0}, -2.2, -2.2),  # ratio 1.1, inside the clip
    ({}, {"current": 0.75, "advantage": 2.0}, -2.4, 0.0),  # ratio 1.5, clipped to 1.2
    ({}, {"current": 0.25, "advantage": 2.0}, -1.0, -1.0),  # ratio 0.5: the worse one counts
    ({}, {"current": 0.25, "advantage": -2.0}, 1.6, 0.0),  # ratio 0.5, clipped to 0.8
    ({}, {"current": 0.75, "advantage": -2.0}, 3.0, 3.0),  # ratio 1.5: the worse one counts
    ({"ratio_clip_c": 1.25}, {"current": 0.75, "advantage": -2.0}, 2.5, 0.0),  # ... up to the bound
    ({"ratio_clip_c": 1.25}, {"current": 0.75, "advantage": 2.0}, -2.4, 0.0),  # the bound is for negative ones only
    ({"ratio_clip_max": 0.6}, {"current": 0.75, "advantage": 2.0}, -3.0, -3.0),
    ({"force_on_policy_ratio": True}, {"current": 0.75, "advantage": 2.0}, -2.0, -2.0),
    ({"disable_ppo_ratio": True}, {"current": 0.5, "advantage": 2.0}, 2 * LOG2, -2.0),
    ({"use_importance_sampling_correction": True}, {"sampler": 0.25, "advantage": 1.0}, -2.0, -2.0),
    # a ratio of 1.5 is a weight of 1.2, and one of 0.5 a weight of 0.8, whatever the advantage's sign
    ({"use_cispo": True}, {"current": 0.75, "advantage": 2.0}, -2.4 * math.log(0.75), -2.4),
    ({"use_cispo": True}, {"current": 0.25, "advantage": -2.0}, 1.6 * math.log(0.25), 1.6),
    # d = log(1/2): the penalty adds 0.1 * (e^d - 1 - d), with gradient 0.1 * (1 - e^d) of the estimate and, since
    # the token counts as drawn from the policy, 0.1 * (e^d - 1 - d) of its probability
    ({"reference_policy_kl_penalty": 0.1}, {"reference": 0.25, "advantage": 0.0}, 0.1 * LOG2 - 0.05, 0.1 * LOG2),
]


@pytest.mark.parametrize(("change", "numbers", "loss", "gradient"), BY_HAND)
def test_gradients_by_hand(change, numbers, loss, gradient):
    value, slope, _ = one_token(replace(PLAIN, **change), **numbers)
    assert value == pytest.approx(loss, rel=1e-5)
    assert slope == pytest.approx(gradient, rel=1e-5, abs=1e-7)


def test_metrics_by_hand():
    numbers = {"current": 0.75, "previous": 0.5, "sampler": 0.4, "reference": 0.375}
    _, _, metrics = one_token(replace(PLAIN, reference_policy_kl_penalty=0.1), **numbers)
    expected = {
        "probs_ratio": 1.5,
        "probs_ratio_clamped": 1.2,
        "kl_penalty": LOG2 - 0.5,
        "token_mult_prob_error": 1.25,
        "gen_kl_error": 0.25 - math.log(1.25),
        "approx_entropy": -(0.75 / 0.4) * math.log(0.75),
        "num_valid_samples": 1.0,
    }
    assert metrics == pytest.approx(expected, rel=1e-5)
    assert one_token(PLAIN)[2]["kl_penalty"] == 0.0


def test_the_samplers_divergence_is_estimated_as_the_recipe_says():
    log = math.log(1.25)
    for kl_type, error in (("k1", -log), ("k2", log**2 / 2), ("k3", 0.25 - log)):
        loss = replace(PLAIN, reference_policy_kl_type=kl_type)
        assert one_token(loss, previous=0.5, sampler=0.4)[2]["gen_kl_error"] == pytest.approx(error, rel=1e-5)


def test_k3_is_exact_and_positive_for_tiny_ratios():
    logp = torch.tensor([-1.0, -1.0])
    kl = estimate_kl(logp, logp + torch.tensor([1e-3, -1e-3]), "k3")
    assert (kl > 0).all()
    assert kl.tolist() == pytest.approx([5.0e-7] * 2, rel=1e-2, abs=1e-7)


def test_without_a_penalty_no_setting_of_it_changes_a_bit_and_no_reference_is_needed():
    logprobs, data = random_batch()
    del data["reference_policy_logprobs"]
    results = []
    for kl_type in ("k1", "k2", "k3"):
        for on_policy in (False, True):
            loss = replace(PLAIN, reference_policy_kl_type=kl_type, use_on_policy_kl_approximation=on_policy)
            results.append(evaluated(loss, logprobs, data)[:2])
    assert all(value == results[0][0] and torch.equal(grad, results[0][1]) for value, grad in results)
    assert not PLAIN.needs_reference_logprobs
    assert replace(PLAIN, reference_policy_kl_penalty=0.1).needs_reference_logprobs


def test_the_penalty_is_of_the_whole_policy_where_the_sampler_filters():
    loss = replace(PLAIN, reference_policy_kl_penalty=0.1)
    logprobs, data = random_batch()
    counts = GlobalCounts.of(data)
    plain = loss(logprobs, data, counts)[1]
    data["unfiltered_logprobs"] = (logprobs - 0.3).requires_grad_()
    value, metrics = loss(logprobs, data, counts)
    data_of_whole = BatchedData({name: column for name, column in data.items() if name != "unfiltered_logprobs"})
    assert metrics["kl_penalty"] == loss(logprobs - 0.3, data_of_whole, counts)[1]["kl_penalty"]
    assert metrics["kl_penalty"] != plain["kl_penalty"]
    assert metrics["probs_ratio"] == plain["probs_ratio"]
    value.backward()
    assert data["unfiltered_logprobs"].grad.abs().max() > 0


def test_a_forced_ratio_needs_no_previous_logprobs():
    loss = replace(PLAIN, force_on_policy_ratio=True)
    logprobs, data = random_batch()
    expected = loss(logprobs, data, GlobalCounts.of(data))[1]["token_mult_prob_error"]
    del data["prev_logprobs"]
    metrics = loss(logprobs, data, GlobalCounts.of(data))[1]
    assert not loss.needs_prev_logprobs
    assert PLAIN.needs_prev_logprobs
    assert metrics["probs_ratio"].item() == pytest.approx(1.0)
    assert metrics["token_mult_prob_error"] == expected > 1.0


LOSSES = {
    **{name: (replace(PLAIN, **change), random_batch) for name, change in VARIANTS.items()},
    "NLL": (NLLLoss(), random_batch),
    **{f"DPO, {name}": (dpo(**change), random_pairs) for name, change in DPO_VARIANTS.items()},
}
COMPARED_WITH = {"prev_logprobs", "generation_logprobs", "reference_policy_logprobs", "advantages"}
of_every_loss = pytest.mark.parametrize(("loss", "make_batch"), LOSSES.values(), ids=LOSSES)


@of_every_loss
def test_microbatches_change_neither_loss_nor_gradient_nor_metrics(loss, make_batch):
    logprobs, data = make_batch()
    expected, gradient, expected_metrics = evaluated(loss, logprobs, data)
    counts = GlobalCounts.of(data)
    for size in (1, 2, 3):
        pieces, start = logprobs.clone().requires_grad_(), 0
        total, metrics = 0.0, dict.fromkeys(expected_metrics, 0.0)
        for part in data.chunks(size * data.group_size):
            value, shares = loss(pieces[start : start + part.size], part, counts)
            value.backward()
            total, start = total + value.item(), start + part.size
            metrics = {key: metrics[key] + shares[key].item() for key in metrics}
        assert total == pytest.approx(expected, rel=1e-5, abs=1e-6)
        torch.testing.assert_close(pieces.grad, gradient, rtol=1e-5, atol=1e-7)
        assert metrics == pytest.approx(expected_metrics, rel=1e-5, abs=1e-6)


@of_every_loss
def test_what_is_masked_plays_no_part(loss, make_batch):
    logprobs, data = make_batch()
    used = (data["token_mask"] * data["sample_mask"][:, None]).bool()
    used[:, 0] = False
    kept = (data["sample_mask"] > 0).nonzero().flatten().tolist()
    expected, gradient, expected_metrics = evaluated(loss, logprobs[kept], data.select(kept))
    for masked in (-1e9, math.inf, math.nan):
        noisy = data.select(range(data.size))
        for column in COMPARED_WITH & noisy.keys():
            noisy[column] = torch.where(used, data[column], masked)
        value, noisy_gradient, metrics = evaluated(loss, torch.where(used, logprobs, masked), noisy)
        assert value == pytest.approx(expected, rel=1e-6)
        assert metrics == pytest.approx(expected_metrics, rel=1e-6)
        torch.testing.assert_close(noisy_gradient[kept], gradient, rtol=1e-6, atol=1e-8)
        assert not noisy_gradient[~used].any()


@of_every_loss
def test_a_batch_without_valid_samples_gives_zero_and_losses_travel(loss, make_batch):
    travelled = pickle.loads(pickle.dumps(loss))
    assert travelled == loss
    logprobs, data = make_batch()
    data["sample_mask"] = torch.zeros(data.size)
    value, gradient, _ = evaluated(travelled, logprobs, data)
    assert value == 0
    assert not gradient.any()


def test_a_value_that_is_not_finite_shows():
    logprobs, data = random_batch()
    row, column = (data["token_mask"] * data["sample_mask"][:, None]).nonzero()[0].tolist()
    logprobs[row, column] = float("nan")
    assert not torch.isfinite(PLAIN(logprobs, data, GlobalCounts.of(data))[0])


def test_nll_by_hand():
    half, quarter = math.log(0.5), math.log(0.25)
    rows = [[0, -9.0, half, quarter], [0, -9.0, quarter, 0], [0, half, half, half]]
    logprobs, token_mask = torch.tensor(rows), [[0.0, 0, 1, 1], [0, 0, 1, 0], [0, 1, 1, 1]]
    data = BatchedData(token_mask=torch.tensor(token_mask), sample_mask=torch.tensor([1.0, 1, 0]))
    value, gradient, metrics = evaluated(NLLLoss(), logprobs, data)
    assert value == pytest.approx(-(half + quarter + quarter) / 3)
    assert gradient.tolist() == pytest.approx(np.array([[0, 0, -1, -1], [0, 0, -1, 0], [0, 0, 0, 0]]) / 3)
    assert metrics == pytest.approx({"answer_probability": (0.125 + 0.25) / 2, "num_valid_samples": 2})


def test_settings_that_cannot_be_are_refused():
    by_sample = {"sequence_level_importance_ratios": True, "token_level_loss": False}
    for change, message in (
        ({"ratio_clip_c": 1.0}, r"ratio_clip_c must be above 1 or null, found 1\.0"),
        ({"reference_policy_kl_type": "k9"}, "one of k1, k2, k3, found 'k9'"),
        ({"disable_ppo_ratio": True, "force_on_policy_ratio": True}, "leaves no ratio"),
        ({"use_cispo": True, "disable_ppo_ratio": True}, "use_cispo weights single tokens"),
        ({"use_cispo": True, "force_on_policy_ratio": True}, "use_cispo weights single tokens"),
        ({"use_cispo": True, **by_sample}, "use_cispo weights single tokens"),
        ({"use_cispo": True, "ratio_clip_c": 3.0}, "use_cispo weights single tokens"),
        ({"use_cispo": True, "token_level_loss": False}, "use_cispo weights single tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(PLAIN, **change)
    with pytest.raises(ValueError, match="one of k1, k2, k3, found 'k4'"):
        estimate_kl(torch.zeros(1), torch.zeros(1), "k4")
