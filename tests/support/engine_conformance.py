"""Checks what every generation engine must do; the test of each engine calls `check` with the engine's handle.

The model is tiny and in float32. `weights` are its Hugging Face weights by name; `reference` is the same model on the
CPU.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from nemo_offload_rl.config import resolve_absent_keys
from nemo_offload_rl.generation.hf_model import build_model, weights_by_name
from nemo_offload_rl.generation.interface import GenerationInterface, GenerationRequest, SamplingParams
from nemo_offload_rl.memory.units import GIB
from nemo_offload_rl.refit import make_transport
from nemo_offload_rl.refit.checksum import require_equal_checksums
from nemo_offload_rl.refit.plan import ExportPlan

QWEN3 = {
    "model_type": "qwen3", "vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 128, "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}  # fmt: skip
QWEN3_MOE = QWEN3 | {
    "model_type": "qwen3_moe", "moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True,
}  # fmt: skip
MAX_LENGTH = 64
PROMPTS = [[5, 6, 7, 8, 9], [12], [5, 6, 7, 8, 9], [120, 4, 4, 20, 33, 71], [12]]
GREEDY = SamplingParams(max_new_tokens=12, temperature=0.0, top_p=1.0, top_k=None, stop_token_ids=(), seed=7)
SAMPLED = dataclasses.replace(GREEDY, temperature=0.8)
Weights = Mapping[str, torch.Tensor]


def save_numbers_tokenizer(folder: Path) -> None:
    """Writes a tokenizer that spells token 12 as <12>, and encodes anything else as <0>, its end of sequence."""
    words = {f"<{number}>": number for number in range(QWEN3["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<0>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"<\d+>"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<0>", pad_token="<0>").save_pretrained(folder)


def policy(backend: str, tokenizer: Path | None = None) -> dict[str, Any]:
    """Returns a recipe's policy section as far as engines read it; stop strings need the folder of a tokenizer.

    Each token is an end of the model's own, at which no engine may stop unless a request names it.
    """
    section = {
        "tensor_parallel_size": 1, "expert_parallel_size": 1, "gpu_memory_utilization": 0.2,
        "max_model_len": MAX_LENGTH, "enforce_eager": True, "precision": "float32", "build_beside_policy": False,
    }  # fmt: skip
    policy = {
        "model_name": "a label", "hf_config": QWEN3 | {"eos_token_id": list(range(QWEN3["vocab_size"]))},
        "precision": "float32", "generation_batch_size": 8, "max_total_sequence_length": MAX_LENGTH,
        "tokenizer": {"name": str(tokenizer)}, "refit_buffer_size_gb": 1.0, "residency": {"generation_weights": None},
        "generation": {
            "backend": backend,
            "vllm_cfg": section,
            # With it vLLM does not measure free memory, since other tests may use the GPU. It is this much because
            # vLLM asserts that sleeping frees memory, even if other processes allocate at the same time.
            "vllm_kwargs": {"kv_cache_memory_bytes": 16 * GIB},
            "stop_strings": tokenizer and ["<no number>"],
        },
    }  # fmt: skip
    resolve_absent_keys({"policy": policy})
    return policy


def tiny_model(hf_config: dict[str, Any]) -> tuple[Any, dict[str, torch.Tensor]]:
    """Returns a model with random weights on the CPU, and the weights that a policy would send, by name."""
    reference = build_model("tiny", hf_config, "float32")
    generator = torch.Generator().manual_seed(0)
    for parameter in reference.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(1 + 0.1 * noise if parameter.dim() == 1 else 0.2 * noise)
    return reference, {name: one for name, one in weights_by_name(reference).items() if name != "lm_head.weight"}


def request(sampling: SamplingParams, prompts: list[list[int]] = PROMPTS, step: int = 0) -> GenerationRequest:
    """Returns a request for the prompts; sample ids tell equal prompts apart."""
    return GenerationRequest(prompts, [prompts[:row].count(p) for row, p in enumerate(prompts)], step, sampling)


def refit(engine: GenerationInterface, weights: Weights, *, verify: bool = True) -> None:
    """Wakes the engine, refits it as a run does, and maps the KV cache; `verify` compares checksums."""
    plan = ExportPlan.of(weights.items())
    engine.prepare_refit_info(plan)
    engine.prepare_for_generation(["weights"])
    # Not the transport of its capabilities: the test's process is not the policy rank on the engine's GPU.
    transport = make_transport("object_store", engine.receivers, verify=verify)
    sent = transport.connect(plan, rank=0, bucket_bytes=30_000).send(weights.items())
    if verify:
        require_equal_checksums(sent, engine.weights_checksum())
    engine.prepare_for_generation(["kv_cache"])


def logprobs_of(reference: Any, prompt: list[int], tokens: list[int], temperature: float) -> torch.Tensor:
    """Returns the reference model's log-probs [new tokens, vocabulary] at each new token."""
    with torch.no_grad():
        logits = reference(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits.float() / (temperature or 1.0), dim=-1)


