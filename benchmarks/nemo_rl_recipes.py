"""How many of NeMo-RL's recipes load unchanged, and which keys refuse the others?

python benchmarks/nemo_rl_recipes.py RL/examples/configs --checkout COMMIT [--deep]
    [--output docs/results/nemo_rl_recipes.json]

The folder is examples/configs of a whole checkout of NVIDIA-NeMo/RL, since recipes inherit from one another. The
benchmark reads every YAML file below it, with its `defaults`, as `nemo-offload-rl validate` does, without overrides.
With --deep, recipes that load and name a model of a supported architecture are then checked by `validate --deep`, with
a local config, data and tokenizer (some minutes). The tables of the page are printed.
"""

import argparse
import contextlib
import io
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from model_shapes import SIZES_OF_NAME
from nemo_rl_data import in_hydra, write_datasets, write_tokenizer
from result_file import TableValue, print_rows, write_result

from nemo_offload_rl.cli import main as nemo_offload_rl
from nemo_offload_rl.config import RecipeError, load
from nemo_offload_rl.config.keys.schema_problems import ABSENT, value_at
from nemo_offload_rl.config.model.families import CORRECTED_FAMILIES
from nemo_offload_rl.config.problems import Problem
from nemo_offload_rl.config.recipe import read_recipe

Row = dict[str, TableValue]

# Families by patterns of model names; the first match counts. Vision and audio models belong to none.
FAMILY_OF_NAME: tuple[tuple[str, str], ...] = (
    (r"(-VL|-Omni)", "vision"),
    (r"^Qwen/Qwen2\.5-|^deepseek-ai/DeepSeek-R1-Distill-Qwen-", "qwen2"),
    (r"^Qwen/Qwen3-.*-A\d+B", "qwen3_moe"),
    (r"^Qwen/Qwen3-", "qwen3"),
    (r"^Qwen/Qwen3\.5-", "qwen3_5"),
    (r"^meta-llama/Llama-3", "llama"),
    (r"^moonshotai/Moonlight-", "deepseek_v3"),
    (r"^openai/gpt-oss-", "gpt_oss"),
    (r"^nvidia/.*Nemotron", "nemotron_h"),
    (r"^zai-org/GLM-", "glm"),
)
# Unsupported features: a key, and the values that leave the feature off. With `*` any value asks for it.
NOT_BUILT: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "another algorithm": {"ppo": (), "distillation": (), "rm": ()},
    "another generation backend": {"policy.generation.backend": ("vllm", "transformers")},
    "asynchronous GRPO by one controller": {"async_rl": ()},
    "draft models": {
        "policy.draft.enabled": (False, None),
        "policy.generation.vllm_kwargs.speculative_config": (None,),
    },
    "dynamic batching": {"policy.dynamic_batching.enabled": (False, None)},
    "fp8 or fp4": {
        "policy.megatron_cfg.fp8_cfg.enabled": (False, None),
        "policy.generation.vllm_cfg.precision": ("auto", "bfloat16", "float32"),
        "policy.quant_cfg": (None,),
        "policy.generation.quant_cfg": (None,),
    },
    "LoRA": {"policy.megatron_cfg.peft.enabled": (False, None)},
    "multi-token prediction": {"policy.megatron_cfg.mtp_num_layers": (0, None)},
    "NeMo Gym": {"env.should_use_nemo_gym": (False, None)},
    "router replay": {"policy.router_replay.enabled": (False, None)},
    "the data plane": {"data_plane.enabled": (False, None)},
    "vision or audio": {"env.clevr-cogent": (), "env.vlm": ()},
}
_SHOWN_FROM = 10
"""A key that refuses fewer recipes has no row of its own."""


