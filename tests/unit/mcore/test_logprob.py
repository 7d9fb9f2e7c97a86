import pytest
import torch
from support.ranks import run_ranks

from nemo_offload_rl.generation.sampling import choose_tokens
from nemo_offload_rl.mcore.logprob import logprob
from nemo_offload_rl.mcore.logprob.logprob import SamplingFilter, next_token_logprobs, token_logprobs
from nemo_offload_rl.mcore.model.bridge_import import have_transformer_engine


def expected(logits: torch.Tensor, targets: torch.Tensor, vocab_size: int, temperature: float) -> torch.Tensor:
    scaled = logits[..., :vocab_size].float() / temperature
    return scaled.log_softmax(-1).gather(-1, targets[..., None]).squeeze(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk", [3, 1024])
def test_values_and_gradients_are_those_of_log_softmax(monkeypatch, dtype, temperature, chunk):
    monkeypatch.setattr(logprob, "CHUNK_TOKENS", chunk)
    generator = torch.Generator().manual_seed(0)
    logits = (5 * torch.randn(2, 7, 20, generator=generator)).to(dtype).requires_grad_()
    targets = torch.randint(0, 17, (2, 7), generator=generator)
    weights = torch.randn(2, 7, generator=generator)

    got = token_logprobs(logits, targets, vocab_size=17, temperature=temperature, tp_group=None)
    (got * weights).sum().backward()
    gradient, logits.grad = logits.grad, None
    want = expected(logits, targets, 17, temperature)
    (want * weights).sum().backward()

    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient, logits.grad, rtol=1e-2 if dtype is torch.bfloat16 else 1e-5, atol=1e-5)
    assert gradient[..., 17:].abs().max() == 0  # the vocabulary's padding gets no probability and no gradient


FILTERS = [SamplingFilter(top_k=5), SamplingFilter(top_p=0.9), SamplingFilter(top_k=5, top_p=0.9)]


def filtered(logits: torch.Tensor, kept: SamplingFilter, temperature: float) -> torch.Tensor:
    """Returns log-probs [V] of one row's filtered distribution, by plain loops."""
    scaled = logits.double() / temperature
    order = scaled.argsort(descending=True).tolist()[: kept.top_k]
    probs = scaled[order].softmax(0).tolist()
    keep, mass = [], 0.0
    for token, prob in zip(order, probs, strict=True):
        if mass >= kept.top_p:
            break
        keep.append(token)
        mass += prob
    out = torch.full_like(scaled, -torch.inf)
    out[keep] = scaled[keep]
    return out.log_softmax(0)


@pytest.mark.parametrize("kept", FILTERS, ids=str)
@pytest.mark.parametrize("chunk", [2, 1024])
def test_filtered_log_probs_are_those_of_the_distribution_that_is_sampled(monkeypatch, kept, chunk):
    monkeypatch.setattr(logprob, "CHUNK_TOKENS", chunk)
    generator = torch.Generator().manual_seed(4)
    rows = 200
    logits = 2 * torch.randn(rows, 30, generator=generator)
    sampled, _ = choose_tokens(
        logits, torch.rand(rows, generator=generator).double(), temperature=0.7, top_k=kept.top_k, top_p=kept.top_p
    )
    leaf = logits.clone().requires_grad_()
    got = token_logprobs(leaf[:, None], sampled[:, None], vocab_size=30, temperature=0.7, tp_group=None, kept=kept)
    weights = torch.randn(rows, generator=generator)
    (got[:, 0] * weights).sum().backward()
    for row in range(rows):
        distribution = filtered(logits[row], kept, 0.7)
        token = sampled[row]
        assert torch.isfinite(distribution[token])  # the sampler of the transformers engine keeps the same tokens
        torch.testing.assert_close(got[row, 0].double(), distribution[token], atol=1e-5, rtol=0)
        slope = -distribution.exp() / 0.7
        slope[token] += 1 / 0.7
        torch.testing.assert_close(leaf.grad[row].double(), slope * weights[row].item(), atol=1e-5, rtol=0)


