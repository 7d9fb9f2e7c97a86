import pytest
import torch

from nemo_offload_rl.mcore import logprob
from nemo_offload_rl.mcore.bridge_import import have_transformer_engine
from nemo_offload_rl.mcore.logprob import next_token_logprobs, token_logprobs


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
    assert gradient[..., 17:].abs().max() == 0  # padding of the vocabulary gets no probability and no gradient


def test_log_probs_are_aligned_with_their_tokens():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(5, 2, 8, generator=generator)
    tokens = torch.randint(0, 8, (2, 5), generator=generator)

    got = next_token_logprobs(logits, tokens, vocab_size=8, temperature=1.0, tp_group=None)

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
        values = token_logprobs(leaf * 1.0, tokens, vocab_size=32000, temperature=temperature, tp_group=None)
        (values * weights).sum().backward()
        return values.detach(), leaf.grad

    values, gradient = run(1.0)
    want, want_gradient = run(1.0 + 1e-9)  # not 1: the unfused path
    torch.testing.assert_close(values, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient, want_gradient, rtol=2e-2, atol=1e-5)