def main() -> None:
    """Reads every recipe, prints the tally, writes the result."""
    arguments = parse_arguments()
    paths = sorted(arguments.folder.rglob("*.yaml"))
    if not paths:
        raise SystemExit(f"{arguments.folder} has no YAML file; give examples/configs of a checkout of NeMo-RL.")
    load(Path(__file__).parents[1] / "examples" / "configs" / "grpo_tiny_cpu.yaml")  # builds the schema, once
    rows = [row_of(path, arguments.folder) for path in paths]
    if arguments.deep:
        write_datasets(arguments.work / "data")
        write_tokenizer(arguments.work / "tokenizer")
        for row in rows:
            row["deep"] = deep_verdict(row, arguments.folder, arguments.work)
    write_result(arguments.output, rows, checkout=arguments.checkout)
    for table in tables(rows):
        print()
        print_rows(table)


def row_of(path: Path, folder: Path) -> Row:
    """Loads one recipe.

    Args:
        path: of the recipe.
        folder: its name is relative to it.
    """
    start = time.perf_counter()
    problems: tuple[Problem, ...] = ()
    try:
        load(path)
    except RecipeError as error:
        problems = error.problems
    seconds = time.perf_counter() - start
    keys = list(dict.fromkeys(problem.path or "(the file)" for problem in problems))
    row: Row = {"recipe": str(path.relative_to(folder)), "loads": not problems}
    try:
        config = read_recipe(path).config
    except RecipeError:
        facts: Row = {"megatron_policy": None, "algorithm": "-", "architecture_supported": None, "asks_for": ""}
    else:
        facts = facts_of(config)
    why = problems[0].message if problems else ""
    return row | facts | {"refused_keys": ", ".join(keys), "why": why, "seconds": round(seconds, 3)}


def deep_verdict(row: Mapping[str, TableValue], folder: Path, work: Path) -> str | None:
    """Runs `validate --deep` on a recipe that loads, with its model's sizes instead of its weights.

    Args:
        row: of the recipe.
        folder: its name is relative to it.
        work: the folder with data and tokenizer.

    Returns:
        `passes`, or the last line of the error; None of a recipe that does not load or names no supported model.
    """
    if not row["loads"] or not row["architecture_supported"]:
        return None
    path = folder / str(row["recipe"])
    stop_tokens = value_at(read_recipe(path).config, "policy.generation.stop_token_ids")
    overrides = [
        f"++policy.hf_config={in_hydra(SIZES_OF_NAME[str(row['model'])])}",
        f"policy.tokenizer.name={work / 'tokenizer'}",
        f"++data.dataset_root={work / 'data'}",
        *(["policy.generation.stop_token_ids=null"] if stop_tokens not in (ABSENT, None) else []),  # of its tokenizer
    ]
    error = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(error):
        status = nemo_offload_rl(["validate", str(path), "--deep", *overrides])
    return "passes" if status == 0 else error.getvalue().strip().splitlines()[-1]


def facts_of(config: Mapping[str, Any]) -> Row:
    """Returns a recipe's algorithm, its model, and the unsupported features that it asks for."""
    name = value_at(config, "policy.model_name")
    family = next((family for pattern, family in FAMILY_OF_NAME if re.search(pattern, str(name))), None)
    algorithms = ("grpo", "sft", "dpo", "ppo", "distillation", "rm")
    asks_for = [feature for feature, keys in NOT_BUILT.items() if asks(config, keys)]
    if family == "vision" and "vision or audio" not in asks_for:
        asks_for.append("vision or audio")
    return {
        "megatron_policy": value_at(config, "policy.megatron_cfg.enabled") is True,
        "algorithm": next((algorithm for algorithm in algorithms if algorithm in config), "-"),
        "model": "" if name is ABSENT or " " in str(name) else str(name),
        "architecture_supported": family in CORRECTED_FAMILIES,
        "asks_for": ", ".join(asks_for),
    }


def asks(config: Mapping[str, Any], keys: Mapping[str, tuple[Any, ...]]) -> bool:
    """Returns whether one of the keys has a value that turns its feature on."""
    values = ((value_at(config, key), off) for key, off in keys.items())
    return any(value is not ABSENT and value not in off for value, off in values)


