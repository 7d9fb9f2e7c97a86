"""How near are planned GPU memory and seconds to those of `worker.train` and a log-prob pass?

    python benchmarks/plan_accuracy.py --calibrate --output docs/results/plan_accuracy.json
    python benchmarks/plan_accuracy.py --cases qwen2-0.5b-padded --itemise 25

Each case is a model of its family's sizes with random weights, on one GPU: log-prob passes, then training steps of two
micro-batches; the first ones warm up, and seconds are the median of the others. Peaks are torch's, with the ranges
beside it; the process's own memory (context, NCCL), which the plan counts apart, is left out.

Rows: `case`, `phase` (logprob, train), `planned_gib`, `measured_gib`, `planned_s`, `measured_s`, and of both their
ratios. Seconds are planned from the result's `rates`: those that `nemo-offload-rl doctor --calibrate` kept on this
machine, which --calibrate runs first, else assumed ones. With --itemise the memory at the peak of the last pass and
step is printed by the code that allocated it.
"""

import argparse
import gc
import statistics
import subprocess
import sys
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from measuring import peak_gib, random_rows, timed_call
from model_shapes import LLAMA_1B, QWEN2_0_5B, QWEN2_1_5B, QWEN3_0_6B, QWEN3_8B, QWEN3_EXPERTS, TINY_SIZES
from one_rank import one_rank_worker
from result_file import TableValue, print_rows, write_result

from nemo_offload_rl.algorithms.losses import ClippedPGLoss
from nemo_offload_rl.config import load
from nemo_offload_rl.config.algorithms import ALGORITHMS
from nemo_offload_rl.config.validate import for_machine
from nemo_offload_rl.hf_config import hf_config
from nemo_offload_rl.memory.units import GIB
from nemo_offload_rl.placement.machine import rates_here
from nemo_offload_rl.placement.rates import H200_RATES, Rates
from nemo_offload_rl.plan.activations import activation_facts
from nemo_offload_rl.plan.optimizer_ways import optimizer_wait_s
from nemo_offload_rl.plan.planner import Planner
from nemo_offload_rl.plan.row_tokens import logprob_bytes, training_bytes
from nemo_offload_rl.plan.step_time import logprob_seconds, optimizer_seconds, read_flop_model, training_seconds
from nemo_offload_rl.residency.table import Phase
from nemo_offload_rl.run.setup import fields_from
from nemo_offload_rl.worker.worker import MegatronPolicyWorker

RECIPE = Path(__file__).parents[1] / "examples" / "configs" / "grpo_math_1B_megatron.yaml"
NUM_MICROBATCHES = 2
_WARM_UP, _MOST_TIMES, _ENOUGH_S = 2, 4, 12.0
_MEGATRON = "policy.megatron_cfg"
_SEQUENCES_OF_ROW = 4
_DIGITS = 3
# Frames of these files only pass a tensor on.
_NOT_THE_CAUSE = ("/torch/", "<", "contextlib.py", "functools.py")

_QWEN3_1_7B = QWEN3_0_6B | {"hidden_size": 2048, "intermediate_size": 6144}
_QWEN3_4B = QWEN3_0_6B | {
    "hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32, "intermediate_size": 9728
}  # fmt: skip
_EXPERTS = QWEN3_EXPERTS | {"num_experts": 64, "num_hidden_layers": 4}
_MISTRAL = LLAMA_1B | {"model_type": "mistral", "vocab_size": 32_768}

STREAMED = ("++policy.residency.table.train.optimizer_state=streamed",)
RECOMPUTED = (f"{_MEGATRON}.activation_checkpointing=true",)
IN_CHUNKS = (f"{_MEGATRON}.use_fused_linear_logprobs=true", "policy.logprob_chunk_size=1024")
CPU_OPTIMIZER = (
    f"{_MEGATRON}.optimizer.optimizer_cpu_offload=true",
    f"{_MEGATRON}.optimizer.optimizer_offload_fraction=1",
)
LONG = (
    *RECOMPUTED,
    f"++{_MEGATRON}.recompute_method=uniform",
    f"++{_MEGATRON}.recompute_num_layers=1",
    f"{_MEGATRON}.mlp_tile_tokens=auto",
    *IN_CHUNKS,
    *STREAMED,
)


