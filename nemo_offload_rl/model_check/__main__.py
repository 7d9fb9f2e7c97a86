"""Compares a small twin of a model in this process, and prints what was found as JSON.

    python -m nemo_offload_rl.model_check --hf-config config.json
    python -m nemo_offload_rl.model_check --recipe examples/configs/grpo_tiny_cpu.yaml [key=value ...]

Exits with 0 where the model is computed as transformers does, with 1 where it is not or cannot be built.
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
from nemo_offload_rl.model_check.process import ENVIRONMENT, REQUEST_ON_STDIN

os.environ.update(ENVIRONMENT)  # before torch is imported


def main() -> int:
    """Compares the models, prints the result, and returns the exit status."""
    arguments = _arguments()
    # Libraries print to standard output, which must contain only the answer.
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    if arguments.request_on_stdin:
        policy = json.loads(sys.stdin.readline())
        threading.Thread(target=_end_with_standard_input, daemon=True).start()
    elif arguments.recipe is not None:
        policy = _policy_of_recipe(arguments.recipe, arguments.overrides)
    else:
        policy = policy_of_config(json.loads(arguments.hf_config.read_text(encoding="utf-8")))
    found, is_right = _check(policy)
    answer.write(json.dumps(found, allow_nan=False) + "\n")
    answer.close()
    return 0 if is_right or arguments.request_on_stdin else 1


def policy_of_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a policy section for a Hugging Face config alone, with Megatron-Bridge's own choices for the model."""
    policy = {"model_name": "the model", "hf_config": dict(config), "megatron_cfg": {}}
    resolve_absent_keys({"policy": policy})
    return policy


def _check(policy: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    start = time.perf_counter()
    from nemo_offload_rl.model_check.compare import check

    imports = {"imports": time.perf_counter() - start}
    try:
        result = check(policy)
    except ValueError as error:
        return {"error": str(error)}, False
    result = replace(result, seconds={**imports, **result.seconds})
    return result.to_json() | {"is_right": result.is_right}, result.is_right


def _policy_of_recipe(path: Path, overrides: list[str]) -> Mapping[str, Any]:
    import torch

    from nemo_offload_rl.config import for_machine, load

    config, _ = for_machine(load(path, overrides).config, has_gpus=torch.cuda.is_available())
    policy: Mapping[str, Any] = config["policy"]
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