def test_a_target_that_the_filter_would_drop_counts_as_kept():
    logits, kept = torch.tensor([[[3.0, 2.0, 1.0, 0.0]]]), SamplingFilter(top_k=2)
    got = token_logprobs(logits, torch.tensor([[3]]), vocab_size=4, temperature=1.0, tp_group=None, kept=kept)
    torch.testing.assert_close(got[0, 0], torch.tensor([3.0, 2.0, 0.0]).log_softmax(0)[2])


def of_a_slice(rank: int, world_size: int, ports: list[int]) -> list[tuple[list[float], list[list[float]]]]:
    """Returns values and this rank's gradients of log-probs on half of a vocabulary, whose last column is padding."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://localhost:{ports[0]}", rank=rank, world_size=world_size
    )
    logits, targets = whole_vocabulary()
    out = []
    for kept in FILTERS:
        part = logits.chunk(world_size, dim=1)[rank].clone().requires_grad_()
        group = torch.distributed.group.WORLD
        values = token_logprobs(
            part[:, None], targets[:, None], vocab_size=29, temperature=0.7, tp_group=group, kept=kept
        )
        values.sum().backward()
        out.append((values[:, 0].tolist(), part.grad.tolist()))
    torch.distributed.destroy_process_group()
    return out


def whole_vocabulary() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    logits = 2 * torch.randn(40, 30, generator=generator)
    return logits, torch.randint(0, 29, (40,), generator=generator)


def test_filtered_log_probs_of_a_vocabulary_split_over_ranks():
    logits, targets = whole_vocabulary()
    of_ranks = run_ranks(of_a_slice, 2, num_ports=1)
    for index, kept in enumerate(FILTERS):
        leaf = logits.clone().requires_grad_()
        want = token_logprobs(leaf[:, None], targets[:, None], vocab_size=29, temperature=0.7, tp_group=None, kept=kept)
        want.sum().backward()
        for rank, results in enumerate(of_ranks):
            values, gradient = results[index]
            torch.testing.assert_close(torch.tensor(values), want[:, 0].detach(), atol=1e-5, rtol=0)
            torch.testing.assert_close(torch.tensor(gradient), leaf.grad.chunk(2, dim=1)[rank], atol=1e-5, rtol=0)


def test_log_probs_are_aligned_with_their_tokens():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(5, 2, 8, generator=generator)
    tokens = torch.randint(0, 8, (2, 5), generator=generator)

    got = next_token_logprobs(
        lambda targets: token_logprobs(logits, targets, vocab_size=8, temperature=1.0, tp_group=None), tokens
    )

    assert got[:, 0].tolist() == [0.0, 0.0]
    for row in range(2):
        for t in range(1, 5):
            torch.testing.assert_close(got[row, t], logits[t - 1, row].log_softmax(-1)[tokens[row, t]])


@pytest.mark.gpu
@pytest.mark.skipif(not have_transformer_engine(), reason="needs a CUDA GPU and Transformer Engine")
def test_the_fused_kernel_computes_the_same():
    generator = torch.Generator("cuda").manual_seed(2)
    start = 3 * torch.randn(4, 64, 32000, generator=generator, device="cuda").bfloat16()
    tokens = torch.randint(0, 32000, (4, 64), generator=generator, device="cuda")
    weights = torch.randn(4, 64, generator=generator, device="cuda")

    def run(temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = start.clone().requires_grad_()
        values = token_logprobs(
            leaf * 1.0, tokens, vocab_size=32000, temperature=temperature, tp_group=None, may_overwrite=True
        )
        (values * weights).sum().backward()
        return values.detach(), leaf.grad

    values, gradient = run(1.0)
    want, want_gradient = run(1.0 + 1e-9)  # not 1, to take the unfused path
    torch.testing.assert_close(values, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient, want_gradient, rtol=2e-2, atol=1e-5)
