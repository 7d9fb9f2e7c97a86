"""Writes what recipes resolve to and what a run of them decides, to be compared before and after a change.

python tools/recipe_snapshot.py SNAPSHOT.json [--nemo-rl RL/examples/configs]
python tools/recipe_snapshot.py --compare BEFORE.json AFTER.json

A recipe that loads gives its resolved config, another one its refused keys. Each one that loads is then decided for
several sizes of GPU and host: a GPU needs no machine that has it.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]
sys.path += [str(REPOSITORY), str(REPOSITORY / "benchmarks")]

from model_shapes import QWEN2_1_5B, SIZES_OF_NAME  # noqa: E402

from nemo_offload_rl.config import RecipeError, for_machine, load  # noqa: E402
from nemo_offload_rl.memory.units import GIB  # noqa: E402

GPUS_GIB = (None, 24, 48, 79.6, 140)
HOSTS_GIB = (64, 126, 1000)
OURS = ("examples/configs", "benchmarks/recipes")


def main() -> None:
    """Writes a snapshot, or compares two."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--nemo-rl", type=Path)
    parser.add_argument("--compare", action="store_true")
    options = parser.parse_args()
    if options.compare:
        before, after = (json.loads(file.read_text()) for file in options.files)
        lines = list(differences(before, after))
        print(*lines, f"{len(lines)} differences", sep="\n")
        sys.exit(bool(lines))
    recipes = [path for folder in OURS for path in sorted((REPOSITORY / folder).rglob("*.yaml"))]
    named = {str(path.relative_to(REPOSITORY)): path for path in recipes if path.parent.name != "common"}
    if options.nemo_rl is not None:
        paths = sorted(options.nemo_rl.rglob("*.yaml"))
        named |= {f"nemo-rl/{path.relative_to(options.nemo_rl)}": path for path in paths}
    options.files[0].write_text(json.dumps({name: of_recipe(path) for name, path in named.items()}, indent=1))


def of_recipe(path: Path) -> dict[str, Any]:
    """Returns a recipe's resolved config and decisions, or its refused keys."""
    try:
        recipe = load(path)
    except RecipeError as error:
        return {"refused": sorted({problem.path or "(the file)" for problem in error.problems})}
    config: Any = recipe.config
    found = {"config": json.loads(json.dumps(config, default=str)), "num_notes": len(recipe.notes)}
    if config["policy"].get("hf_config") is None:
        config = json.loads(json.dumps(config, default=str))
        sizes = SIZES_OF_NAME.get(config["policy"]["model_name"], QWEN2_1_5B)
        config["policy"]["hf_config"] = {**sizes, "max_position_embeddings": 131072}
    found["decided"] = {
        f"GPU of {gpu} GiB, host of {host} GiB": decided(config, recipe.algorithm, gpu, host)
        for gpu in GPUS_GIB
        for host in HOSTS_GIB
    }
    return found


def decided(config: Any, algorithm: str, gpu_gib: float | None, host_gib: float) -> Any:
    """Returns the values that a run sets for a machine and its plan's bytes, or the error's type."""
    from nemo_offload_rl.hf_config import hf_config
    from nemo_offload_rl.placement.host import HostFacts
    from nemo_offload_rl.plan.decisions import Machine
    from nemo_offload_rl.plan.resolve import resolve

    nbytes = int(host_gib * GIB)
    host = HostFacts("host", "", nbytes, nbytes, None, None)
    hosts = (host,) if config["cluster"]["num_nodes"] == 1 else ()
    machine = Machine(gpu_gib is not None, None if gpu_gib is None else int(gpu_gib * GIB), hosts)
    try:
        fields = hf_config(config["policy"]).to_dict()
        resolved = resolve(config, machine, fields, algorithm=algorithm)
        for problem in resolved.problems:
            raise problem
    except (ValueError, NotImplementedError) as error:
        return {"error": type(error).__name__}
    lines = for_machine(config, has_gpus=machine.has_gpus)[1]
    return {
        "changed": dict(differences(config, resolved.config, pairs=True)),
        "num_lines": len(resolved.lines) - len(lines),
        "host_bytes": None if resolved.run is None else [need.total_bytes for need in resolved.run.needs],
    }


def differences(before: Any, after: Any, path: str = "", *, pairs: bool = False) -> Iterator[Any]:
    """Yields a line, or a (path, value) pair, for each value that differs."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted(before.keys() | after.keys(), key=str):
            yield from differences(before.get(key), after.get(key), f"{path}.{key}" if path else str(key), pairs=pairs)
    elif before != after:
        yield (path, after) if pairs else f"{path}: {before!r} -> {after!r}"


if __name__ == "__main__":
    main()
