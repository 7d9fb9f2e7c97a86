"""Makes what most users have: a BPE tokenizer with a chat template, a model with two ends, and texts of any length."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TEXT = "the sum of two numbers and the name of a town are what some people ask when they write to a model"


def make_tokenizer(folder: Path, *, bos: str | None = None, pad: str | None = None) -> None:
    """Writes a byte-level BPE tokenizer that was trained on a few words, with ChatML as its chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = [END_OF_TEXT, TURN_START, TURN_END, *filter(None, [bos, pad])]
    vocabulary = {"vocab_size": 320, "special_tokens": special, "initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    trainer = trainers.BpeTrainer(**vocabulary, show_progress=False)
    backend.train_from_iterator([_TEXT] * 4, trainer)
    names = {"eos_token": TURN_END} | ({"bos_token": bos} if bos else {}) | ({"pad_token": pad} if pad else {})
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder)


def make_model(folder: Path, *, ends: Sequence[int], end_probability: float = 0.5) -> None:
    """Writes a Qwen3-shaped model, random but for the last of its ends, which each token is with some probability."""
    import torch
    from transformers import AutoTokenizer, GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    vocab_size = len(AutoTokenizer.from_pretrained(folder))
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocab_size, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, intermediate_size=128, max_position_embeddings=512, tie_word_embeddings=False,
        eos_token_id=ends[0],
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        # The first component of every hidden state is large, so that after the norm it is nearly sqrt(hidden_size).
        model.model.embed_tokens.weight[:, 0] = 100.0
        model.lm_head.weight[:, 0] = 0.0
        odds = end_probability / (1 - end_probability)
        model.lm_head.weight[ends[-1]] = 0.0
        model.lm_head.weight[ends[-1], 0] = math.log(odds * vocab_size) / math.sqrt(config.hidden_size)
    model.generation_config = GenerationConfig(eos_token_id=list(ends))
    model.save_pretrained(folder)


def texts(number: int, shortest: int, longest: int) -> list[str]:
    """Returns texts whose lengths in words grow from the shortest to the longest, shuffled always in the same way."""
    words = _TEXT.split()
    lengths = [shortest + round((longest - shortest) * row / max(number - 1, 1)) for row in range(number)]
    return [" ".join(words[(row * 7 + word) % len(words)] for word in range(lengths[row])) for row in _order(number)]


def _order(number: int) -> list[int]:
    return [row * 5 % number for row in range(number)] if number % 5 else list(range(number))


def write_rows(path: Path, rows: Sequence[tuple[str, str]]) -> None:
    lines = [json.dumps({"question": question, "reply": reply}) + "\n" for question, reply in rows]
    path.write_text("".join(lines))


def upstream_tokens(
    tokenizer: Any, prompt: str, answer: str, *, add_bos: bool, add_eos: bool, add_generation_prompt: bool
) -> tuple[list[int], list[int]]:
    """Returns a prompt's and an answer's token ids as `get_formatted_message_log` of NeMo-RL makes them."""
    turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    user = tokenizer.apply_chat_template(turns[:1], tokenize=False, add_generation_prompt=add_generation_prompt)
    whole = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=False)
    same = next((at for at, (one, other) in enumerate(zip(user, whole, strict=False)) if one != other), len(user))
    reply = whole[same:]
    if add_bos and tokenizer.bos_token is not None and not user.startswith(tokenizer.bos_token):
        user = tokenizer.bos_token + user
    if add_eos and not reply.rstrip("\n").endswith(tokenizer.eos_token):
        reply += tokenizer.eos_token
    first, second = tokenizer([user, reply], add_special_tokens=False)["input_ids"]
    return first, second


def upstream_learning_rate(
    ticks: int, *, style: str, init: float, peak: float, floor: float, warmup: int, decay: int
) -> float:
    """Returns the learning rate of NeMo-RL's training step ``ticks`` (from 0): its scheduler ticks once a step."""
    # The formula is that of megatron-core's `OptimizerParamScheduler.get_lr`.
    if warmup > 0 and ticks <= warmup:
        return init + (peak - init) * ticks / warmup
    if ticks > decay:
        return floor
    done = (ticks - warmup) / (decay - warmup)
    return floor + (peak - floor) * {"linear": 1 - done, "cosine": 0.5 * (math.cos(math.pi * done) + 1)}[style]
