"""How much faster, and in how much less memory, do context-parallel ranks train long rows?

    python benchmarks/context_parallel.py --tokens 131072 --ranks 1 2 --output build/context_parallel.json
    python benchmarks/context_parallel.py --tokens 8192 --ranks 1 2 --rows 2 --data-parallel --append
    python benchmarks/context_parallel.py --model tiny --tokens 64

A step is `worker.train` on padded rows of random tokens, as in long_rows.py: all parameters, random weights in bf16,
logits in chunks, optimizer state streamed from the host. Each number of ranks runs in processes of its own, one a GPU
(without GPUs over gloo); the file is written after each. With `--steps 1` the only step counts; with more, the first is
a warm-up, and seconds are medians of the slowest rank.

Columns: `tp`, `cp` and `dp`, between which `gpus` are divided; `tokens_per_s` of all ranks together; `peak_gib`:
torch's peak of allocated memory and the ranges beside it, of the fullest rank; `planned_gib`: the same by the plan;
`largest_difference`: the largest relative difference of a step's loss from the first row's of the same rows. With
`--profiled`, of one more step of rank 0: `collectives_s`, in which kernels of NCCL run, and `exposed_s`, in which no
other kernel does.
"""

import argparse
import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from long_rows import MODELS, WAYS
from long_rows import Case as LongRow
from ports import free_port
from result_file import TableValue, print_rows, write_result
from turns import run_children

Row = dict[str, TableValue]
Kernel = tuple[str, float, float]
"""(name, start, end) in seconds."""


@dataclasses.dataclass(frozen=True)
class Case:
    """Describes what a group of processes measures.

    Attributes:
        model: of `MODELS`.
        tokens: of each row.
        rows: of a step.
        way: of `WAYS`.
        cp: the context-parallel size.
        gpus: number of ranks; what context and tensor parallelism do not share is data-parallel.
        tp: the tensor-parallel size; above 1 with sequence parallelism.
    """

    model: str
    tokens: int
    rows: int
    way: str
    cp: int
    gpus: int
    tp: int = 1

    @property
    def dp(self) -> int:
        """Returns the data-parallel size."""
        return self.gpus // (self.cp * self.tp)


CASE = tuple(field.name for field in dataclasses.fields(Case))


def config_of(case: Case, *, has_gpus: bool) -> Any:
    """Returns the recipe of a case's ranks."""
    config = LongRow(case.model, case.tokens, case.way).config(has_gpus=has_gpus)
    policy: Any = config["policy"]
    policy["train_global_batch_size"] = case.rows
    policy["make_sequence_length_divisible_by"] = 2 * case.cp * case.tp
    policy["megatron_cfg"]["context_parallel_size"] = case.cp
    policy["megatron_cfg"] |= {"tensor_model_parallel_size": case.tp, "sequence_parallel": case.tp > 1}
    config["cluster"]["gpus_per_node"] = case.gpus
    return config


def child(case: Case, num_steps: int, rank: int, port: int, output: Path, *, profiled: bool) -> None:
    """Trains on one rank of a case, writes what it measured, and ends the process."""
    import torch

    from nemo_offload_rl.worker.environment import library_environment

    config = config_of(case, has_gpus=torch.cuda.is_available())
    os.environ |= library_environment(config["policy"]["megatron_cfg"], refit_follows=False)
    found = measure(case, config, num_steps, rank, port, profiled=profiled)
    output.write_text(json.dumps(found))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # at once, with all memory of the GPU and the host


def measure(case: Case, config: Any, num_steps: int, rank: int, port: int, *, profiled: bool) -> dict[str, Any]:
    """Returns the seconds and losses of each step, the peak of memory and what was planned of it, and the profile."""
    import torch
    from measuring import peak_gib, planned_gib, random_rows

    from nemo_offload_rl.algorithms.losses import NLLLoss
    from nemo_offload_rl.data.batch import BatchedData
    from nemo_offload_rl.hf_config import hf_config
    from nemo_offload_rl.placement.host import host_facts
    from nemo_offload_rl.plan.planner import worker_plan
    from nemo_offload_rl.worker.worker import MegatronPolicyWorker

    policy = config["policy"]
    planned = planned_gib("sft", config, host_facts())
    worker = MegatronPolicyWorker(
        policy,
        plan=worker_plan(policy, hf_config(policy).to_dict(), world_size=case.gpus),
        rank=rank,
        world_size=case.gpus,
        local_rank=rank,
        master_addr="localhost",
        master_port=port,
        seed=0,
        init_reference_model=False,
    )
    own = case.rows // case.dp  # ranks that share rows follow each other
    whole = random_rows(case.rows, case.tokens, policy["hf_config"]["vocab_size"])
    first = rank // (case.cp * case.tp) * own
    data = BatchedData({name: column[first : first + own] for name, column in whole.items()})
    worker.prepare_for_training()
    seconds, losses = [], []

    def step() -> None:
        torch.distributed.barrier()
        start = time.perf_counter()
        losses.append(worker.train(data, NLLLoss(), gbs=case.rows, mbs=1)["loss"])
        seconds.append(time.perf_counter() - start)

    for _ in range(num_steps):
        step()
    found = {"seconds": seconds[:], "losses": losses[:], "planned_gib": planned}
    found["peak_gib"] = peak_gib(worker, "train")
    if profiled and torch.cuda.is_available():
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            step()
        found["collectives"] = collectives([_kernel(event) for event in profile.events()])
    return found


