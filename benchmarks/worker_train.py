"""What does `worker.train` cost over a bare megatron-core loop of the same model and schedule, on one GPU?

Both run in this process, in turn, on the same batches. The bare loop is the least that megatron-core needs: its
schedule, its own cross entropy inside the model, its optimizer and scheduler; no log-probs, no loss contract, no checks
of gradients.

    python benchmarks/worker_train.py --out docs/results/worker_train.json
"""

import argparse
import functools
import random
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from measuring import random_rows, timed_call
from model_shapes import QWEN2_1_5B
from one_rank import one_rank_worker
from result_file import print_rows, write_result

from nemo_offload_rl.algorithms.losses import NLLLoss
from nemo_offload_rl.data.batch import BatchedData
from nemo_offload_rl.worker.worker import MegatronPolicyWorker


def policy(seq_length: int) -> dict[str, Any]:
    """Returns the policy section of grpo_math_1B_megatron.yaml, with random weights."""
    from nemo_offload_rl.config import load

    recipe = load(
        "examples/configs/grpo_math_1B_megatron.yaml",
        [
            f"policy.max_total_sequence_length={seq_length}",
            "policy.sequence_packing.enabled=false",
            "policy.megatron_cfg.optimizer.lr=1e-5",
            "policy.megatron_cfg.empty_unused_memory_level=0",
        ],
    )
    return dict(recipe.config["policy"]) | {"hf_config": QWEN2_1_5B}


def bare_step(worker: MegatronPolicyWorker, data: BatchedData, mbs: int) -> float:
    """Runs one step that uses only this package's model and optimizer objects."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    state = worker.state
    model = state.model[0]
    ids = data["input_ids"]
    micro = [ids[i : i + mbs] for i in range(0, len(ids), mbs)]

    def loss_func(mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = (losses.float() * mask).sum() / mask.sum()
        return loss, {"loss": loss.detach().clone()}

    def forward_step(iterator: Any, model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        tokens = next(iterator).cuda(non_blocking=True)
        positions = torch.arange(tokens.shape[1], device="cuda").expand_as(tokens)
        labels = tokens.roll(-1, dims=1)
        mask = torch.ones_like(tokens, dtype=torch.float32)
        mask[:, -1] = 0
        out = model(input_ids=tokens, position_ids=positions, attention_mask=None, labels=labels)
        return out, functools.partial(loss_func, mask)

    optimizer: Any = state.optimizer
    scheduler: Any = state.scheduler
    model.zero_grad_buffer()
    optimizer.zero_grad()
    outputs = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(micro),
        model=model,
        num_microbatches=len(micro),
        seq_length=ids.shape[1],
        micro_batch_size=mbs,
        forward_only=False,
    )
    optimizer.step()
    scheduler.step(increment=1)
    return float(sum(out["loss"] for out in outputs) / len(outputs))


def ratio_of_medians(pairs: Sequence[tuple[float, float]]) -> float:
    bare, ours = zip(*pairs, strict=True)
    return statistics.median(ours) / statistics.median(bare)


def median_of_ratios(pairs: Sequence[tuple[float, float]]) -> float:
    return statistics.median(ours / bare for bare, ours in pairs)


def interval_95(
    pairs: Sequence[tuple[float, float]], statistic: Callable[[Sequence[tuple[float, float]]], float]
) -> tuple[float, float]:
    """Bootstraps a 95% percentile interval of a statistic from 10,000 draws of pairs with replacement.

    The interval treats the pairs as independent and does not cover differences between runs or machines.
    """
    generator = random.Random(0)
    found = statistics.quantiles(
        (statistic(generator.choices(pairs, k=len(pairs))) for _ in range(10_000)), n=40, method="inclusive"
    )
    return found[0], found[-1]


def compared(bare: Sequence[float], ours: Sequence[float]) -> dict[str, float]:
    """Returns fields of a row: ratios of `ours` to `bare` over the same steps in turn, with 95% intervals.

    A pair's two steps ran one after the other, so a slowdown of the host that outlasts a step affects both.
    """
    pairs = list(zip(bare, ours, strict=True))
    fields: dict[str, float] = {}
    for name, statistic in (("ratio_to_bare", ratio_of_medians), ("paired_ratio", median_of_ratios)):
        low, high = interval_95(pairs, statistic)
        fields |= {name: statistic(pairs), f"{name}_low_95": low, f"{name}_high_95": high}
    return {name: round(value, 4) for name, value in fields.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--mbs", type=int, default=4)
    parser.add_argument("--seq-length", type=int, default=512)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--out", default="build/worker_train.json")
    args = parser.parse_args()
    worker = one_rank_worker(policy(args.seq_length))
    worker.prepare_for_training()
    data = random_rows(args.rows, args.seq_length, QWEN2_1_5B["vocab_size"])
    ways = {
        "bare megatron-core": lambda: bare_step(worker, data, args.mbs),
        "worker.train": lambda: worker.train(data, NLLLoss(), args.rows, args.mbs)["loss"],
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    peaks: dict[str, float] = {}
    for step in range(args.steps + 3):
        turn = list(ways.items()) if step % 2 else list(ways.items())[::-1]
        for name, way in turn:
            torch.cuda.reset_peak_memory_stats()
            elapsed, loss = timed_call(way)
            peaks[name] = torch.cuda.max_memory_allocated() / 2**20
            if step >= 3:
                seconds[name].append(elapsed)
            print(f"{name:20s} step {step} {elapsed * 1e3:8.1f} ms  loss {loss:.6f}", flush=True)
    bare, ours = seconds["bare megatron-core"], seconds["worker.train"]
    ratios = {"bare megatron-core": {"ratio_to_bare": 1.0}, "worker.train": compared(bare, ours)}
    rows = [
        {
            "way": name,
            "step_ms": round(statistics.median(values) * 1e3, 2),
            **ratios[name],
            "tokens_per_s": round(args.rows * args.seq_length / statistics.median(values)),
            "peak_mib": round(peaks[name]),
            "rows": args.rows,
            "micro_batch": args.mbs,
            "seq_length": args.seq_length,
            "steps": args.steps,
        }
        for name, values in seconds.items()
    ]
    write_result(Path(args.out), rows)
    print_rows(rows)
    worker.shutdown()


if __name__ == "__main__":
    main()
