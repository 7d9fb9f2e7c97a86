"""What do the phases of a DPO step cost in seconds and GPU memory, with and without offloading, on one GPU?

Each way trains the same model on the same pairs in its own process; every answer has `--seq-length` tokens including
its prompt. A step is a reference pass and a training pass. Seconds are medians of the steps after the first. Memory is
the largest reading of the driver's count in a phase. The readings from step 2 on are also compared with step 1's,
because NeMo-RL #2859 ran out of memory after its first step. `losses_equal` compares every step's loss with that of the
first way, with deterministic attention.

    python benchmarks/dpo_phases.py --out docs/results/dpo_1_5B.json
    python benchmarks/dpo_phases.py --config examples/configs/dpo_tiny_cpu.yaml --seq-length 16
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_watch import GpuWatch
from measuring import random_rows
from model_shapes import QWEN2_1_5B
from one_rank import one_rank_worker
from result_file import TableValue, print_rows, write_result
from turns import in_turn, my_turn, run_children

from nemo_offload_rl.algorithms.losses import DPOLoss
from nemo_offload_rl.data.batch import BatchedData

MODULES = "policy.megatron_cfg.offload_modules=[qkv_linear,core_attn,attn_proj]"
ACTIVATIONS = ["policy.megatron_cfg.fine_grained_activation_offloading=true", MODULES]
OPTIMIZER = ["policy.offload_optimizer_for_logprob=true"]
# What each way changes in the recipe.
WAYS: Mapping[str, list[str]] = {
    "resident": [],
    "optimizer offloaded": OPTIMIZER,
    "activations offloaded": ACTIVATIONS,
    "both offloaded": [*OPTIMIZER, *ACTIVATIONS],
}
PHASES = ("reference_logprobs", "training")

PASSED_ON = ("config", "pairs", "mbs", "seq_length", "steps")


def main() -> None:
    """Measures each way and writes the result."""
    arguments = parse_arguments()
    if arguments.child:
        with my_turn():
            Path(arguments.out).write_text(json.dumps(measured(arguments.child, arguments)))
        return
    os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")  # losses are compared
    rows: list[Mapping[str, TableValue]] = []
    for found in in_turn(partial(in_own_process, arguments), arguments.ways):
        rows = [{**row, "losses_equal": row["losses"] == found[0]["losses"]} for row in found]
        write_result(Path(arguments.out), rows)
    print_rows(rows)


def in_own_process(arguments: argparse.Namespace, way: str) -> Mapping[str, TableValue]:
    """Starts a process and measures a way in it."""
    options = [f"--{name.replace('_', '-')}={getattr(arguments, name)}" for name in PASSED_ON]
    [(row, _)] = run_children(__file__, [["--child", way, *options]])
    if row is None:
        raise SystemExit(f"the way {way!r} failed; see above")
    found: Mapping[str, TableValue] = row
    return found


def measured(way: str, arguments: argparse.Namespace) -> Mapping[str, TableValue]:
    """Trains one way and returns its row."""
    from nemo_offload_rl.config import for_machine, load
    from nemo_offload_rl.run.setup import fields_from, with_run_length

    overrides = [
        f"policy.max_total_sequence_length={arguments.seq_length}",
        f"policy.train_global_batch_size={arguments.pairs}",
        f"policy.train_micro_batch_size={arguments.mbs}",
        *WAYS[way],
    ]
    config, _ = for_machine(load(Path(arguments.config), overrides).config, has_gpus=torch.cuda.is_available())
    policy: Any = with_run_length(config["policy"], arguments.steps)
    if not policy.get("hf_config"):
        policy["hf_config"] = QWEN2_1_5B
    with GpuWatch() as watch:
        worker = one_rank_worker(policy, init_reference_model=True, group_size=2)
        loss_fn = DPOLoss(**fields_from(DPOLoss, config["dpo"]))
        losses: list[float] = []
        seconds: list[dict[str, float]] = []
        peaks: list[dict[str, float]] = []
        for step in range(arguments.steps):
            batch = pairs(arguments.pairs, arguments.seq_length, policy["hf_config"]["vocab_size"], seed=step)
            took: dict[str, float] = {}
            peak: dict[str, float] = {}
            with watch.peak("reference_logprobs", peak):
                start = time.perf_counter()
                reference = worker.get_reference_policy_logprobs(batch, arguments.mbs)["reference_logprobs"]
                took["reference_logprobs"] = time.perf_counter() - start
            batch["reference_policy_logprobs"] = reference
            with watch.peak("training", peak):
                start = time.perf_counter()
                result = worker.train(batch, loss_fn, arguments.pairs, arguments.mbs)
                took["training"] = time.perf_counter() - start
            losses.append(float(result["loss"]))
            seconds.append(took)
            peaks.append(peak)
            print(f"{way}: step {step + 1} loss {result['loss']:.6f} {took} {peak}", flush=True)
        host_gib = worker.memory_stats()["host_rss_gib"]
        worker.shutdown()
    row: dict[str, TableValue] = {"way": way}
    for phase in PHASES:
        row[f"{phase}_s"] = round(statistics.median(took[phase] for took in seconds[1:]), 4)
        if peaks[0]:
            row[f"{phase}_peak_gib"] = round(max(peak[phase] for peak in peaks), 3)
            row[f"{phase}_peak_growth_gib"] = round(max(peak[phase] for peak in peaks[1:]) - peaks[0][phase], 3)
    row |= {
        "host_rss_gib": round(host_gib, 2),
        "losses": " ".join(str(loss) for loss in losses),
        "pairs": arguments.pairs,
        "micro_batch_pairs": arguments.mbs,
        "seq_length": arguments.seq_length,
        "steps": arguments.steps,
    }
    return row


def pairs(num_pairs: int, seq_length: int, vocab_size: int, seed: int) -> BatchedData:
    """Creates pairs of random tokens; the prompt is an eighth of the row and the same in both rows of a pair."""
    prompt = max(1, seq_length // 8)
    rows = random_rows(2 * num_pairs, seq_length, vocab_size, seed)
    rows["input_ids"][1::2, :prompt] = rows["input_ids"][::2, :prompt]
    rows["token_mask"][:, :prompt] = 0
    return rows.in_groups(2)


def parse_arguments() -> argparse.Namespace:
    """Returns the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--config", default="examples/configs/dpo.yaml", help="a DPO recipe")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--pairs", type=int, default=16, help="of a step")
    parser.add_argument("--mbs", type=int, default=2, help="pairs of a micro-batch")
    parser.add_argument("--seq-length", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--child", choices=list(WAYS), help=argparse.SUPPRESS)
    parser.add_argument("--out", "--output", default="build/dpo_phases.json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
