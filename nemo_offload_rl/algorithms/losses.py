"""Defines the losses of next-token log-probs, and estimates of a KL divergence.

Estimates a KL divergence per token from samples, and computes a KL penalty with the right gradient. With r = q(x) /
p(x) and x drawn from p, the three estimate KL(p || q); see J. Schulman, "Approximating KL Divergence"
(http://joschu.net/blog/kl-approx.html): k1 = -log r is unbiased with high variance, k2 = (log r)^2 / 2 is biased with
low variance, k3 = (r - 1) - log r is unbiased with low variance and never negative.

This holds for their values. The gradient of a mean over samples of p is not the mean of the estimators' gradients,
since the samples depend on p, too (https://arxiv.org/abs/2506.09477): the mean of k1's gradients is 0. ``kl_penalty``
therefore weights each estimate by the probability of its token, so that the gradient includes the score-function term.

All follow the contract of ``nemo_offload_rl.data.batch``: a loss returns a micro-batch's share of a mean over
the global batch, so the split into micro-batches does not change the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from types import MappingProxyType

import torch
from torch.nn.functional import logsigmoid

from nemo_offload_rl.algorithms.importance_sampling import Truncation, TruncationType, importance_weight
from nemo_offload_rl.data.batch import BatchedData, GlobalCounts

KL_ESTIMATORS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = MappingProxyType(
    {
        "k1": lambda log_ratio: -log_ratio,
        "k2": lambda log_ratio: log_ratio.square() / 2,
        "k3": lambda log_ratio: torch.expm1(log_ratio) - log_ratio,
    }
)


def estimate_kl(logprobs: torch.Tensor, other_logprobs: torch.Tensor, kl_type: str) -> torch.Tensor:
    """Estimates KL(p || q) at every token, for metrics only: its gradient is not the divergence's.

    Args:
        logprobs: log p of tokens drawn from p, float32 of any shape.
        other_logprobs: log q of the same tokens, same shape.
        kl_type: a key of ``KL_ESTIMATORS``.

    Returns:
        float32 of the same shape.

    Raises:
        ValueError: the estimator is unknown.
    """
    return _estimator(kl_type)(other_logprobs - logprobs)


def kl_penalty(
    logprobs: torch.Tensor,
    other_logprobs: torch.Tensor,
    sampler_logprobs: torch.Tensor,
    kl_type: str,
    input_clamp: float | None,
    output_clamp: float | None,
) -> torch.Tensor:
    """Estimates KL(p || q) at every token, with the score-function term in its gradient.

    Each estimate is weighted by p over the probability with which the token is taken to be drawn. In expectation over
    that distribution, and without clamps, value and gradient are those of E_p[k] at the sampled contexts.

    Args:
        logprobs: log p of the tokens, float32 of any shape, with gradient.
        other_logprobs: log q of the same tokens, same shape, constant.
        sampler_logprobs: log-probs of the distribution from which tokens are taken to be drawn, same shape, constant:
            the sampler's, or p's own, detached, which makes every weight 1 in value.
        kl_type: a key of ``KL_ESTIMATORS``.
        input_clamp: bound on the absolute value of log q - log p; None for none.
        output_clamp: bound on the absolute value of the weighted estimate; None for none.

    Returns:
        float32 of the same shape. An entry that either clamp has changed has no gradient, not even from its weight.

    Raises:
        ValueError: the estimator is unknown.
    """
    log_ratio = other_logprobs - logprobs
    weight = importance_weight(logprobs - sampler_logprobs)
    if input_clamp is not None:
        clamped = log_ratio.clamp(-input_clamp, input_clamp)
        weight = torch.where(clamped == log_ratio, weight, weight.detach())
        log_ratio = clamped
    kl = weight * _estimator(kl_type)(log_ratio)
    return kl if output_clamp is None else kl.clamp(-output_clamp, output_clamp)


def _estimator(kl_type: str) -> Callable[[torch.Tensor], torch.Tensor]:
    if kl_type not in KL_ESTIMATORS:
        raise ValueError(f"The KL estimator must be one of {', '.join(KL_ESTIMATORS)}, found {kl_type!r}.")
    return KL_ESTIMATORS[kl_type]


@dataclass(frozen=True)
class NLLLoss:
    """Computes the negative log-likelihood of the trained tokens, averaged over all of them in the global batch.

    Metrics: ``answer_probability``, the mean over samples of the probability of the whole answer, that is, how often
    sampling at temperature 1 gives exactly that answer; ``num_valid_samples``, a sum.
    """

    def __call__(
        self, logprobs: torch.Tensor, data: BatchedData, counts: GlobalCounts
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Computes the loss; see ``LossFunction``."""
        sample_mask = data["sample_mask"]
        answer_logprobs = _trained(logprobs, data).sum(dim=1)
        loss = -_share(answer_logprobs, sample_mask, counts.valid_toks)
        with torch.no_grad():
            metrics = {
                "answer_probability": _share(answer_logprobs.exp(), sample_mask, counts.valid_seqs),
                "num_valid_samples": sample_mask.sum(),
            }
        return loss, metrics


