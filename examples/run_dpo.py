"""Runs a DPO recipe: `python examples/run_dpo.py --config RECIPE.yaml key=value ...`."""

import argparse
import sys
from pathlib import Path

from nemo_offload_rl.run.runner import run

CONFIGS = Path(__file__).parent / "configs"


def main() -> int:
    """Returns the exit status: see docs/getting-started.md."""
    parser = argparse.ArgumentParser(description="Run a DPO recipe.")
    parser.add_argument("--config", type=Path, default=CONFIGS / "dpo_tiny_cpu.yaml", help="the recipe (YAML)")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="changes to the recipe, such as dpo.max_num_steps=10"
    )
    arguments = parser.parse_args()
    return run(arguments.config, arguments.overrides, "dpo")


if __name__ == "__main__":
    sys.exit(main())