def offloaded(*modules: str, fraction: float = 1.0) -> tuple[str, ...]:
    """Returns overrides that offload what modules save."""
    return (
        f"{_MEGATRON}.fine_grained_activation_offloading=true",
        f"{_MEGATRON}.offload_modules=[{','.join(modules)}]",
        f"++{_MEGATRON}.activation_offload_fraction={fraction}",
    )


ATTENTION = ("qkv_linear", "core_attn", "attn_proj")


@dataclass(frozen=True)
class Case:
    """Describes what is measured.

    Attributes:
        model: the sizes of a model.
        tokens: of a micro-batch.
        sequences: of it; a packed row's have a quarter of its tokens each, unless it is a single one.
        packed: whether they are packed into a row.
        overrides: further ones of the recipe.
    """

    model: Mapping[str, Any]
    tokens: int
    sequences: int = _SEQUENCES_OF_ROW
    packed: bool = True
    overrides: Sequence[str] = ()

    def config(self, *, has_gpus: bool) -> Any:
        """Returns the recipe for a machine with GPUs or without."""
        length = self.tokens // self.sequences
        overrides = [
            f"policy.max_total_sequence_length={length}",
            f"policy.train_global_batch_size={NUM_MICROBATCHES * self.sequences}",
            "grpo.num_prompts_per_step=1",
            f"grpo.num_generations_per_prompt={NUM_MICROBATCHES * self.sequences}",
            f"policy.train_micro_batch_size={1 if self.packed else self.sequences}",
            f"policy.sequence_packing.enabled={str(self.packed).lower()}",
            f"policy.sequence_packing.train_mb_tokens={self.tokens}",
            f"policy.sequence_packing.logprob_mb_tokens={self.tokens}",
            "policy.generation.max_new_tokens=1",
            # Nothing moves for a refit, whose copies the seconds of the next step would hold.
            *(f"++policy.residency.table.{phase}.optimizer_state=keep" for phase in ("refit", "generate")),
            "loss_fn.reference_policy_kl_penalty=0",
            f"{_MEGATRON}.scheduler.lr_decay_iters=1000",
            *self.overrides,
        ]
        config, _ = for_machine(dict(load(RECIPE, overrides).config), has_gpus=has_gpus)
        model = dict(self.model) | {"max_position_embeddings": max(32_768, length), "dtype": "bfloat16"}
        return config | {"policy": config["policy"] | {"hf_config": model}}


CASES: Mapping[str, Case] = {
    "qwen2-0.5b-padded": Case(QWEN2_0_5B, 16_384, packed=False),
    "qwen2-0.5b-packed": Case(QWEN2_0_5B, 16_384),
    "qwen2-1.5b": Case(QWEN2_1_5B, 8_192),
    "qwen2-1.5b-recomputed": Case(QWEN2_1_5B, 16_384, overrides=RECOMPUTED),
    "qwen2-1.5b-attention-offloaded": Case(QWEN2_1_5B, 16_384, overrides=offloaded(*ATTENTION)),
    "qwen2-1.5b-half-offloaded": Case(QWEN2_1_5B, 16_384, overrides=offloaded(*ATTENTION, fraction=0.5)),
    "qwen2-1.5b-cpu-optimizer": Case(QWEN2_1_5B, 2_048, sequences=1, overrides=CPU_OPTIMIZER),
    "qwen2-1.5b-layer-input": Case(QWEN2_1_5B, 65_536, sequences=1, overrides=(*LONG, *offloaded("layer_input"))),
    "qwen3-0.6b-attention-offloaded": Case(QWEN3_0_6B, 32_768, overrides=offloaded(*ATTENTION)),
    "qwen3-1.7b": Case(_QWEN3_1_7B, 8_192),
    "qwen3-4b-recomputed-streamed": Case(_QWEN3_4B, 16_384, overrides=(*RECOMPUTED, *STREAMED)),
    "qwen3-8b-recomputed-streamed": Case(QWEN3_8B, 8_192, overrides=(*RECOMPUTED, *STREAMED)),
    "llama-1b-chunks": Case(LLAMA_1B, 24_576, overrides=IN_CHUNKS),
    "llama-1b-padded": Case(LLAMA_1B, 16_384, sequences=8, packed=False),
    "mistral-1b": Case(_MISTRAL, 16_384),
    "experts": Case(_EXPERTS, 8_192),
    "experts-recomputed": Case(_EXPERTS, 16_384, overrides=RECOMPUTED),
    "tiny": Case(QWEN2_1_5B | TINY_SIZES | {"vocab_size": 512}, 256),
}
"""By name; the last one is for a trial without a GPU, and runs only if it is named."""


