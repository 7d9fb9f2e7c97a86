"""Compares where vLLM ends answers with the arguments of this package and with those that NeMo-RL gives it.

The model's folder has ends and sampling settings of its own, which vLLM reads in both cases. Its weights are vLLM's
dummy ones, with which every token is about as likely as another, so that answers reach all ends. vLLM runs in a process
of its own, which is this file as a script.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support import engine_conformance
from support.examples import environment

from nemo_offload_rl.data.tokenizer import load_tokenizer
from nemo_offload_rl.generation.interface import GenerationRequest
from nemo_offload_rl.generation.vllm_arguments import ENVIRONMENT, sampling_arguments
from nemo_offload_rl.run.answer_sampling import make_sampling

ENDS, TOKENIZERS_END = (7, 9), 0
KEYS = {"stop_token_ids": None, "stop_strings": None, "ignore_eos": False, "bad_words": None}
# Whether vLLM has a tokenizer: for each case of the recipe's keys the tokens that end answers.
CASES: dict[bool, list[tuple[dict[str, Any], set[int]]]] = {
    False: [
        ({}, {0, 7, 9}),
        ({"stop_token_ids": [30]}, {7, 9, 30}),
        ({"stop_token_ids": []}, {7, 9}),
        ({"ignore_eos": True}, {0}),
        ({"ignore_eos": True, "stop_token_ids": [30, 9]}, {9, 30}),
        ({"ignore_eos": True, "stop_token_ids": []}, set()),
    ],
    True: [
        ({"stop_token_ids": [], "stop_strings": ["no such text"]}, {0, 7, 9}),
        ({"stop_token_ids": [30], "bad_words": ["<5>", "<7>", "<20><21>"]}, {0, 9, 30}),
        ({"ignore_eos": True, "stop_token_ids": [], "bad_words": ["<5>"]}, set()),
    ],
}


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs the extra vllm")
@pytest.mark.parametrize("has_tokenizer", CASES)
def test_answers_end_where_they_end_with_nemo_rls_arguments(has_tokenizer, tmp_path):
    engine_conformance.save_numbers_tokenizer(tmp_path)
    config = engine_conformance.QWEN3 | {"architectures": ["Qwen3ForCausalLM"], "eos_token_id": 11}
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = {
        "eos_token_id": list(ENDS),
        "do_sample": True,
        "temperature": 0.1,
        "top_k": 2,
        "repetition_penalty": 9.0,
    }
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    arguments = [sys.executable, __file__, str(tmp_path), str(int(has_tokenizer))]
    done = subprocess.run(
        arguments, env=environment() | ENVIRONMENT, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    for (keys, expected), (ours, nemo_rls) in zip(CASES[has_tokenizer], results, strict=True):
        assert ours == nemo_rls, keys
        assert {tokens[-1] for tokens, reason in ours if reason == "stop"} == expected, keys
        assert all(not expected & set(tokens[:-1]) for tokens, _ in ours), keys
        if "bad_words" in keys:
            assert all(5 not in tokens for tokens, _ in ours)


def nemo_rl_arguments(section: dict[str, Any]) -> dict[str, Any]:
    """Returns what NeMo-RL gives `vllm.SamplingParams` for a recipe's `policy.generation`."""
    stops = section["stop_token_ids"]
    return {
        "temperature": section["temperature"],
        "top_p": section["top_p"],
        "top_k": -1,
        "max_tokens": section["max_new_tokens"],
        "logprobs": 0,
        "stop_token_ids": [TOKENIZERS_END] if stops is None else stops,
        "stop": section["stop_strings"],
        "include_stop_str_in_output": True,
        "bad_words": section["bad_words"],
        "ignore_eos": section["ignore_eos"],
    }


def main(folder: Path, *, has_tokenizer: bool) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=not has_tokenizer,
        dtype="float32",
        max_model_len=64,
        enforce_eager=True,
        kv_cache_memory_bytes=1 << 30,
        gpu_memory_utilization=0.2,
        logprobs_mode="processed_logprobs",
    )
    sampled = {"max_new_tokens": 40, "temperature": 1.0, "top_p": 1.0, "top_k": None}
    validation = {"val_temperature": 1.0, "val_top_p": 1.0, "val_top_k": None}
    prompts = [[20 + row, 3, 4] for row in range(100)]
    results = []
    for keys, _ in CASES[has_tokenizer]:
        section = sampled | validation | KEYS | keys
        policy = {"model_name": str(folder), "hf_config": None, "generation": section}
        sampling, _ = make_sampling(policy, load_tokenizer(str(folder)), seed=3)
        request = GenerationRequest(prompts, [0] * len(prompts), 1, sampling)
        ours = [sampling_arguments(request, row, 64) for row in range(len(prompts))]
        both = []
        for rows in (ours, [nemo_rl_arguments(section) | {"seed": row["seed"]} for row in ours]):
            answers = llm.generate(
                [{"prompt_token_ids": prompt} for prompt in prompts],
                [SamplingParams(**row) for row in rows],
                use_tqdm=False,
            )
            both.append([(list(one.outputs[0].token_ids), one.outputs[0].finish_reason) for one in answers])
        results.append(both)
    (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), has_tokenizer=sys.argv[2] == "1")