def greedy_tokens_are_the_reference_models(engine: GenerationInterface, reference: Any, tolerance: float) -> None:
    output = engine.generate(request(GREEDY))
    assert output.finish_reasons == ["length"] * len(PROMPTS)
    for prompt, tokens, logprobs in zip(PROMPTS, output.output_ids, output.logprobs, strict=True):
        expected = logprobs_of(reference, prompt, tokens, 1.0)
        assert tokens == expected.argmax(dim=-1).tolist()
        torch.testing.assert_close(torch.tensor(logprobs), expected.amax(dim=-1), atol=tolerance, rtol=0)


def logprobs_are_of_what_was_sampled(engine: GenerationInterface, reference: Any, tolerance: float) -> None:
    output = engine.generate(request(SAMPLED))
    for prompt, tokens, logprobs in zip(PROMPTS, output.output_ids, output.logprobs, strict=True):
        expected = logprobs_of(reference, prompt, tokens, 0.8)[torch.arange(len(tokens)), tokens]
        torch.testing.assert_close(torch.tensor(logprobs), expected, atol=tolerance, rtol=0)


def filters_keep_the_likeliest(
    engine: GenerationInterface, reference: Any, tolerance: float, *, filtered: bool
) -> None:
    """Checks top_k and top_p; `filtered` says whether the engine returns log-probs of the filtered distribution."""
    output = engine.generate(request(dataclasses.replace(SAMPLED, top_k=5, top_p=0.9)))
    for prompt, tokens, logprobs in zip(PROMPTS, output.output_ids, output.logprobs, strict=True):
        for token, logprob, row in zip(tokens, logprobs, logprobs_of(reference, prompt, tokens, 0.8), strict=True):
            order = row.argsort(descending=True)[:5]
            probs = row[order].softmax(dim=-1)
            kept = order[(probs.cumsum(dim=-1) - probs) < 0.9 + tolerance / 10]
            assert token in kept
            whole = row[kept].logsumexp(dim=-1).item() if filtered else 0.0
            assert math.isclose(logprob, row[token].item() - whole, abs_tol=2 * tolerance)


def a_stop_token_ends_its_row(engine: GenerationInterface) -> None:
    """Checks a stop token, and rows of which each ends at another one of two stop tokens, and nowhere before."""
    for prompts in (PROMPTS[:1], [PROMPTS[0], PROMPTS[3]]):
        free = engine.generate(request(GREEDY, prompts)).output_ids
        stops = tuple(row[3] for row in free)
        assert len(set(stops)) == len(prompts)
        output = engine.generate(request(dataclasses.replace(GREEDY, stop_token_ids=stops), prompts))
        for row, tokens in zip(free, output.output_ids, strict=True):
            assert tokens == row[: next(index for index, token in enumerate(row) if token in stops) + 1]
        assert output.finish_reasons == ["stop"] * len(prompts)
        assert [len(row) for row in output.logprobs] == [len(row) for row in output.output_ids]


def bad_words_are_never_sampled(engine: GenerationInterface, reference: Any, tolerance: float) -> None:
    """Checks a banned token and a banned pair; log-probs are of the distribution without what would complete them."""
    prompt = PROMPTS[0]
    free = engine.generate(request(GREEDY, [prompt])).output_ids[0]
    one, pair = free[0], (free[1], free[2])
    words = (f"<{one}>", f"<{pair[0]}><{pair[1]}>")
    for temperature in (0.0, 0.8):
        sampling = dataclasses.replace(GREEDY, temperature=temperature, bad_words=words)
        output = engine.generate(request(sampling, [prompt]))
        [tokens], [logprobs] = output.output_ids, output.logprobs
        assert one not in tokens
        assert pair not in itertools.pairwise(tokens)
        expected = logprobs_of(reference, prompt, tokens, temperature)
        expected[:, one] = -math.inf
        for index, token in enumerate(tokens[:-1]):
            if token == pair[0]:
                expected[index + 1, pair[1]] = -math.inf
        expected = expected.log_softmax(dim=-1)
        if temperature == 0:
            assert tokens == expected.argmax(dim=-1).tolist()
        of_tokens = expected[torch.arange(len(tokens)), tokens]
        torch.testing.assert_close(torch.tensor(logprobs), of_tokens, atol=tolerance, rtol=0)
    across = dataclasses.replace(GREEDY, bad_words=(f"<{prompt[-1]}><{one}>",))  # begins in the prompt, does not count
    assert engine.generate(request(across, [prompt])).output_ids[0][0] == one


def a_stop_string_ends_its_row(engine: GenerationInterface) -> None:
    """Checks that a stop string ends its row, with all of its last token; the prompt's text does not count."""
    prompt = PROMPTS[0]
    free = engine.generate(request(GREEDY, [prompt])).output_ids[0]
    for num_tokens in (4, len(free)):
        first, last = free[num_tokens - 2 : num_tokens]
        end = next(end for end in range(2, len(free) + 1) if free[end - 2 : end] == [first, last])
        # Half of one token, and another token without its last character; the prompt's own text has the second string.
        strings = (f"{first}><{last}", f"<{prompt[-2]}><{prompt[-1]}>")
        assert all(list(pair) != prompt[-2:] for pair in itertools.pairwise(free))
        output = engine.generate(request(dataclasses.replace(GREEDY, stop_strings=strings), [prompt]))
        assert output.output_ids == [free[:end]]
        assert output.finish_reasons == ["stop"]
        assert len(output.logprobs[0]) == end


