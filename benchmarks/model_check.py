"""For which models does Megatron compute the same as transformers? Checks small copies of families with their flags.

python benchmarks/model_check.py [--family qwen2] [--output docs/results/model_check_cpu.json]

Each case runs the check of `python -m nemo_offload_rl.model_check` for one config, all in one process, padded and
packed: with the local layer specification without a GPU, with Transformer Engine's on a GPU. Megatron's settings are
those of examples/configs/grpo_math_1B_megatron.yaml. The benchmark also writes the table as Markdown beside the JSON
file.
"""

import argparse
import json
import os
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_offload_rl.model_check.process import ENVIRONMENT

os.environ.update(ENVIRONMENT)  # before torch is imported

import torch
from result_file import TableValue, print_rows, write_result

from nemo_offload_rl.config import for_machine, load
from nemo_offload_rl.model_check.compare import check
from nemo_offload_rl.model_check.result import GRADIENT_LIMIT, LOGPROB_LIMIT

RECIPE = Path(__file__).parents[1] / "examples" / "configs" / "grpo_math_1B_megatron.yaml"

Fields = Mapping[str, Any]

ROPES: Mapping[str, Fields] = {
    "linear rope": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
    "llama3 rope": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_theta": 5e5,
    },
    "yarn rope": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
        "rope_theta": 1e6,
    },
    "dynamic rope": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
}
EVERY_FAMILY: Mapping[str, Fields] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "untied": {"tie_word_embeddings": False},
    **{name: {"rope_parameters": dict(rope)} for name, rope in ROPES.items()},
}
WINDOWS = {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 20}
BY_NAME = {**WINDOWS, "layer_types": ["sliding_attention", "full_attention", *["sliding_attention"] * 30]}
YARN_IN_FULL = {
    **ROPES["yarn rope"], "attention_factor": 1.7, "beta_fast": 8.0, "beta_slow": 0.5, "truncate": False
}  # fmt: skip
AT_ONCE = {"attention_bias": True, "use_sliding_window": True, "sliding_window": 4096, "rope_parameters": YARN_IN_FULL}
OF_FAMILY: Mapping[str, Mapping[str, Fields]] = {
    "llama": {
        "attention biases": {"attention_bias": True},
        "MLP biases": {"mlp_bias": True},
        "all biases": {"attention_bias": True, "mlp_bias": True},
        "gelu": {"hidden_act": "gelu"},
        "yarn rope in full": {"rope_parameters": YARN_IN_FULL},
        "few keys": {"num_key_value_heads": 8},
        "one key": {"num_key_value_heads": 1},
    },
    "mistral": {"window": {"sliding_window": 4096}, "no window": {"sliding_window": None}},
    "qwen2": {"windows in late layers": WINDOWS, "windows in layers by name": BY_NAME},
    "qwen3": {
        "windows in late layers": WINDOWS,
        "biases": {"attention_bias": True},
        "all at once": {**AT_ONCE, "max_window_layers": 20},
    },
    "qwen3_moe": {
        "weights of experts normalized": {"norm_topk_prob": True},
        "first layer dense": {"mlp_only_layers": [0]},
        "every second layer dense": {"decoder_sparse_step": 2},
        "windows": {"use_sliding_window": True, "sliding_window": 4096},
        "biases": {"attention_bias": True},
        "all at once": {**AT_ONCE, "mlp_only_layers": [1]},
    },
    "gemma": {},
    "deepseek_v3": {"no groups of experts": {"n_group": 1, "topk_group": 1}, "no query rank": {"q_lora_rank": None}},
}
OTHER_FAMILIES = ("gemma2", "gemma3_text", "mixtral", "olmoe", "glm4_moe", "gpt_oss", "qwen3_next")
"""Checked without further flags."""


def main() -> None:
    """Checks every case, prints the table, writes the result."""
    arguments = parse_arguments()
    megatron = megatron_settings()
    rows = [row_of(*case, megatron) for case in cases(arguments.family)]
    print_rows([{name: row[name] for name in ("family", "flags", "verdict")} for row in rows])
    write_result(arguments.output, rows)
    page = page_of(json.loads(arguments.output.read_text()), arguments.output.name)
    arguments.output.with_suffix(".md").write_text(page)


def cases(only: str | None) -> Iterator[tuple[str, str, Fields]]:
    """Yields the family, the name of the flags and the fields of the config."""
    for family, flags in OF_FAMILY.items():
        if only in (None, family):
            for name, fields in {**EVERY_FAMILY, **flags}.items():
                yield family, name, fields
    for family in OTHER_FAMILIES:
        if only in (None, family):
            yield family, "plain", {}


def megatron_settings() -> dict[str, Any]:
    """Returns the recipe's policy.megatron_cfg, adapted to this machine."""
    config: Any = load(RECIPE).config
    config, _ = for_machine(config, has_gpus=torch.cuda.is_available())
    settings: dict[str, Any] = config["policy"]["megatron_cfg"]
    return settings


