"""Mutates data files: each must be refused with a message, or read without any part being ignored or changed."""

import json
import os
import random
import re
from pathlib import Path
from typing import Any

from support.fuzz_pairs import TEMPLATE, PropertyError, pair_lines
from support.fuzz_values import EXTREMES

from nemo_offload_rl.data.problem import DataError, Problem
from nemo_offload_rl.run.setup import make_prompt_format, read_data, read_tokenizer

_KEYS = {"input_key": "question", "output_key": "answer"}
_tokenizer_folder = Path()
_good: dict[str, bytes] = {}


def prepare(folder: Path) -> None:
    """Writes a byte tokenizer, which encodes any text, and valid files of each kind, which the cases mutate."""
    global _tokenizer_folder
    os.environ["HF_DATASETS_CACHE"] = str(folder / "cache")
    os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
    import datasets
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend = Tokenizer(models.BPE({token: index for index, token in enumerate([*sorted(alphabet), "<eos>"])}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    _tokenizer_folder = folder / "tokenizer"
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>").save_pretrained(_tokenizer_folder)
    table = datasets.Dataset.from_list([{"question": f"{n}+1=", "answer": str(n + 1)} for n in range(20)])
    table.save_to_disk(str(folder / "good"))
    table.to_parquet(str(folder / "good.parquet"))
    for file in (folder / "good").iterdir():
        _good[f"saved/{file.name}"] = file.read_bytes()
    _good["parquet/train.parquet"] = (folder / "good.parquet").read_bytes()
    for name in ("saved", "parquet"):
        (folder / name).mkdir()
    for name, content in _good.items():
        (folder / name).write_bytes(content)
    for name in ("saved", "parquet"):  # imports everything
        _read({"dataset_name": "HFDataset", "data_path": str(folder / name)} | _KEYS)


def run_case(rng: random.Random, folder: Path) -> bool:
    case = rng.choices([_lines, _bytes_of_lines, _pairs, _template, _folder], [5, 4, 4, 2, 2])[0]
    try:
        case(rng, folder)
    except DataError as error:
        message = str(error)
        names_place = str(folder) in message or "policy.tokenizer" in message
        if len(message) > 5000 or "Traceback" in message or not names_place:
            raise PropertyError(f"a message of a form of its own: {message[:1000]!r}") from error
        return False
    return True


def _read(dataset: dict[str, Any], chat_template: str | None = None) -> list[Problem]:
    """Returns the problems once the first ones are tokenized, as a job's preparation and first step do."""
    section: Any = {"shuffle": True, "train": dataset, "max_input_seq_length": 1000, "default": {}}
    section["dataset_root"] = None
    config: Any = {"name": str(_tokenizer_folder), "chat_template": chat_template, "chat_template_kwargs": None}
    train, _ = read_data(section, 0)
    model = {"tokenizer": config, "hf_config": {"model_type": "qwen3"}}
    prompts = make_prompt_format(section, read_tokenizer(config), model)
    prompts.check_rows(train.problems, with_answers=True)
    problems = list(train.problems)
    first = [problem for problem in problems[:20] if len(problem.prompt) + len(problem.answer) < 10_000]
    for example in prompts.examples(first) if first else ():
        if len(example.prompt_ids) + len(example.answer_ids) > 1000:
            raise PropertyError("an example is longer than the limit")
    return problems


def _jsonl(path: Path) -> dict[str, Any]:
    return {"dataset_name": "ResponseDataset", "data_path": str(path)} | _KEYS


def _check_lines(path: Path, problems: list[Problem]) -> None:
    text = path.read_bytes().decode("utf-8-sig")
    rows = [json.loads(line) for line in re.split("\r\n|\r|\n", text) if line.strip()]
    if len(rows) != len(problems):
        raise PropertyError(f"{len(rows)} lines and {len(problems)} problems")
    for row, problem in zip(rows, problems, strict=True):
        if (str(row["question"]), str(row["answer"])) != (problem.prompt, problem.answer):
            raise PropertyError(f"{row!r} is read as {problem!r}")


def _value(rng: random.Random) -> str:
    """Returns a random JSON value, sometimes an odd one."""
    kind = rng.random()
    if kind < 0.3:
        return json.dumps(f"{rng.randrange(100)}+{rng.randrange(100)}=")
    if kind < 0.6:
        value = rng.choice([value for value in EXTREMES if value != 10**4000])
        return json.dumps(value, ensure_ascii=rng.random() < 0.5)
    depth = rng.choice([3, 500, 5000, 100_000])
    return rng.choice(
        [
            "NaN", "1e400", "-0", "1.0", "1E5", "9" * 4000, "9" * 5000, '"\\ud800"', '"\\ud83d\\ude00"', '"\\u0000"',
            '"' + "x" * rng.choice([100, 10**5, 10**7]) + '"', "[" * depth, "[" * depth + "]" * depth,
            '{"a":' * depth + "1" + "}" * depth, '"\\x"', "'a'", "tru", "", '"{}"', '"{0.real}"', '"<eos>"', '"%s"',
            '"\u2028\u0085\x0c"', '"\t"', '"a\\nb"', '{"answer": 1, "answer": 2}',
        ]
    )  # fmt: skip


def _line(rng: random.Random) -> str:
    if rng.random() < 0.7:
        return json.dumps({"question": f"{rng.randrange(9)}+1=", "answer": rng.randrange(9)})
    names = ["question", "answer"] if rng.random() < 0.7 else rng.choices(["question", "answer", "Answer", ""], k=3)
    return "{" + ", ".join(f'"{name}": {_value(rng)}' for name in names) + rng.choice(["}", "}", "}", "", "},"])


def _lines(rng: random.Random, folder: Path) -> None:
    path = folder / "data.jsonl"
    end = rng.choice(["\n", "\n", "\r\n", "\r", "\n\n", "\u2028", "\x0b"])
    text = end.join(_line(rng) for _ in range(rng.choice([1, 2, 20])))
    text = rng.choice(["", "", "", "\ufeff", " ", "[", "# comment\n"]) + text + rng.choice(["", "\n", "]", ","])
    encoding = rng.choice(["utf-8"] * 8 + ["utf-16", "latin-1", "utf-8-sig"])
    path.write_bytes(text.encode(encoding, "replace" if encoding == "latin-1" else "surrogatepass"))
    _check_lines(path, _read(_jsonl(path)))


def _pairs(rng: random.Random, folder: Path) -> None:
    pair_lines(rng, folder, _tokenizer_folder)


def _mutated(rng: random.Random, content: bytes) -> bytes:
    for _ in range(rng.choice([1, 1, 3, 20])):
        place = rng.randrange(len(content) + 1)
        kind = rng.choice(["flip", "flip", "insert", "drop", "cut", "repeat"])
        if kind == "flip" and place < len(content):
            content = content[:place] + bytes([content[place] ^ (1 << rng.randrange(8))]) + content[place + 1 :]
        elif kind == "insert":
            content = content[:place] + rng.randbytes(rng.choice([1, 4])) + content[place:]
        elif kind == "drop":
            content = content[:place] + content[place + rng.choice([1, 10]) :]
        elif kind == "cut" and rng.random() < 0.3:
            content = content[:place]
        elif kind == "repeat":
            content = content[:place] + content[place // 2 :]
    return content


def _bytes_of_lines(rng: random.Random, folder: Path) -> None:
    path = folder / "data.jsonl"
    path.write_bytes(_mutated(rng, "\n".join(_line(rng) for _ in range(3)).encode("utf-8", "replace")))
    _check_lines(path, _read(_jsonl(path)))


def _template(rng: random.Random, folder: Path) -> None:
    path = folder / "data.jsonl"
    path.write_text('{"question": "1+1=", "answer": "2"}')
    odd = [
        "{{", "{% for", "{{ nope() }}", "{{ 1/0 }}", "{% for m in messages %}{{ m.x.y }}{% endfor %}", "",
        "{{ messages }}",
        "{{ ''.__class__.__mro__ }}", "{{ raise_exception('no') }}", "{{ range(10**9)|list }}", "{% include 'x' %}",
        "{{ 'x' * 10**10 }}", "{{ messages|tojson }}", "{{ bos_token }}", "{{ 10**10**6 }}",
    ]  # fmt: skip
    place = rng.randrange(len(TEMPLATE))
    template = rng.choice([TEMPLATE, TEMPLATE[:place], TEMPLATE[:place] + TEMPLATE[place + 1 :], *odd])
    _read(_jsonl(path), chat_template=template)


def _folder(rng: random.Random, folder: Path) -> None:
    kind = rng.choice(["saved", "parquet"])
    path = folder / kind
    path.mkdir()
    names = [name for name in _good if name.startswith(kind)]
    damaged = rng.choice(names)
    for name in names:
        content = _good[name]
        if name == damaged:
            content = rng.choice([b"", b"{}", b"[]", b"null", _mutated(rng, content), _mutated(rng, content)])
        (folder / name).write_bytes(content)
    if rng.random() < 0.1:
        (folder / damaged).unlink()
    problems = _read({"dataset_name": "HFDataset", "data_path": str(path)} | _KEYS)
    if damaged.endswith((".arrow", ".parquet")):
        return  # the bits of the values themselves have no checksum
    if problems != [Problem(f"{n}+1=", str(n + 1)) for n in range(20)]:
        raise PropertyError(f"other rows than were written: {problems[:3]!r}")