def tables(every: Sequence[Mapping[str, Any]]) -> list[list[Row]]:
    """Counts recipes with a Megatron policy: by algorithm, refused key, and feature; then what needs a look.

    The last table has recipes that ask only for supported features and are refused, or fail `validate --deep`.

    Args:
        every: the rows of all recipes.
    """
    rows = [row for row in every if row["megatron_policy"]]
    counts = [algorithm_row("all", rows)]
    counts += [algorithm_row(name, rows) for name in dict.fromkeys(row["algorithm"] for row in rows)]
    alone = Counter(row["asks_for"] for row in rows)
    asked = Counter(feature for row in rows for feature in row["asks_for"].split(", ") if feature)
    features: list[Row] = [
        {"feature": name, "recipes": count, "alone": alone[name]} for name, count in asked.most_common()
    ]
    odd = [row for row in rows if row.get("deep", "passes") not in (None, "passes")]
    odd += [row for row in rows if not row["loads"] and not row["asks_for"]]
    shown = ("recipe", "refused_keys", "why", "deep")
    found = [{name: row.get(name) for name in shown} for row in odd]
    return [table for table in (counts, key_rows([row for row in rows if not row["loads"]]), features, found) if table]


def algorithm_row(name: str, rows: Sequence[Mapping[str, Any]]) -> Row:
    """Returns the counts of an algorithm, or of all."""
    own = [row for row in rows if name in ("all", row["algorithm"])]
    built = [row for row in own if not row["asks_for"]]
    loaded = [row for row in own if row["loads"]]
    return {
        "algorithm": name,
        "recipes": len(own),
        "load unchanged": len(loaded),
        "ask only for supported features": len(built),
        "of these, load": sum(row["loads"] for row in built),
        "load, of a supported family": sum(row["architecture_supported"] for row in loaded),
        "pass --deep": sum(row.get("deep") == "passes" for row in own),
    }


def key_rows(refused: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Counts the recipes that each key refuses; keys that refuse few have one row together.

    `first` counts recipes that name the key before other refused keys, `alone` those that no other key refuses, and
    `supported` those that ask only for supported features.
    """
    of_recipe = [list(dict.fromkeys(general(key) for key in row["refused_keys"].split(", "))) for row in refused]
    total = Counter(key for keys in of_recipe for key in keys)
    first = Counter(keys[0] for keys in of_recipe)
    alone = Counter(keys[0] for keys in of_recipe if len(keys) == 1)
    built = Counter(key for keys, row in zip(of_recipe, refused, strict=True) if not row["asks_for"] for key in keys)
    counters = {"recipes": total, "first": first, "alone": alone, "supported": built}
    by_count = sorted(total, key=lambda key: (-total[key], key))
    rows: list[Row] = [
        {"key": key} | {name: counter[key] for name, counter in counters.items()}
        for key in by_count
        if total[key] >= _SHOWN_FROM
    ]
    if few := [key for key in by_count if total[key] < _SHOWN_FROM]:
        called = f"{len(few)} more keys, of fewer than {_SHOWN_FROM} recipes each"
        rows.append({"key": called} | {name: sum(counter[key] for key in few) for name, counter in counters.items()})
    return rows


def general(key: str) -> str:
    """Replaces a recipe's name for its environment in a key by NAME."""
    return re.sub(r"^env\.[^.]+\.", "env.NAME.", key)


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="examples/configs of a checkout of NeMo-RL")
    parser.add_argument("--checkout", required=True, help="the commit of that checkout, for the page")
    parser.add_argument("--deep", action="store_true", help="also run `validate --deep` on those that load")
    parser.add_argument("--work", type=Path, default=Path("build/nemo_rl_recipes"), help="for data and tokenizer")
    parser.add_argument("--output", type=Path, default=Path("build/nemo_rl_recipes.json"), help="the JSON file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
