"""Where does a colocated GRPO step spend its seconds and its GPU memory, phase by phase?

Runs a recipe as a user would, and reads the metrics that every run writes. The first step, which compiles and
allocates, is left out of the medians.

    python benchmarks/grpo_phases.py --out docs/results/grpo_1_5B.json [key=value ...]
"""

import argparse
import statistics
import sys
from pathlib import Path

from result_file import Cell, print_rows, write_result

from nemo_offload_rl.algorithms.runner import run
from nemo_offload_rl.metrics.logger import METRICS_FILE, read_metrics

HERE = Path(__file__).parent
TIMING = "timing/train/"
MEMORY = "performance/memory/"


def rows_of(steps: list[dict[str, float]]) -> list[dict[str, Cell]]:
    """Medians over steps: a row a phase, a row a memory reading, a row of the whole step."""
    names = list(dict.fromkeys(name for step in steps for name in step))
    median = {name: statistics.median(step[name] for step in steps if name in step) for name in names}
    rows: list[dict[str, Cell]] = [
        {"case": "phase", "name": name.removeprefix(TIMING), "seconds": round(value, 4)}
        for name, value in median.items()
        if name.startswith(TIMING)
    ]
    rows += [
        {"case": "memory", "name": name.removeprefix(MEMORY), "gib": round(value, 2)}
        for name, value in median.items()
        if name.startswith(MEMORY)
    ]
    for name in (
        "performance/tokens_per_sec",
        "train/num_tokens",
        "train/token_mult_prob_error",
        "train/loss",
        "train/grad_norm",
    ):
        if name in median:
            rows.append({"case": "step", "name": name, "value": round(median[name], 4)})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=HERE / "recipes" / "grpo_1_5B_random.yaml")
    parser.add_argument("--out", type=Path, default=Path("build/grpo_phases.json"))
    parser.add_argument("--log-dir", type=Path, default=Path("build/grpo_phases"))
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_args()
    before = set(arguments.log_dir.glob(f"*/{METRICS_FILE}"))
    status = run(arguments.config, [f"logger.log_dir={arguments.log_dir}", *arguments.overrides], "grpo")
    if status != 0:
        return status
    (written,) = set(arguments.log_dir.glob(f"*/{METRICS_FILE}")) - before
    steps = [row for row in read_metrics(written) if row["step"] > 1]
    rows = rows_of(steps)
    write_result(arguments.out, rows)
    print_rows(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