def row_of(family: str, name: str, fields: Fields, megatron: Fields) -> dict[str, TableValue]:
    """Checks one case and returns its row."""
    policy: Any = {"model_name": family, "hf_config": {"model_type": family, **fields}, "megatron_cfg": megatron}
    row: dict[str, TableValue] = {"family": family, "flags": name}
    start = time.perf_counter()
    try:
        result = check(policy)
    except ValueError as error:
        row |= {"verdict": "refused", "why": str(error)}
    else:
        row |= {"verdict": "right" if result.is_right else "WRONG", "layers": result.layers}
        for difference in result.differences:
            row |= {
                f"{difference.batches}_logprob": finite(difference.logprob),
                f"{difference.batches}_gradient": finite(difference.gradient),
                f"{difference.batches}_parameter": difference.parameter,
            }
        row |= {f"{stage.replace(' ', '_').lower()}_s": round(spent, 3) for stage, spent in result.seconds.items()}
    row["seconds"] = round(time.perf_counter() - start, 2)
    print(json.dumps(row), flush=True)
    return row


def finite(value: float) -> float | None:
    """Returns the number, or None if JSON cannot represent it."""
    return value if abs(value) < float("inf") else None


def page_of(result: Mapping[str, Any], data: str) -> str:
    """Formats the result as a Markdown page.

    Args:
        result: as in the JSON file.
        data: name of that file.
    """
    rows = result["rows"]
    layers = sorted({row["layers"] for row in rows if "layers" in row})
    kinds = [kind for kind in ("padded", "packed") if any(f"{kind}_logprob" in row for row in rows)]
    counts = {verdict: sum(row["verdict"] == verdict for row in rows) for verdict in ("right", "WRONG", "refused")}
    lines = [
        "# Does Megatron compute the same as transformers?",
        "",
        "For which model families and config flags does Megatron compute the same log-probs and gradients as "
        f"transformers? Of the {len(rows)} cases of `benchmarks/model_check.py` at {result['commit']}, "
        f"{counts['right']} are right, {counts['WRONG']} wrong (a run stops with an error), "
        f"and {counts['refused']} refused.",
        "",
        table_line(["family", "right", "log-prob", "gradient", "wrong: log-prob, gradient", "refused"]),
        table_line(["---"] * 6),
        *(table_line(family_cells(family, rows)) for family in dict.fromkeys(row["family"] for row in rows)),
        "",
        "The columns log-prob and gradient give the largest difference among the cases that are right: the difference "
        "of a token's log-prob, and the relative difference of a parameter's gradient.",
        "",
        "## How it was measured",
        "",
        f"The models are small copies with random weights in float32; batches are {' and '.join(kinds)}, layers: "
        f"{', '.join(layers)}. A case is right if its log-prob differs by at most {LOGPROB_LIMIT:g} and its gradient "
        f"by at most {GRADIENT_LIMIT:g}. [Model check](../model-check.md) describes the method.",
        "",
        f"- machine: {result['machine']}",
        f"- commit: {result['commit']}, {result['date']}",
        f"- command: `{result['command']}`",
        f"- [{data}]({data}) has each case with its differences, the parameter, and the full reason of a refusal.",
        "",
        "## What it does not say",
        "",
        "Other precisions, several ranks, and kernels that only larger sizes use were not checked.",
    ]
    return (
        "\n".join(textwrap.fill(line, 120, break_on_hyphens=False) if is_prose(line) else line for line in lines) + "\n"
    )


def is_prose(line: str) -> bool:
    """Returns whether a line may be wrapped."""
    return not line.startswith(("#", "|", "- "))


def family_cells(family: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the cells of a family's row in the table."""
    of_verdict = {
        verdict: [row for row in rows if row["family"] == family and row["verdict"] == verdict]
        for verdict in ("right", "WRONG", "refused")
    }
    right = of_verdict["right"]
    wrong = [
        f"{row['flags']}: {largest([row], 'logprob')}, {largest([row], 'gradient')}" for row in of_verdict["WRONG"]
    ]
    refused = [row["flags"] for row in of_verdict["refused"]]
    listed = f"{len(right)}: {', '.join(row['flags'] for row in right)}" if right else "0"
    return [
        family, listed, largest(right, "logprob"), largest(right, "gradient"), "; ".join(wrong) or "-",
        ("all" if len(refused) > 1 and not right and not wrong else ", ".join(refused)) or "-",
    ]  # fmt: skip


def largest(rows: Sequence[Mapping[str, Any]], what: str) -> str:
    """Returns the largest difference over rows, padded and packed."""
    found = [row[name] for row in rows for name in (f"padded_{what}", f"packed_{what}") if name in row]
    if not found:
        return "-"
    return "not a number" if None in found else f"{max(found):.2g}"


def table_line(cells: Sequence[str]) -> str:
    """Formats one line of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--family", help="check this family alone")
    parser.add_argument("--output", type=Path, default=Path("build/model_check.json"), help="the JSON file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
