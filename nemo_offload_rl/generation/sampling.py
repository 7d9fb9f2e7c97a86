"""Samples tokens from logits with random numbers that depend on the row, not on its batch."""

import array
import hashlib
from collections.abc import Sequence

import numpy as np
import torch


def row_uniforms(
    seed: int, step: int, prompt_ids: Sequence[Sequence[int]], sample_ids: Sequence[int], num_draws: int
) -> np.ndarray:
    """Returns uniform numbers in [0, 1), a stream for each row that depends on the seed, the step and that row alone.

    Each row has the Philox 4x64 stream (Salmon, Moraes, Dror, Shaw: Parallel Random Numbers: As Easy as 1, 2, 3) whose
    key is the BLAKE2b hash of (seed, step, sample id, prompt tokens).

    Returns:
        float64 [rows, num_draws].
    """
    philox = np.random.Philox(key=0)
    generator = np.random.Generator(philox)
    state = philox.state  # setting a generator's key takes a tenth of the time of creating a generator
    start = np.zeros(4, dtype=np.uint64)
    uniforms = np.empty((len(prompt_ids), num_draws), dtype=np.float64)
    for row, (prompt, sample_id) in enumerate(zip(prompt_ids, sample_ids, strict=True)):
        key = np.frombuffer(_row_key(seed, step, prompt, sample_id), dtype=np.uint64)
        state["state"] = {"counter": start, "key": key}
        philox.state = state
        generator.random(out=uniforms[row])
    return uniforms


def row_seed(seed: int, step: int, prompt: Sequence[int], sample_id: int) -> int:
    """Returns a seed in [0, 2^63) for an engine that draws a row's numbers itself.

    It comes from the same key as the stream of `row_uniforms`.
    """
    return int.from_bytes(_row_key(seed, step, prompt, sample_id)[:8], "little") >> 1


def _row_key(seed: int, step: int, prompt: Sequence[int], sample_id: int) -> bytes:
    words = array.array("Q", (seed, step, sample_id, *prompt))
    return hashlib.blake2b(words.tobytes(), digest_size=16).digest()


def choose_tokens(
    logits: torch.Tensor, uniforms: torch.Tensor, *, temperature: float, top_k: int | None, top_p: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses one token for each row by inverting the cumulative distribution at that row's uniform number.

    Args:
        logits: [rows, vocabulary], any floating dtype; the arithmetic is in float32, the cumulative sums in float64.
        uniforms: float64 [rows] in [0, 1); ignored if the temperature is 0.
        temperature: Divides the logits; 0 takes the most probable token.
        top_k: Number of tokens to keep; None keeps all.
        top_p: Probability to keep, after top_k; 1 keeps all.

    Returns:
        Token ids int64 [rows], and their log-probs float32 [rows] under the temperature-scaled distribution (with
        temperature 1 if it is 0) before top_k and top_p.
    """
    logits = logits.float()
    if temperature == 0:
        logprobs = torch.log_softmax(logits, dim=-1)
        tokens = logprobs.argmax(dim=-1)
    else:
        logprobs = torch.log_softmax(logits / temperature, dim=-1)
        tokens = _invert_cdf(logprobs.exp(), uniforms, top_k=top_k, top_p=top_p)
    return tokens, logprobs.gather(-1, tokens[:, None]).squeeze(-1)


def _invert_cdf(probs: torch.Tensor, uniforms: torch.Tensor, *, top_k: int | None, top_p: float) -> torch.Tensor:
    if top_k is None and top_p == 1:
        return _search(probs.double().cumsum(dim=-1), uniforms)
    probs, order = probs.sort(dim=-1, descending=True, stable=True)
    probs, order = probs[:, :top_k], order[:, :top_k]  # a slice up to None keeps all
    cdf = probs.double().cumsum(dim=-1)
    mass_before = cdf - probs
    num_kept = (mass_before < top_p * cdf[:, -1:]).sum(dim=-1)  # at least 1: no mass precedes the first token
    kept_cdf = cdf.minimum(cdf.gather(-1, num_kept[:, None] - 1))
    return order.gather(-1, _search(kept_cdf, uniforms)[:, None]).squeeze(-1)


def _search(cdf: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Returns the index of the first entry above uniform x total.

    An entry of probability zero equals the one before it, so it is never the first one above.
    """
    total = cdf[:, -1:]
    below_total = torch.nextafter(total, torch.zeros_like(total))
    target = torch.minimum(uniforms[:, None] * total, below_total)
    return torch.searchsorted(cdf, target, right=True).squeeze(-1)
