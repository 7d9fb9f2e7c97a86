"""Mutates preference data: each file must be refused with a message, or read as an independent reader reads it."""

import json
import random
from pathlib import Path
from typing import Any

from support.fuzz_values import EXTREMES

from nemo_offload_rl.data.pair_batch import check_pairs, pair_batch
from nemo_offload_rl.data.preferences import PreferencePair
from nemo_offload_rl.run.setup import make_prompt_format, read_pairs, read_tokenizer

_LIMIT = 100
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
_BINARY = {
    "dataset_name": "BinaryPreferenceDataset", "prompt_key": "prompt", "chosen_key": "chosen",
    "rejected_key": "rejected",
}  # fmt: skip
_RANKED = {"dataset_name": "PreferenceDataset"}


class PropertyError(AssertionError):
    """Reports a property that does not hold for an accepted case."""


def pair_lines(rng: random.Random, folder: Path, tokenizer_folder: Path) -> None:
    """Writes rows of one form, some of them mutated, and reads them as a run would."""
    path, form = folder / "pairs.jsonl", rng.choice([_BINARY, _RANKED])
    rows = [_row(rng, form) for _ in range(rng.choice([1, 3, 10]))]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    section: Any = {"shuffle": False, "train": form | {"data_path": str(path)}, "max_input_seq_length": _LIMIT}
    section |= {"dataset_root": None, "default": {}}
    template = rng.choice([TEMPLATE, TEMPLATE, None])
    config: Any = {"name": str(tokenizer_folder), "chat_template": template, "chat_template_kwargs": None}
    train, _ = read_pairs(section, 0)
    model = {"tokenizer": config, "hf_config": {"model_type": "qwen3"}}
    answers = make_prompt_format(section, read_tokenizer(config), model)
    check_pairs(answers, train.problems)
    if len(train.problems) != len(rows):
        raise PropertyError(f"{len(rows)} lines and {len(train.problems)} pairs")
    for row, pair in zip(rows, train.problems, strict=True):
        _check(row, pair)
        batch = pair_batch(answers, [pair])
        if batch["input_ids"].shape[1] > _LIMIT or len(set(batch["sample_mask"].tolist())) > 1:
            raise PropertyError(f"{row!r} is longer than the limit, or left out by halves")
        if (batch["token_mask"].sum(dim=1) == 0).any() and batch["sample_mask"].any():
            raise PropertyError(f"{row!r} has an answer without a token")


def _row(rng: random.Random, form: dict[str, str]) -> Any:
    prompt: Any = rng.choice(["1+1=", 7, [_message("user", "1+1=")], _history()])
    messages = [_message("user", str(prompt))] if isinstance(prompt, str | int) else prompt
    chosen, rejected = (_answer(rng, messages, text) for text in ("2", "3" * rng.choice([1, 1, 200])))
    row: Any = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    if form is _RANKED:
        ranks = rng.choice([(0, 1), (1, 0), (1, 2), (2, 1), (7, 3), (-5, 10**30), (10**30, 0), (0, 0)])
        answers = zip(ranks, (chosen, rejected), strict=True)
        completions = [{"rank": rank, "completion": answer} for rank, answer in answers]
        row = {"context": prompt, "completions": completions}
    for _ in range(rng.choice([0, 0, 0, 0, 1, 2])):
        row = _mutated(rng, row)
    return row


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def _history() -> list[dict[str, Any]]:
    return [_message(*turn) for turn in (("system", "Add."), ("user", "1"), ("assistant", "2"), ("user", "3"))]


def _answer(rng: random.Random, messages: list[Any], text: str) -> Any:
    return rng.choice([text, [_message("assistant", text)], [*messages, _message("assistant", text)]])


def _mutated(rng: random.Random, value: Any) -> Any:
    """Returns the value with one change somewhere inside it."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        key = rng.choice(list(value))
        kind = rng.random()
        if kind < 0.1:
            return {name: item for name, item in value.items() if name != key}
        if kind < 0.2:
            return value | {rng.choice(["name", "tool_calls", "Role", ""]): rng.choice([None, 1])}
        return value | {key: _mutated(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.8:
        place = rng.randrange(len(value))
        kind = rng.random()
        if kind < 0.2:
            return value[:place] + value[place + 1 :]
        if kind < 0.3:
            return [*value, value[place]]
        return [*value[:place], _mutated(rng, value[place]), *value[place + 1 :]]
    odd = ["user", "assistant", "system", "tool", "User", "\ud800", "2", 3, "<eos>", 0.5]
    return rng.choice([*odd, *(item for item in EXTREMES if item != 10**4000)])


def _check(row: Any, pair: PreferencePair) -> None:
    if "context" in row:
        first, second = row["completions"]
        better, worse = (first, second) if first["rank"] < second["rank"] else (second, first)
        row = {"prompt": row["context"], "chosen": better["completion"], "rejected": worse["completion"]}
    prompt = row["prompt"]
    turns = [(item["role"], str(item["content"])) for item in prompt] if isinstance(prompt, list) else None
    said = [row[key][-1]["content"] if isinstance(row[key], list) else row[key] for key in ("chosen", "rejected")]
    read = [(message.role, message.content) for message in pair.context]
    if read != (turns or [("user", str(prompt))]) or [pair.chosen, pair.rejected] != [str(text) for text in said]:
        raise PropertyError(f"{row!r} is read as {pair!r}")
