"""Runs a GRPO recipe: `python examples/run_grpo.py --config RECIPE.yaml key=value ...`."""

import argparse
import sys
from pathlib import Path

from nemo_offload_rl.run.runner import run

CONFIGS = Path(__file__).parent / "configs"


def main() -> int:
    """Returns the exit status: see docs/getting-started.md."""
    parser = argparse.ArgumentParser(description="Run a GRPO recipe.")
    parser.add_argument("--config", type=Path, default=CONFIGS / "grpo_tiny_cpu.yaml", help="the recipe (YAML)")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="changes to the recipe, such as grpo.max_num_steps=10"
    )
    arguments = parser.parse_args()
    return run(arguments.config, arguments.overrides, "grpo")


if __name__ == "__main__":
    sys.exit(main())
