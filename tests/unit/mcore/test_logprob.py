import pytest
import torch

from nemo_offload_rl.mcore import logprob
from nemo_offload_rl.mcore.logprob import padded_logprobs, token_logprobs


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
    logits = torch.randn(2, 5, 8, generator=generator)
    ids = torch.randint(0, 8, (2, 5), generator=generator)
    lengths = torch.tensor([5, 3])

    got = padded_logprobs(logits, ids, lengths, vocab_size=8, temperature=1.0, tp_group=None)

    assert got[:, 0].tolist() == [0.0, 0.0]
    for row, length in enumerate(lengths.tolist()):
        for t in range(1, length):
            want = logits[row, t - 1].log_softmax(-1)[ids[row, t]]
            torch.testing.assert_close(got[row, t], want)
        assert got[row, length:].abs().sum() == 0
