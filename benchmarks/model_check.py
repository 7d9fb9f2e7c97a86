"""For which models does Megatron compute the same as transformers? Checks small copies of families with their flags.

python benchmarks/model_check.py [--family qwen2] [--output docs/results/model_check_cpu.json]

Each case runs the check of `python -m nemo_offload_rl.model_check` for one config, all in one process, padded and
packed: with the local layer specification without a GPU, with Transformer Engine's on a GPU. Megatron's settings are
those of examples/configs/grpo_math_1B_megatron.yaml. A case is right within `LOGPROB_LIMIT` and `GRADIENT_LIMIT` of
nemo_offload_rl/model_check/result.py; differences are the largest of a family's cases. The page's table is printed.
"""

import argparse
import json
import os
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
    print_rows([family_row(family, rows) for family in dict.fromkeys(row["family"] for row in rows)])
    write_result(arguments.output, rows)


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


def family_row(family: TableValue, rows: Sequence[Mapping[str, Any]]) -> dict[str, TableValue]:
    """Returns a family's row of the page's table."""
    of_verdict = {
        verdict: [row for row in rows if row["family"] == family and row["verdict"] == verdict]
        for verdict in ("right", "WRONG", "refused")
    }
    flags = {verdict: ", ".join(row["flags"] for row in found) for verdict, found in of_verdict.items()}
    row: dict[str, TableValue] = {"family": family}
    for verdict in ("right", "WRONG"):
        found = of_verdict[verdict]
        row |= {verdict: f"{len(found)}: {flags[verdict]}"}
        row |= {f"{verdict}: log-prob": largest(found, "logprob"), f"{verdict}: gradient": largest(found, "gradient")}
    return row | {"refused": flags["refused"] or "-"}


def largest(rows: Sequence[Mapping[str, Any]], what: str) -> str:
    """Returns the largest difference over rows, padded and packed."""
    found = [row[name] for row in rows for name in (f"padded_{what}", f"packed_{what}") if name in row]
    if not found:
        return "-"
    return "not a number" if None in found else f"{max(found):.2g}"


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--family", help="check this family alone")
    parser.add_argument("--output", type=Path, default=Path("build/model_check.json"), help="the JSON file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
