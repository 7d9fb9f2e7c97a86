"""Writes small local data for NeMo-RL's recipes: folders with the columns of named datasets, and a tokenizer.

`data.dataset_root` names the folder that contains the datasets. The rows of gsm8k are word problems written by hand, in
the folder `word_problems`; all others are made from templates and are the same in every run.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any

Rows = list[dict[str, Any]]

SEED = 42
OPEN_MATH_ROWS = 6_000
"""Ten steps of 512 rows, and 5% for validation."""
PAIR_ROWS = {"train": 400, "validation": 100}
CONVERSATION_ROWS = 400
WRITTEN_PROBLEMS = Path(__file__).parent / "word_problems"
"""Has 48 problems in train.jsonl and 16 in test.jsonl, with the columns and the notation of gsm8k."""
VOCABULARY = 512

END_OF_TURN, PADDING = "<|im_end|>", "<|endoftext|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Question and solution of a word problem; `result` is computed from a, b and c, with a > b.
WORD_PROBLEMS = (
    (
        "{name} has {a} {thing}. {other} brings {b} more, and each of them buys {c}. How many {thing} are there now?",
        "There are {a} + {b} = {sum} {thing} first. Both buy {c}, so 2 x {c} = {twice} are added: {sum} + {twice} = "
        "{result}.",
        lambda a, b, c: a + b + 2 * c,
    ),
    (
        "{name} packs {c} boxes with {a} {thing} each and gives {b} {thing} to {other}. How many {thing} are left?",
        "The boxes hold {c} x {a} = {product} {thing}. {b} are given away: {product} - {b} = {result}.",
        lambda a, b, c: a * c - b,
    ),
    (
        "A shop sells {thing} for {c} coins each. {name} wants {a} of them and has {b} already. How many coins does "
        "{name} need to buy the rest?",
        "{a} - {b} = {difference} {thing} are missing. They cost {difference} x {c} = {result} coins.",
        lambda a, b, c: (a - b) * c,
    ),
)
NAMES = ("Ada", "Emmy", "Carl", "Sofia", "Leon", "Mary", "Kurt", "Grace")
THINGS = ("apples", "books", "pencils", "stamps", "shells", "marbles")


def write_datasets(root: Path) -> None:
    """Writes every dataset as `NAME/SPLIT.jsonl` below a folder."""
    for name, splits in datasets().items():
        for split, rows in splits.items():
            path = root / name / f"{split}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def datasets() -> Mapping[str, Mapping[str, Rows]]:
    """Returns the rows of each split of each dataset, with the columns that it has on the hub."""
    return {
        "OpenMathInstruct-2": {"train_1M": open_math_rows(OPEN_MATH_ROWS)},
        "HelpSteer3": {split: pair_rows(split, number) for split, number in PAIR_ROWS.items()},
        "gsm8k": {path.stem: written_rows(path) for path in sorted(WRITTEN_PROBLEMS.glob("*.jsonl"))},
        "Nemotron-Cascade-2-SFT-Math": {"train": conversation_rows(CONVERSATION_ROWS)},
    }


def open_math_rows(number: int) -> Rows:
    """Creates rows of OpenMathInstruct-2: sums, products and word problems, with their solutions."""
    rows: Rows = []
    for question, solution, result in word_problems("open math", number):
        rows.append(
            {
                "problem": question,
                "generated_solution": f"{solution}\n\nThe result is $\\boxed{{{result}}}$.",
                "expected_answer": str(result),
                "problem_source": "template",
            }
        )
    return rows


def conversation_rows(number: int) -> Rows:
    """Creates rows of Nemotron-Cascade-2-SFT-Data: a system message, a question, a worked answer."""
    return [
        {
            "messages": [
                {"role": "system", "content": "Solve the problem step by step."},
                {"role": "user", "content": question},
                {"role": "assistant", "content": f"{solution} The result is {result}."},
            ]
        }
        for question, solution, result in word_problems("conversations", number)
    ]


def written_rows(path: Path) -> Rows:
    """Reads the rows of a JSONL file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def pair_rows(split: str, number: int) -> Rows:
    """Creates rows of HelpSteer3: a worked answer and a short, wrong one, in either order."""
    rows: Rows = []
    for index, (question, solution, result) in enumerate(word_problems(f"pairs {split}", number)):
        worked = f"{solution} The result is {result}."
        responses = (worked, f"Perhaps {result + 1}.")
        first_is_better = index % 2 == 0
        rows.append(
            {
                "domain": "general",
                "language": "english",
                "context": [{"role": "user", "content": question}],
                "response1": responses[0 if first_is_better else 1],
                "response2": responses[1 if first_is_better else 0],
                "overall_preference": -2 if first_is_better else 2,
                "individual_preference": [],
            }
        )
    return rows


def word_problems(role: str, number: int) -> Iterator[tuple[str, str, int]]:
    """Creates question, solution and result of each problem.

    Args:
        role: selects the problems; each role has different ones.
        number: how many problems.
    """
    random = Random(f"{SEED} {role}")
    for _ in range(number):
        question, solution, compute = random.choice(WORD_PROBLEMS)
        b, c = random.randint(2, 20), random.randint(2, 12)
        a = b + random.randint(1, 30)
        name, other = random.sample(NAMES, 2)
        result = compute(a, b, c)
        numbers = {"sum": a + b, "twice": 2 * c, "product": a * c, "difference": a - b, "result": result}
        words = {"name": name, "other": other, "thing": random.choice(THINGS), "a": a, "b": b, "c": c} | numbers
        yield question.format(**words), solution.format(**words), result


def in_hydra(value: Any) -> str:
    """Formats a value in Hydra's override grammar."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {in_hydra(item)}" for key, item in value.items()) + "}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def write_tokenizer(folder: Path, num_unused: int = 0) -> range:
    """Trains a byte-level tokenizer with a chat template on the datasets, and writes it into a folder.

    Args:
        folder: is created.
        num_unused: tokens that no text has, added behind the others.

    Returns:
        The ids of the unused tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PADDING, "<|im_start|>", END_OF_TURN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [f"{question}\n{solution}" for question, solution, _ in word_problems("tokenizer", 500)]
    texts += [f"{row['question']}\n{row['answer']}" for row in written_rows(WRITTEN_PROBLEMS / "train.jsonl")]
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TURN, pad_token=PADDING)
    fast.chat_template = CHAT_TEMPLATE
    used = len(fast)
    fast.add_tokens([f"<|unused_{index}|>" for index in range(num_unused)])
    fast.save_pretrained(folder)
    return range(used, used + num_unused)
