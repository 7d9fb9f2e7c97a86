"""Runs the examples as a user would."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from support.forked_python import forked_python

from nemo_offload_rl.metrics.names import MEASUREMENTS

ROOT = Path(__file__).parents[2]

# Eight prompts with four answers each: a GRPO step is over in no time and still runs all of its parts.
SHORT_GRPO = [
    "~warm_start", "grpo.num_prompts_per_step=8", "grpo.num_generations_per_prompt=4", "grpo.val_period=2",
    "grpo.max_val_samples=32", "policy.train_global_batch_size=32", "policy.train_micro_batch_size=16",
    "policy.megatron_cfg.scheduler.lr_decay_iters=10",  # the same schedule for runs of any length
    "loss_fn.reference_policy_kl_penalty=0.01", "loss_fn.force_on_policy_ratio=false", "env.arithmetic.reward=python",
    "++env.arithmetic.reward_function=support.rewards:starts_low", "policy.verify_refit=true",
    "checkpointing.save_period=2",
    "grpo.stop_at_validation_metric=null",  # this reward can be learnt in two steps
    "grpo.stop_at_validation_threshold=null",
]  # fmt: skip


@dataclass(frozen=True)
class Finished:
    folder: Path
    status: int
    output: str

    def metrics(self) -> dict[int, dict[str, float]]:
        """Returns the logged metrics by step, without those that differ from run to run."""
        lines = (self.folder / "logs" / "exp_001" / "metrics.jsonl").read_text().splitlines()
        rows = {row["step"]: row for row in map(json.loads, lines)}
        return {
            step: {name: value for name, value in row.items() if not name.startswith(MEASUREMENTS)}
            for step, row in rows.items()
        }


def command(
    script: str, folder: Path, overrides: list[str], *, python: str = sys.executable, recipe: Path | None = None
) -> list[str]:
    places = [f"logger.log_dir={folder / 'logs'}", f"checkpointing.checkpoint_dir={folder / 'checkpoints'}"]
    config = [] if recipe is None else ["--config", str(recipe)]
    return [python, str(ROOT / "examples" / script), *config, *places, *overrides]


def environment() -> dict[str, str]:
    """Returns the environment of a run of this working tree, wherever the package is installed from."""
    folders = [str(ROOT), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(folders)}


def run_example(
    script: str, folder: Path, overrides: list[str], *, recipe: Path | None = None, status: int = 0, **variables: str
) -> Finished:
    """Runs an example to its end, which has this exit status."""
    done = subprocess.run(
        command(script, folder, overrides, python=forked_python(), recipe=recipe), cwd=ROOT,
        env=environment() | variables, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == status, done.stdout + done.stderr
    return Finished(folder, status, done.stdout + done.stderr)
