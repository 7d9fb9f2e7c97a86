"""Compares a small twin of a model in this process, and prints what was found as JSON.

    python -m nemo_offload_rl.model_check --hf-config config.json
    python -m nemo_offload_rl.model_check --recipe examples/configs/grpo_tiny_cpu.yaml [key=value ...]

Exits with 0 where the model is computed as transformers does, with 1 where it is not or cannot be built, and with 2
where the config or the recipe cannot be read, which one sentence on standard error says.
"""

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from nemo_offload_rl.config import resolve_absent_keys
from nemo_offload_rl.config.schema.policy import PolicyConfig
from nemo_offload_rl.config.source.yaml_source import MAX_FILE_BYTES
from nemo_offload_rl.model_check.process import ENVIRONMENT, REQUEST_ON_STDIN
from nemo_offload_rl.storage.disk import UnreadableFileError, read_regular_file

os.environ.update(ENVIRONMENT)  # before torch is imported


def main() -> int:
    """Compares the models, prints the result, and returns the exit status."""
    arguments = _arguments()
    # Libraries print to standard output, which must contain only the answer.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answer:
        os.dup2(2, 1)
        try:
            policy = _policy(arguments)
        except ValueError as error:
            sys.stderr.write(f"{error}\n")
            return 2
        found, is_right = _check(policy)
        answer.write(json.dumps(found, allow_nan=False) + "\n")
    return 0 if is_right or arguments.request_on_stdin else 1


def _policy(arguments: argparse.Namespace) -> PolicyConfig:
    """Returns the policy section of the model to check.

    Raises:
        ValueError: the config or the recipe cannot be read.
    """
    if arguments.request_on_stdin:
        policy: PolicyConfig = json.loads(sys.stdin.readline())
        threading.Thread(target=_end_with_standard_input, daemon=True).start()
        return policy
    if arguments.recipe is not None:
        return _policy_of_recipe(arguments.recipe, arguments.overrides)
    if arguments.overrides:
        raise ValueError(f"{arguments.overrides[0]} overrides a key of a recipe; give it with --recipe, or delete it")
    return policy_of_config(_read_config(arguments.hf_config))


def _read_config(path: Path) -> Mapping[str, Any]:
    """Reads a Hugging Face config.

    Raises:
        ValueError: there is no such file, or it is not a JSON object.
    """
    try:
        found = json.loads(read_regular_file(path, MAX_FILE_BYTES))
    except UnreadableFileError as error:
        raise ValueError(f"--hf-config {path}: {error}; give a model's config.json") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--hf-config {path}: is not valid JSON ({error}); give a model's config.json") from error
    if not isinstance(found, dict):
        raise ValueError(f"--hf-config {path}: is JSON, but not an object of fields; give a model's config.json")
    return found


def policy_of_config(config: Mapping[str, Any]) -> PolicyConfig:
    """Returns a policy section for a Hugging Face config alone, with Megatron-Bridge's own choices for the model."""
    policy: Any = {"model_name": "the model", "hf_config": dict(config), "megatron_cfg": {}}
    resolve_absent_keys({"policy": policy})
    return policy


def _check(policy: PolicyConfig) -> tuple[dict[str, Any], bool]:
    start = time.perf_counter()
    from nemo_offload_rl.model_check.compare import check

    imports = {"imports": time.perf_counter() - start}
    try:
        result = check(policy)
    except ValueError as error:
        return {"error": str(error)}, False
    result = replace(result, seconds={**imports, **result.seconds})
    return result.to_json() | {"is_right": result.is_right}, result.is_right


def _policy_of_recipe(path: Path, overrides: list[str]) -> PolicyConfig:
    import torch

    from nemo_offload_rl.config import for_machine, load

    config, _ = for_machine(load(path, overrides).config, has_gpus=torch.cuda.is_available())
    policy: PolicyConfig = config["policy"]
    return policy


def _end_with_standard_input() -> None:
    """Ends this process when standard input closes: its parent closed the pipe, or has ended."""
    sys.stdin.read()
    os._exit(1)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m {__package__}", description=(__doc__ or "").splitlines()[0])
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--hf-config", type=Path, metavar="FILE", help="a Hugging Face config.json")
    source.add_argument("--recipe", type=Path, metavar="RECIPE", help="a recipe, whose megatron_cfg counts, too")
    source.add_argument(REQUEST_ON_STDIN, action="store_true", help="a policy section, as a line of JSON")
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="of the recipe, as for validate")
    return parser.parse_args()


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)  # skip the threads and exit handlers of libraries, which take a second