def measure(case: Case, rates: Rates, itemise: int) -> list[dict[str, TableValue]]:
    """Runs a case in this process; returns a row a phase.

    Args:
        case: what is run.
        rates: those of this machine.
        itemise: the number of places whose memory at the peak is printed; 0 for none.
    """
    has_gpu = torch.cuda.is_available()
    config = case.config(has_gpus=has_gpu)
    policy = config["policy"]
    planned = planned_phases(config, rates)
    loss = ClippedPGLoss(**fields_from(ClippedPGLoss, config["loss_fn"]))
    worker = one_rank_worker(policy)
    try:
        data = random_rows(
            NUM_MICROBATCHES * case.sequences, case.tokens // case.sequences, policy["hf_config"]["vocab_size"]
        )
        seconds, peaks = {}, {}
        rows = policy["logprob_batch_size"] if not case.packed else 1
        places = itemise if has_gpu else 0
        seconds[Phase.LOGPROB], answer = timed(lambda: worker.get_logprobs(data, mbs=rows), worker, places)
        data["prev_logprobs"] = data["generation_logprobs"] = answer["logprobs"]
        data["advantages"] = torch.ones(data["input_ids"].shape)
        peaks[Phase.LOGPROB] = peak_gib(worker, "logprobs")
        worker.prepare_for_training()
        samples, micro_batch = len(data["input_ids"]), policy["train_micro_batch_size"]
        seconds[Phase.TRAIN], _ = timed(lambda: worker.train(data, loss, gbs=samples, mbs=micro_batch), worker, places)
        peaks[Phase.TRAIN] = peak_gib(worker, "train")
    finally:
        worker.shutdown()
    out: list[dict[str, TableValue]] = []
    for phase, (gib, planned_s) in planned.items():
        measured, taken = peaks[phase], seconds[phase]
        out.append(
            {
                "phase": phase.value,
                "planned_gib": round(gib, _DIGITS),
                "measured_gib": None if measured is None else round(measured, _DIGITS),
                "gib_ratio": None if not measured else round(gib / measured, _DIGITS),
                "planned_s": round(planned_s, _DIGITS),
                "measured_s": round(taken, _DIGITS),
                "s_ratio": round(planned_s / taken, _DIGITS),
            }
        )
    return out


def timed[Result](call: Callable[[], Result], worker: MegatronPolicyWorker, places: int) -> tuple[float, Result]:
    """Calls often enough to time it; returns the median of the seconds after warming up, and the last result.

    Args:
        call: a phase's work.
        worker: does it.
        places: the number of places whose memory at the last call's peak is printed; 0 for none.
    """
    for _ in range(_WARM_UP):
        call()
    times: list[float] = []
    while not times or (len(times) < _MOST_TIMES and sum(times) < _ENOUGH_S):
        taken, result = timed_call(call)
        times.append(taken)
    if places:
        print(", ".join(f"{name} {gib:.3f}" for name, gib in worker.memory_stats().items() if "gpu" in name))
        with itemised(places):
            result = call()
    return statistics.median(times), result


