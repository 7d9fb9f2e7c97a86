"""What do logits in chunks cost in time, and how much memory do they save, compared with a whole micro-batch's logits?

One worker computes log-probs of a micro-batch and trains on it, alternating between whole logits and chunks of some
sizes. The logits' share of a peak is its difference from the peak with the smallest chunk, which is measured once by
itself. Time is compared with that of whole logits; in training it is also compared with the FLOPs that computing the
output layer once more adds.

python benchmarks/logits.py [--chunks 256 1024] [--temperature 0.7] [--scale tiny] [--out build/logits.json]
"""

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from measuring import random_rows
from model_shapes import QWEN2_1_5B, TINY_SIZES
from one_rank import one_rank_worker
from result_file import TableValue, print_rows, write_result

from nemo_offload_rl.algorithms.losses import NLLLoss
from nemo_offload_rl.config import for_machine, load
from nemo_offload_rl.worker.logprob_passes import LogprobPasses
from nemo_offload_rl.worker.worker import MegatronPolicyWorker

SCALES: dict[str, tuple[dict[str, Any], int, int]] = {
    "1.5B": (QWEN2_1_5B, 4, 4096),
    "tiny": (QWEN2_1_5B | TINY_SIZES, 2, 64),
}
"""The model, rows of a micro-batch, and tokens of a row."""
WARM_UP = 2


def make_worker(model: Mapping[str, Any], seq_length: int, temperature: float) -> MegatronPolicyWorker:
    """Creates a worker with random weights from grpo_math_1B_megatron.yaml; in float32 on a CPU."""
    on_gpu = torch.cuda.is_available()
    recipe = load(
        "examples/configs/grpo_math_1B_megatron.yaml",
        [
            *([] if on_gpu else ["policy.precision=float32", "policy.megatron_cfg.optimizer.bf16=false"]),
            f"policy.max_total_sequence_length={seq_length}",
            f"policy.generation.temperature={temperature}",
            "policy.sequence_packing.enabled=false",
            "policy.megatron_cfg.use_fused_linear_logprobs=true",
            "policy.megatron_cfg.optimizer.lr=1e-6",
            "policy.megatron_cfg.empty_unused_memory_level=0",
        ],
    )
    config, _ = for_machine(dict(recipe.config), has_gpus=on_gpu)
    return one_rank_worker(dict(config["policy"]) | {"hf_config": model})


def with_chunks(passes: LogprobPasses, chunk_tokens: int | None) -> LogprobPasses:
    """Runs the passes with chunks of another size; None means whole logits."""
    fields = ((field.name, getattr(passes, field.name)) for field in dataclasses.fields(passes))
    return LogprobPasses(**{name: dataclasses.replace(of, chunk_tokens=chunk_tokens) for name, of in fields})


def measured(function: Callable[[], object]) -> tuple[float, float | None]:
    """Returns the seconds of a call, and by how many MiB its peak exceeds the memory allocated before it."""
    has_gpu = torch.cuda.is_available()
    if has_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if has_gpu else 0
    start = time.perf_counter()
    function()
    if has_gpu:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    return seconds, (torch.cuda.max_memory_allocated() - before) / 2**20 if has_gpu else None


def recomputation(model: Mapping[str, Any], seq_length: int) -> float:
    """Returns the FLOPs of the output layer's product as a share of those of a training step."""
    hidden, heads, kv_heads = model["hidden_size"], model["num_attention_heads"], model["num_key_value_heads"]
    attention = 2 * hidden**2 * (1 + kv_heads / heads) + hidden * seq_length  # half of the scores are masked
    layer = attention + 3 * hidden * model["intermediate_size"]
    output = hidden * model["vocab_size"]
    return float(output / (3 * (model["num_hidden_layers"] * layer + output)))


def measure(
    scale: str, chunks: Sequence[int], smallest: int, repeats: int, temperature: float
) -> list[dict[str, TableValue]]:
    """Yields one row for each pass and chunk size; for whole logits, `chunk_tokens` is None."""
    model, num_rows, seq_length = SCALES[scale]
    worker = make_worker(model, seq_length, temperature)
    data = random_rows(num_rows, seq_length, model["vocab_size"])
    passes = worker._passes
    calls: dict[str, Callable[[], object]] = {
        "log-probs": lambda: worker.get_logprobs(data, mbs=num_rows),
        "training": lambda: worker.train(data, NLLLoss(), gbs=num_rows, mbs=num_rows),
    }
    rows: list[dict[str, TableValue]] = []
    for kind, call in calls.items():

        def once(chunk: int | None, call: Callable[[], object] = call) -> tuple[float, float | None]:
            worker._passes = with_chunks(passes, chunk)
            return measured(call)

        once(smallest)
        floor = once(smallest)[1]
        ways: list[int | None] = [None, *chunks]
        found: dict[int | None, list[tuple[float, float | None]]] = {chunk: [] for chunk in ways}
        for repeat in range(WARM_UP + repeats):
            for chunk in ways if repeat % 2 else ways[::-1]:
                result = once(chunk)
                if repeat >= WARM_UP:
                    found[chunk].append(result)
        whole_s = statistics.median(seconds for seconds, _ in found[None])
        whole_mib = logits_part(found[None], floor)
        for chunk, results in found.items():
            seconds = statistics.median(seconds for seconds, _ in results)
            peaks = [mib for _, mib in results if mib is not None]
            part = logits_part(results, floor)
            rows.append(
                {
                    "pass": kind,
                    "chunk_tokens": chunk,
                    "ms": round(seconds * 1e3, 2),
                    "over_whole_percent": round((seconds / whole_s - 1) * 100, 2),
                    "recomputation_percent": round(recomputation(model, seq_length) * 100, 2)
                    if kind == "training" and chunk is not None
                    else 0.0,
                    "peak_mib": round(max(peaks)) if peaks else None,
                    "logits_mib": None if part is None else round(part),
                    "times_less": None if part is None or whole_mib is None else round(whole_mib / max(part, 1.0), 1),
                    "tokens": num_rows * seq_length,
                    "vocabulary": model["vocab_size"],
                    "temperature": temperature,
                }
            )
    worker.shutdown()
    return rows


def logits_part(results: Sequence[tuple[float, float | None]], floor: float | None) -> float | None:
    """Returns by how many MiB the highest peak exceeds that of the smallest chunk; None without a GPU."""
    peaks = [mib for _, mib in results if mib is not None]
    return max(peaks) - floor if peaks and floor is not None else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scale", choices=SCALES, default="1.5B")
    parser.add_argument("--chunks", type=int, nargs="+", default=[256, 512, 1024, 2048])
    parser.add_argument("--smallest", type=int, default=16, help="chunk whose peak counts as the peak without logits")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--out", type=Path, default=Path("build/logits.json"))
    args = parser.parse_args()
    rows = measure(args.scale, args.chunks, args.smallest, args.repeats, args.temperature)
    print_rows(rows)
    write_result(args.out, rows)


if __name__ == "__main__":
    main()