def _kernel(event: Any) -> Kernel:
    return event.name, event.time_range.start / 1e6, event.time_range.end / 1e6


def collectives(kernels: Sequence[Kernel]) -> dict[str, float]:
    """Returns the seconds in which kernels of NCCL run, and those in which no other kernel runs beside them."""
    of_nccl = [kernel for kernel in kernels if "nccl" in kernel[0].lower()]
    others = [kernel for kernel in kernels if "nccl" not in kernel[0].lower() and not kernel[0].startswith("Mem")]
    return {"collectives_s": _covered(of_nccl), "exposed_s": _covered([*of_nccl, *others]) - _covered(others)}


def _covered(kernels: Sequence[Kernel]) -> float:
    """Returns the seconds in which at least one of the kernels runs."""
    total, covered_until = 0.0, float("-inf")
    for _, start, end in sorted(kernels, key=lambda kernel: kernel[1]):
        total += max(0.0, end - max(start, covered_until))
        covered_until = max(covered_until, end)
    return total


def in_own_processes(case: Case, num_steps: int, *, profiled: bool = False) -> list[dict[str, Any]]:
    """Returns what each rank of a case measured.

    Args:
        case: what is measured.
        num_steps: of several the first is a warm-up.
        profiled: whether rank 0 profiles one step more.

    Raises:
        RuntimeError: a rank ended with an error.
    """
    environment = {"NVTE_CPU_OFFLOAD_V1": "1", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    options = ["--child", json.dumps(dataclasses.asdict(case)), "--port", str(free_port()), "--steps", str(num_steps)]
    options += ["--profiled"] if profiled else []
    ranks = run_children(__file__, [[*options, "--rank", str(rank)] for rank in range(case.gpus)], environment)
    if any(statuses := [status for _, status in ranks]):
        raise RuntimeError(f"{case}: the ranks ended with the statuses {statuses}")
    return [found for found, _ in ranks]


def row_of(case: Case, ranks: Sequence[dict[str, Any]], wanted: Sequence[float] | None) -> Row:
    """Returns a row of the table.

    Args:
        case: what was measured.
        ranks: what each rank found.
        wanted: the losses of the case that it is compared with; None if it is the first.
    """
    seconds = [max(of_step) for of_step in zip(*(rank["seconds"] for rank in ranks), strict=True)]
    step_s = statistics.median(seconds[1:] or seconds)
    peaks = [rank["peak_gib"] for rank in ranks if rank["peak_gib"] is not None]
    losses = ranks[0]["losses"]
    return dataclasses.asdict(case) | {
        "dp": case.dp,
        "step_s": round(step_s, 3),
        "tokens_per_s": round(case.rows * case.tokens / step_s),
        "peak_gib": round(max(peaks), 3) if peaks else None,
        "planned_gib": round(ranks[0]["planned_gib"], 3),
        "largest_difference": None
        if wanted is None
        else max(abs(one - other) / abs(other) for one, other in zip(losses, wanted, strict=True)),
        "steps": len(seconds),
        **{name: round(value, 3) for name, value in ranks[0].get("collectives", {}).items()},
    }


def parsed_arguments() -> argparse.Namespace:
    """Returns the arguments of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="1.5b", choices=list(MODELS), help="whose sizes; weights are random")
    parser.add_argument("--tokens", type=int, default=131072, help="length of each row")
    parser.add_argument("--rows", type=int, default=1, help="of a step")
    parser.add_argument(
        "--ways", nargs="+", default=["ours_attention_kept"], choices=list(WAYS), help="of long_rows.py"
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="context-parallel sizes")
    parser.add_argument("--data-parallel", action="store_true", help="also as many ranks that share the rows instead")
    parser.add_argument("--steps", type=int, default=3, help="of several steps the first is not counted")
    parser.add_argument("--output", type=Path, default=Path("build/context_parallel.json"), help="the result file")
    parser.add_argument("--append", action="store_true", help="keep the file's rows of cases that are not measured now")
    parser.add_argument("--profiled", action="store_true", help="profile one more step of rank 0")
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """Measures every case, and writes the result after each; returns the exit status."""
    arguments = parsed_arguments()
    if arguments.child:
        case = Case(**arguments.child)
        child(case, arguments.steps, arguments.rank, arguments.port, arguments.output, profiled=arguments.profiled)
    layouts = [(size, size) for size in arguments.ranks]
    if arguments.data_parallel:
        layouts += [(1, size) for size in arguments.ranks if size > 1]
    rows: list[Row] = []
    for way in arguments.ways:
        wanted: list[float] | None = None
        for cp, gpus in layouts:
            case = Case(arguments.model, arguments.tokens, arguments.rows, way, cp, gpus)
            ranks = in_own_processes(case, arguments.steps, profiled=arguments.profiled)
            rows.append(row_of(case, ranks, wanted))
            wanted = wanted or ranks[0]["losses"]
            write_result(arguments.output, rows, append_by=CASE if arguments.append else ())
    print_rows(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