def seeds_decide(engine: GenerationInterface) -> None:
    """Checks that seed, step and sample id alone decide a row's tokens, whatever else is in the batch."""
    first = engine.generate(request(SAMPLED)).output_ids
    assert engine.generate(request(SAMPLED)).output_ids == first
    assert first[0] != first[2]
    assert first[1] != first[4]
    assert engine.generate(request(dataclasses.replace(SAMPLED, seed=8))).output_ids != first
    assert engine.generate(request(SAMPLED, step=1)).output_ids != first
    assert engine.generate(request(SAMPLED, PROMPTS[3:4])).output_ids == first[3:4]


def empty_and_overlong_prompts_are_answered(engine: GenerationInterface) -> None:
    """Checks that an empty request, a prompt without room for a token, and one with little room are all answered."""
    nothing = engine.generate(GenerationRequest([], [], 0, GREEDY))
    assert (nothing.output_ids, nothing.logprobs, nothing.finish_reasons) == ([], [], [])
    lengths = (MAX_LENGTH + 3, MAX_LENGTH, MAX_LENGTH - 2, 3)
    output = engine.generate(request(GREEDY, [[9] * length for length in lengths]))
    assert [len(tokens) for tokens in output.output_ids] == [0, 0, 2, 12]
    assert output.finish_reasons == ["length"] * 4


def a_refit_changes_the_answers(engine: GenerationInterface, weights: Weights, *, verify: bool) -> None:
    """Checks that a refit changes the answers, also of cached prompts, and that the old weights restore them."""
    before = engine.generate(request(GREEDY)).output_ids
    refit_after_sleep(engine, {name: tensor.flip(0) for name, tensor in weights.items()}, verify=verify)
    assert engine.generate(request(GREEDY)).output_ids != before
    refit_after_sleep(engine, weights, verify=verify)
    assert engine.generate(request(GREEDY)).output_ids == before


def a_sleeping_engine_holds_little(
    engine: GenerationInterface, weights: Weights, *, verify: bool, most_context_gib: float
) -> None:
    """Checks the GPU memory of a sleeping engine: context, kernels and torch's reserve, without released memory."""
    awake = engine.memory_stats()
    engine.finish_generation()
    asleep = engine.memory_stats()
    refit(engine, weights, verify=verify)
    if "gpu_pools_gib" not in awake:  # an engine without pools, or no GPU
        return
    assert awake["gpu_pools_gib"] > 1
    assert (asleep["gpu_pools_gib"], asleep["host_pools_gib"]) == (0, 0)
    assert -0.01 < asleep["gpu_reserved_gib"] < 1
    if "gpu_driver_gib" in asleep:
        assert 0 < asleep["gpu_context_gib"] < most_context_gib, asleep
        assert awake["gpu_driver_gib"] - asleep["gpu_driver_gib"] > 0.9 * awake["gpu_pools_gib"]


def refit_after_sleep(engine: GenerationInterface, weights: Weights, *, verify: bool) -> None:
    """Puts the engine to sleep and refits it, as a training step does."""
    engine.finish_generation()
    refit(engine, weights, verify=verify)


def check(
    engine: GenerationInterface,
    weights: Weights,
    reference: Any,
    *,
    filtered: bool,
    tolerance: float = 1e-3,
    verify: bool = True,
    most_context_gib: float = 2.0,
) -> None:
    """Runs all checks on one engine, because starting one takes long; raises all failures together."""
    checks: list[Callable[[], None]] = [
        lambda: greedy_tokens_are_the_reference_models(engine, reference, tolerance),
        lambda: logprobs_are_of_what_was_sampled(engine, reference, tolerance),
        lambda: filters_keep_the_likeliest(engine, reference, tolerance, filtered=filtered),
        lambda: a_stop_token_ends_its_row(engine),
        lambda: a_stop_string_ends_its_row(engine),
        lambda: bad_words_are_never_sampled(engine, reference, tolerance),
        lambda: seeds_decide(engine),
        lambda: empty_and_overlong_prompts_are_answered(engine),
        lambda: a_refit_changes_the_answers(engine, weights, verify=verify),
        lambda: a_sleeping_engine_holds_little(engine, weights, verify=verify, most_context_gib=most_context_gib),
    ]
    refit(engine, weights, verify=verify)
    failures: list[Exception] = []
    for one in checks:
        try:
            one()
        except Exception as error:  # noqa: BLE001  (raised below, with the others)
            failures.append(error)
    if failures:
        raise ExceptionGroup("promises that the engine does not keep", failures)