def planned_phases(config: Any, rates: Rates = H200_RATES) -> dict[Phase, tuple[float, float]]:
    """Returns the planned GiB, without a margin and without the process's own memory, and seconds of each phase."""
    fields, spec = hf_config(config["policy"]).to_dict(), ALGORITHMS["grpo"]
    planner = Planner(fields, "grpo", gpu_bytes=None, rates=rates)
    run = planner.plan(config)
    assert run is not None
    [rank], [training], [forward] = run.plan.ranks, training_bytes(config, planner), logprob_bytes(config, planner)
    state = sum(rank.gpu_bytes[Phase.TRAIN].values())
    flops, policy = read_flop_model(fields, config["policy"]), config["policy"]
    stages = activation_facts(fields, policy, world_size=1, group_size=spec.group_size)
    train_s = training_seconds(flops, config, spec, stages, run.plan.activations, rates)
    wait_s = optimizer_wait_s(rank, rates.link_bytes_per_s, rates.cpu_params_per_s)
    train_s += optimizer_seconds(rank, wait_s, rates)
    return {
        Phase.LOGPROB: ((rank.logprob_state_bytes + forward) / GIB, logprob_seconds(flops, config, spec, rates)),
        Phase.TRAIN: ((state + max(training, rank.step_grad_bytes)) / GIB, train_s),
    }


@contextmanager
def itemised(most: int) -> Iterator[None]:
    """Prints, by allocating code, torch's memory at its peak inside the block, most first."""
    before = torch.cuda.memory_allocated()
    torch.cuda.memory._record_memory_history(stacks="python", max_entries=2_000_000)
    try:
        yield
        snapshot = torch.cuda.memory._snapshot()
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    print(f"allocated before: {before / GIB:.2f} GiB")
    for place, nbytes in at_peak(snapshot["device_traces"][torch.cuda.current_device()])[:most]:
        print(f"{nbytes / GIB:8.3f} GiB  {place}")


def at_peak(events: Sequence[Mapping[str, Any]]) -> list[tuple[str, int]]:
    """Returns the bytes that were allocated in a trace and alive at its peak, by the code that allocated them."""
    alive: dict[int, Mapping[str, Any]] = {}
    total = most = 0
    best: list[Mapping[str, Any]] = []
    peak_position = -1
    # Twice: the first pass finds where the peak is, the second what is alive there.
    for number, event in enumerate(events):
        if event["action"] == "alloc":
            total += event["size"]
        elif event["action"] == "free_completed":
            total -= event["size"]
        if total > most:
            most, peak_position = total, number
    for position, event in enumerate(events):
        if event["action"] == "alloc":
            alive[event["addr"]] = event
        elif event["action"] == "free_completed":
            alive.pop(event["addr"], None)
        if position == peak_position:
            best = list(alive.values())
            break
    places: dict[str, int] = defaultdict(int)
    for event in best:
        places[_place(event.get("frames", ()))] += event["size"]
    return sorted(places.items(), key=lambda place: -place[1])


def _place(frames: Sequence[Mapping[str, Any]]) -> str:
    """Returns the innermost lines of code outside torch, at most three."""
    own = [frame for frame in frames if not any(part in frame["filename"] for part in _NOT_THE_CAUSE)]
    lines = [f"{'/'.join(frame['filename'].split('/')[-2:])}:{frame['line']} {frame['name']}" for frame in own[:3]]
    return " < ".join(lines) or "(no Python frame: autograd)"


def main() -> int:
    """Runs the cases, writes the result after each, and prints the rows; returns 1 if one failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[name for name in CASES if name != "tiny"])
    parser.add_argument("--itemise", type=int, default=0, metavar="PLACES", help="print what is allocated at the peak")
    parser.add_argument("--output", type=Path, default=Path("build/plan_accuracy.json"), help="the result file")
    parser.add_argument("--calibrate", action="store_true", help="measure the rates of this GPU and its host first")
    arguments = parser.parse_args()
    if arguments.calibrate:  # in a process of its own, whose memory no peak counts
        subprocess.run([sys.executable, "-m", "nemo_offload_rl.cli", "doctor", "--calibrate"], check=True)
    rates = rates_here()
    rows: list[dict[str, TableValue]] = []
    failed = 0
    for name in arguments.cases:
        try:
            found = measure(CASES[name], rates, arguments.itemise)
        except Exception:  # noqa: BLE001 - the other cases are worth the GPU's time
            traceback.print_exc()
            failed += 1
            continue
        rows += [{"case": name, **row} for row in found]
        print_rows(rows[-len(found) :])
        write_result(arguments.output, rows, append_by=("case", "phase"), rates=rates.as_fields())
        gc.collect()  # what refers to itself in a case's worker, such as its experts, would be in the next one's peaks
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    print_rows(rows)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