@dataclass(frozen=True)
class DPOLoss:
    """Computes the loss of DPO (https://arxiv.org/abs/2305.18290, equation 7), averaged over pairs.

    The reward of an answer is log p(answer) - log p_reference(answer). With beta, the reference policy's KL penalty,
    a pair's preference loss is -log sigmoid(beta * (reward of the chosen answer - reward of the rejected one)). The
    negative log-likelihood of the chosen answer may be added. Attributes have the names of NeMo-RL's ``dpo`` section.

    Rows 2i and 2i + 1 of a batch are the chosen and the rejected answer of a pair, and have the same ``sample_mask``.

    Metrics, all means over pairs: ``preference_loss`` and ``sft_loss`` without their weights (``sft_loss`` is 0 where
    its weight is 0);
    ``rewards_chosen_mean``, ``rewards_rejected_mean`` and ``rewards_margin_mean`` without beta, as NeMo-RL's;
    ``accuracy``, the share of pairs whose chosen answer has the higher reward; ``logprobs_chosen_mean`` and
    ``logprobs_rejected_mean`` of whole answers; and ``num_valid_samples``, the number of pairs.

    Attributes:
        reference_policy_kl_penalty: beta; above 0.
        preference_loss_weight: weight of the preference loss.
        sft_loss_weight: weight of the negative log-likelihood of the chosen answer.
        preference_average_log_probs: divide the reward of an answer by its number of tokens.
        sft_average_log_probs: divide the likelihood loss of an answer by its number of tokens.
    """

    reference_policy_kl_penalty: float
    preference_loss_weight: float
    sft_loss_weight: float
    preference_average_log_probs: bool
    sft_average_log_probs: bool

    def __call__(
        self, logprobs: torch.Tensor, data: BatchedData, counts: GlobalCounts
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Computes the loss; see ``LossFunction``. Needs ``reference_policy_logprobs``."""
        token_mask = data["token_mask"][:, 1:]
        num_tokens = token_mask.sum(dim=1).clamp(min=1)
        answers, reference = (
            _trained(values, data).sum(dim=1) for values in (logprobs, data["reference_policy_logprobs"])
        )
        rewards = answers - reference
        if self.preference_average_log_probs:
            rewards = rewards / num_tokens
        likelihoods = answers / num_tokens if self.sft_average_log_probs else answers
        rewards_chosen, rewards_rejected = rewards[::2], rewards[1::2]
        margins = rewards_chosen - rewards_rejected

        pair_mask = data["sample_mask"][::2]
        num_pairs = counts.valid_seqs / 2
        preference_loss = -_share(logsigmoid(self.reference_policy_kl_penalty * margins), pair_mask, num_pairs)
        sft_loss = -_share(likelihoods[::2], pair_mask, num_pairs)
        loss = self.preference_loss_weight * preference_loss + self.sft_loss_weight * sft_loss
        with torch.no_grad():
            per_pair = {
                "accuracy": (margins > 0).float(),
                "rewards_chosen_mean": rewards_chosen,
                "rewards_rejected_mean": rewards_rejected,
                "rewards_margin_mean": margins,
                "logprobs_chosen_mean": answers[::2],
                "logprobs_rejected_mean": answers[1::2],
            }
            metrics = {name: _share(values, pair_mask, num_pairs) for name, values in per_pair.items()}
        # As in NeMo-RL, a likelihood that is not part of the loss is not measured.
        measured = sft_loss.detach() if self.sft_loss_weight > 0 else torch.zeros_like(sft_loss)
        metrics |= {"preference_loss": preference_loss.detach(), "sft_loss": measured}
        metrics["num_valid_samples"] = pair_mask.sum()
        return loss, metrics


@dataclass(frozen=True)
class ClippedPGLoss:
    """Computes the clipped policy-gradient loss with a KL penalty: PPO, GRPO, DAPO, GSPO or CISPO, by its settings.

    Attributes have the names of NeMo-RL's ``loss_fn`` section.

    Attributes:
        ratio_clip_min: the ratio is clipped below at 1 - ratio_clip_min (PPO, https://arxiv.org/abs/1707.06347).
        ratio_clip_max: the ratio is clipped above at 1 + ratio_clip_max; larger than ratio_clip_min is DAPO's
            "clip higher" (https://arxiv.org/abs/2503.14476).
        ratio_clip_c: a factor above 1; where the advantage is negative, the loss is at most ratio_clip_c times the
            advantage's absolute value (dual-clip PPO, https://arxiv.org/abs/1912.09729); None for no bound.
        reference_policy_kl_penalty: weight of KL(policy || reference); 0 needs no reference log-probs.
        reference_policy_kl_type: k1, k2 or k3, see ``KL_ESTIMATORS``; also used for the metric ``gen_kl_error``.
        kl_input_clamp_value: bound on the log-ratio in the KL estimate; None for none.
        kl_output_clamp_value: bound on the weighted KL estimate; None for none.
        token_level_loss: average over all tokens; otherwise over the tokens of a sample, then over samples.
        use_importance_sampling_correction: weight each token by exp(prev_logprobs - generation_logprobs), the training
            policy's probability over the sampler's; with sequence-level ratios, by that of the whole sample.
        truncated_importance_sampling_type: how that weight is bounded: tis, icepop or seq-mask-tis (see
            ``importance_sampling.py``); None for no bounds.
        truncated_importance_sampling_ratio: the weight's upper bound; None without a type.
        truncated_importance_sampling_ratio_min: the weight's lower bound; None means 0, and is valid for tis only.
        sequence_level_importance_ratios: one ratio per sample, the geometric mean of its tokens' ratios (GSPO,
            https://arxiv.org/abs/2507.18071).
        disable_ppo_ratio: plain REINFORCE, advantage times log-prob, without ratio or clipping.
        force_on_policy_ratio: the ratio is 1 in value and has the gradient of the log-prob: the current log-probs,
            detached, replace prev_logprobs, which need not be computed. The batch must be one optimizer step.
        use_on_policy_kl_approximation: weight the KL estimate by exp(logprobs - generation_logprobs), since its samples
            are the sampler's; otherwise the samples are taken to be drawn from the current policy, and the weight is 1
            in value. Either weight has a gradient.
        use_cispo: the clipped ratio, without gradient, is the weight of advantage times log-prob, so that every token
            has a gradient (CISPO, https://arxiv.org/abs/2506.13585).
    """

    ratio_clip_min: float
    ratio_clip_max: float
    ratio_clip_c: float | None
    reference_policy_kl_penalty: float
    token_level_loss: bool
    reference_policy_kl_type: str
    kl_input_clamp_value: float | None
    kl_output_clamp_value: float | None
    use_importance_sampling_correction: bool
    truncated_importance_sampling_type: TruncationType | None
    truncated_importance_sampling_ratio: float | None
    truncated_importance_sampling_ratio_min: float | None
    sequence_level_importance_ratios: bool
    disable_ppo_ratio: bool
    force_on_policy_ratio: bool
    use_on_policy_kl_approximation: bool
    use_cispo: bool

    def __post_init__(self) -> None:
        if self.ratio_clip_c is not None and self.ratio_clip_c <= 1:
            raise ValueError(f"loss_fn.ratio_clip_c must be above 1 or null, found {self.ratio_clip_c}.")
        if self.reference_policy_kl_type not in KL_ESTIMATORS:
            raise ValueError(
                f"loss_fn.reference_policy_kl_type must be one of {', '.join(KL_ESTIMATORS)}, "
                f"found {self.reference_policy_kl_type!r}."
            )
        if self.disable_ppo_ratio and (self.force_on_policy_ratio or self.sequence_level_importance_ratios):
            raise ValueError(
                "loss_fn.disable_ppo_ratio leaves no ratio, so loss_fn.force_on_policy_ratio and "
                "loss_fn.sequence_level_importance_ratios must be false with it."
            )
        no_weight = self.disable_ppo_ratio or self.force_on_policy_ratio or self.sequence_level_importance_ratios
        if self.use_cispo and (no_weight or self.ratio_clip_c is not None or not self.token_level_loss):
            raise ValueError(
                "loss_fn.use_cispo weights single tokens by their clipped ratio, so loss_fn.token_level_loss must be "
                "true with it, ratio_clip_c null, and disable_ppo_ratio, force_on_policy_ratio and "
                "sequence_level_importance_ratios false."
            )

    @property
    def needs_prev_logprobs(self) -> bool:
        """Whether the loss needs the policy's log-probs before the update."""
        return not self.force_on_policy_ratio

    @property
    def needs_reference_logprobs(self) -> bool:
        """Whether the loss needs the reference policy's log-probs."""
        return self.reference_policy_kl_penalty != 0

    def __call__(
        self, logprobs: torch.Tensor, data: BatchedData, counts: GlobalCounts
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Computes the loss; see ``LossFunction``.

        Needs advantages and the log-probs of the old policy, the sampler and the reference. The KL penalty is that of
        the unfiltered policy: if ``logprobs`` are computed with the sampler's filter (such as top-p), it uses
        ``unfiltered_logprobs``.
        """
        token_mask = data["token_mask"][:, 1:]
        sample_mask = data["sample_mask"]
        previous_logprobs = logprobs.detach() if self.force_on_policy_ratio else data["prev_logprobs"]
        current, previous, sampler, advantages = (
            _trained(values, data)
            for values in (logprobs, previous_logprobs, data["generation_logprobs"], data["advantages"])
        )

        def mean(per_token: torch.Tensor) -> torch.Tensor:
            if self.token_level_loss:
                return _token_share(per_token, token_mask, sample_mask, counts)
            return _share(_mean_over_tokens(per_token, token_mask), sample_mask, counts.valid_seqs)

        ratio = self._ratio(current, previous, token_mask)
        clipped_ratio = self._clip(ratio)
        weight, outside = self._sampler_correction(previous, sampler, token_mask)
        loss = mean(weight * self._policy_gradient(advantages, current, ratio, clipped_ratio))

        kl = torch.zeros_like(loss)
        if self.needs_reference_logprobs:
            reference = _trained(data["reference_policy_logprobs"], data)
            whole = _trained(data["unfiltered_logprobs"], data) if "unfiltered_logprobs" in data else current
            kl = mean(self._reference_kl(whole, reference, sampler))
            loss = loss + self.reference_policy_kl_penalty * kl

        with torch.no_grad():
            per_token_metrics = {
                "probs_ratio": ratio,
                "probs_ratio_clamped": clipped_ratio,
                "token_mult_prob_error": (sampler - previous).abs().exp(),
                "gen_kl_error": estimate_kl(sampler, previous, self.reference_policy_kl_type),
                "approx_entropy": -(current - sampler).exp() * current,
            }
            metrics = {
                name: _token_share(values, token_mask, sample_mask, counts)
                for name, values in per_token_metrics.items()
            }
            metrics["kl_penalty"] = kl.detach()
            if outside is not None and outside.dim() == 1:
                metrics["is_oob_ratio"] = _share(outside.float(), sample_mask, counts.valid_seqs)
            elif outside is not None:
                metrics["is_oob_ratio"] = _token_share(outside.float(), token_mask, sample_mask, counts)
            metrics["num_valid_samples"] = sample_mask.sum()
        return loss, metrics

    def _ratio(self, current: torch.Tensor, previous: torch.Tensor, token_mask: torch.Tensor) -> torch.Tensor:
        if self.disable_ppo_ratio:
            return current
        log_ratio = current - previous
        if self.sequence_level_importance_ratios:
            log_ratio = _mean_over_tokens(log_ratio, token_mask)[:, None].expand_as(current)
        return log_ratio.exp()

    def _clip(self, ratio: torch.Tensor) -> torch.Tensor:
        return ratio if self.disable_ppo_ratio else ratio.clamp(1 - self.ratio_clip_min, 1 + self.ratio_clip_max)

    def _policy_gradient(
        self, advantages: torch.Tensor, current: torch.Tensor, ratio: torch.Tensor, clipped_ratio: torch.Tensor
    ) -> torch.Tensor:
        if self.use_cispo:
            return -advantages * clipped_ratio.detach() * current
        pessimistic = torch.maximum(-advantages * ratio, -advantages * clipped_ratio)
        ceiling = inf if self.ratio_clip_c is None else -advantages * self.ratio_clip_c
        return torch.where(advantages < 0, pessimistic.clamp(max=ceiling), pessimistic)

    def _sampler_correction(
        self, previous: torch.Tensor, sampler: torch.Tensor, token_mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the weights of tokens and, if they are bounded, which tokens or samples were out of bounds."""
        if not self.use_importance_sampling_correction:
            return torch.ones_like(previous), None
        log_weight = previous - sampler
        weight = importance_weight(log_weight)
        if self.sequence_level_importance_ratios:
            weight = importance_weight(log_weight.sum(dim=1, keepdim=True)).expand_as(previous)
        if self.truncated_importance_sampling_type is None:
            return weight, None
        assert self.truncated_importance_sampling_ratio is not None, "validation asks for it"
        return Truncation(
            self.truncated_importance_sampling_type,
            self.truncated_importance_sampling_ratio,
            self.truncated_importance_sampling_ratio_min or 0.0,
        )(log_weight, weight, token_mask)

    def _reference_kl(self, current: torch.Tensor, reference: torch.Tensor, sampler: torch.Tensor) -> torch.Tensor:
        return kl_penalty(
            current,
            reference,
            sampler if self.use_on_policy_kl_approximation else current.detach(),
            self.reference_policy_kl_type,
            self.kl_input_clamp_value,
            self.kl_output_clamp_value,
        )


def _trained(values: torch.Tensor, data: BatchedData) -> torch.Tensor:
    """Returns the values of tokens 1 and later, [B, S] to [B, S - 1], with 0 where the token or its sample is masked.

    Losses mask their inputs, not their results: a gradient of 0 times the infinite derivative of a masked value would
    be NaN.
    """
    is_trained = (data["token_mask"][:, 1:] > 0) & (data["sample_mask"] > 0)[:, None]
    return torch.where(is_trained, values[:, 1:], 0.0)


def _share(per_sample: torch.Tensor, sample_mask: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Returns the sum over unmasked samples, divided by a global count; 0 where the count is 0."""
    return (per_sample * sample_mask).sum() / count.clamp(min=1)


def _token_share(
    per_token: torch.Tensor, token_mask: torch.Tensor, sample_mask: torch.Tensor, counts: GlobalCounts
) -> torch.Tensor:
    return _share((per_token * token_mask).sum(dim=1), sample_mask, counts.valid_toks)


def _mean_over_tokens(per_token: torch.Tensor, token_mask: torch.Tensor) -> torch.Tensor:
    """Returns the mean over the trained tokens of each sample: [B, S] to [B]."""
    return (per_token * token_mask).sum(dim=1) / token_mask.sum(dim=1).clamp(min=1)
