"""One setting's run, in a process of its own: GRPO steps, greedy tokens, then the switch alone, or many cycles."""

import argparse
import dataclasses
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_watch import GpuWatch, WatchedTimer

from colocated_ways.cycles import WARM_UP, Cycles, Lengths
from colocated_ways.driver import watch_driver
from colocated_ways.holdings import Holdings, flatness
from colocated_ways.marks import FOLDER_VARIABLE, Mark, Marks, read_marks
from colocated_ways.planned import planned_gib
from colocated_ways.settings import OURS, UPSTREAM, built_as
from colocated_ways.switches import Switch, median_seconds, names_of_spans, switches
from colocated_ways.timeline import Span, median_switch, timelines
from nemo_offload_rl import config
from nemo_offload_rl.algorithms import grpo
from nemo_offload_rl.metrics.utilization import TFLOPS_PREFIX, UTILIZATION_PREFIX
from nemo_offload_rl.placement.cluster import Cluster
from nemo_offload_rl.run.gpu_sizes import fitted_to_gpus
from nemo_offload_rl.run.resident_state import smallest_gpu_bytes
from nemo_offload_rl.run.setup import with_run_length

BENCHMARKS = Path(__file__).parents[1]
RECIPES = {
    "full": BENCHMARKS / "recipes" / "grpo_1_5B_random.yaml",
    "tiny": BENCHMARKS.parent / "examples" / "configs" / "grpo_tiny_cpu.yaml",
}
_REWARD = ("env.arithmetic.reward=python", "+env.arithmetic.reward_function=colocated_ways.rewards:by_number")
OVERRIDES: Mapping[str, Sequence[str]] = {
    "full": [
        *_REWARD,
        "policy.generation.max_new_tokens=160",
        "policy.sequence_packing.train_mb_tokens=16384",
        "policy.sequence_packing.logprob_mb_tokens=16384",
        "policy.refit_buffer_size_gb=4",  # one bucket of all weights
    ],
    # With log-probs and a reference policy, as the other has them.
    "tiny": [
        *_REWARD,
        "grpo.num_prompts_per_step=8",
        "grpo.num_generations_per_prompt=4",
        "policy.train_micro_batch_size=8",
        "policy.logprob_batch_size=16",
        "loss_fn.reference_policy_kl_penalty=0.01",
        "loss_fn.force_on_policy_ratio=false",
        "grpo.val_at_start=false",
        "grpo.val_at_end=false",
    ],
}
_DETERMINISTIC_TOKENS = 2048
"""Of a packed row in training: cuDNN's deterministic kernel for packed sequences asks for memory that grows with the
square of their number, 768 GiB for the 98 of 16,384 tokens."""
START_VARIABLE = "COLOCATED_START"
"""Environment variable with the moment of the command, by the machine's monotonic clock."""
WHOLE_STEP = "whole step"
_GREEDY = Lengths(num_prompts=32, prompt_tokens=8, new_tokens=64, row_tokens=0)


@dataclass
class Measured:
    """What one setting gave.

    Attributes:
        figures: (metric, value, unit).
        losses: of each GRPO step, then of the training of each switch.
        grad_norms: of the same.
        greedy_ids: tokens after the last of them, a list a prompt.
        num_gpus: of the policy, or ranks without a GPU.
        timelines: fields of the spans of one switch, by direction.
    """

    figures: list[tuple[str, float, str]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    greedy_ids: list[list[int]] = field(default_factory=list)
    num_gpus: int = 1
    timelines: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def add(self, metric: str, value: float | None, unit: str) -> None:
        """Add a figure, if there is one."""
        if value is not None:
            self.figures.append((metric, value, unit))

    def spans(self) -> dict[str, list[Span]]:
        """Returns the timelines."""
        return {direction: [Span(**fields) for fields in spans] for direction, spans in self.timelines.items()}


def run_setting(setting: str, arguments: argparse.Namespace) -> Measured:
    """Builds a run in a setting and measures it."""
    recipe: Any = config.load(arguments.config or RECIPES[arguments.scale], overrides(setting, arguments)).config
    marks = Marks("driver")
    measured = Measured()
    preparation = grpo.prepare(recipe)
    with GpuWatch() as watch:
        with marks.span("ray"):
            cluster = Cluster(num_nodes=1, gpus_per_node=recipe["cluster"]["gpus_per_node"])
        with cluster:
            measured.num_gpus = cluster.world_size
            recipe, _ = config.for_machine(recipe, has_gpus=cluster.has_gpus)
            gpu_bytes = smallest_gpu_bytes(cluster)
            recipe, notes = fitted_to_gpus(recipe, "grpo", gpu_bytes)
            print(*notes, sep="\n")
            with built_as(setting):
                algorithm: Any = preparation.build(with_run_length(recipe["policy"], arguments.steps), cluster)
            watch_driver(algorithm, marks)
            try:
                cycles = make_cycles(algorithm, recipe["policy"])
                if arguments.cycles:
                    measured.figures += many_cycles(cycles, arguments.cycles)
                else:
                    run_steps(algorithm, arguments.steps, watch, measured, setting)
                    switch_start_s = time.monotonic()
                    switch_alone(cycles, recipe["policy"], arguments.switches, measured)
                    measured.greedy_ids = cycles.greedy(fitting(_GREEDY, recipe["policy"])).output_ids
                    if setting == OURS and gpu_bytes is not None:
                        for phase, gib in planned_gib(recipe, gpu_bytes).items():
                            measured.add(f"{phase}: planned GPU memory", gib, "GiB")
            finally:
                algorithm.shutdown()
    if not arguments.cycles:
        found = read_marks(Path(os.environ[FOLDER_VARIABLE]))
        # The first compiles and allocates.
        counted = switches(found, switch_start_s)[1:]
        measured.figures += list(figures_of_marks(found, float(os.environ[START_VARIABLE]), counted))
        if counted:
            for direction, spans in timelines(found, median_switch(counted)).items():
                measured.timelines[direction] = [dataclasses.asdict(span) for span in spans]
    return measured


def overrides(setting: str, arguments: argparse.Namespace) -> list[str]:
    """Those of the scale and the setting, then the command line's."""
    of_scale = [] if arguments.config is not None else OVERRIDES[arguments.scale]
    eager = str(arguments.enforce_eager).lower()
    if arguments.deterministic and arguments.scale == "full":
        of_scale = [*of_scale, f"policy.sequence_packing.train_mb_tokens={_DETERMINISTIC_TOKENS}"]
    fixed = [f"policy.generation.backend={arguments.backend}", f"policy.generation.vllm_cfg.enforce_eager={eager}"]
    if setting == UPSTREAM:  # NeMo-RL moves it whether there is room or not, and has vLLM sleep
        fixed += ["policy.offload_optimizer_for_refit=true", "++policy.residency.generation_weights=discard"]
    return [*of_scale, *fixed, *arguments.overrides]


def make_cycles(algorithm: Any, policy: Mapping[str, Any]) -> Cycles:
    """Cycles of what is built."""
    return Cycles(
        algorithm, vocab_size=policy["hf_config"]["vocab_size"], max_tokens=policy["max_total_sequence_length"]
    )


def fitting(lengths: Lengths, policy: Mapping[str, Any]) -> Lengths:
    """The same lengths where sequences may be that long, else shorter ones."""
    most = policy["max_total_sequence_length"]
    prompt = min(lengths.prompt_tokens, most // 2)
    new, row = min(lengths.new_tokens, most - prompt), min(lengths.row_tokens, most)
    return dataclasses.replace(lengths, prompt_tokens=prompt, new_tokens=new, row_tokens=row)


def run_steps(algorithm: Any, num_steps: int, watch: GpuWatch, measured: Measured, setting: str) -> None:
    """GRPO steps, of which the first is not counted in seconds and memory."""
    seconds: list[Mapping[str, float]] = []
    metrics: list[Mapping[str, float]] = []
    peaks_gib: dict[str, float] = {}
    for step in range(1, num_steps + 1):
        timer = WatchedTimer(watch, peaks_gib if step > 1 else {})
        with timer.phase(WHOLE_STEP):
            of_step = algorithm.step(step, timer)
        print(f"{setting}, step {step} of {num_steps}: {timer.seconds()[WHOLE_STEP]:.2f} s", flush=True)
        measured.losses.append(of_step["train/loss"])
        measured.grad_norms.append(of_step["train/grad_norm"])
        if step > 1:
            seconds.append(timer.seconds())
            metrics.append(of_step)
    for phase in dict.fromkeys(name for step in seconds for name in step):
        measured.add(f"{phase}", statistics.median(step[phase] for step in seconds if phase in step), "s")
    for phase, gib in peaks_gib.items():
        measured.add(f"{phase}: peak GPU memory", gib, "GiB")
    for name in metrics[-1]:
        if name.startswith((TFLOPS_PREFIX, UTILIZATION_PREFIX)):
            unit = "TFLOP/s" if name.startswith(TFLOPS_PREFIX) else "share of the peak"
            measured.add(name.removeprefix("performance/"), statistics.median(step[name] for step in metrics), unit)
    for name in ("train/num_tokens", "train/token_mult_prob_error"):
        measured.add(name, statistics.median(step[name] for step in metrics), "tokens" if "num" in name else "")


def switch_alone(cycles: Cycles, policy: Mapping[str, Any], num: int, measured: Measured) -> None:
    """Cycles of one length, which is short, as only what is between generation and training counts."""
    lengths = fitting(Lengths(num_prompts=64, prompt_tokens=8, new_tokens=16, row_tokens=64), policy)
    request, batch = cycles.prepare(lengths)
    for _ in range(num + 1):
        result = cycles.run(request, batch)
        measured.losses.append(result["loss"])
        measured.grad_norms.append(result["grad_norm"])
    of_last_refit = cycles.policy.residency_metrics()
    for name in ("refit/graphs", "refit/send_s", "refit/export_s", "refit/load_s"):
        measured.add(f"{name} of the last switch", of_last_refit.get(name), "s" if name.endswith("_s") else "")


def many_cycles(cycles: Cycles, num: int) -> list[tuple[str, float, str]]:
    """Cycles of varying lengths; what the processes hold while the engine sleeps, of each that counts."""
    holdings = Holdings(cycles)
    readings: list[dict[str, float]] = []
    for number in range(num + WARM_UP):
        lengths = cycles.varying(number)

        def read(counts: bool = number >= WARM_UP) -> None:
            if counts:
                readings.append(holdings.read())

        cycles.run(*cycles.prepare_short(lengths), while_asleep=read)
        cycles.policy.residency_metrics()
        if number % 20 == 0:
            print(f"cycle {number}: {lengths}", flush=True)
    return flatness(readings)


def figures_of_marks(
    marks: Sequence[Mark], start_s: float, counted: Sequence[Switch]
) -> Iterator[tuple[str, float, str]]:
    """Figures of refit, sleep, switch and start-up.

    Args:
        marks: of all processes, the earliest first.
        start_s: when the command was given.
        counted: the switches that count.
    """
    first_step_end_s = next(mark.at_s for mark in marks if mark.name == "last_optimizer_kernel")
    spans = ("refit", "sleep", *names_of_spans(marks, "wake_up"))
    medians = {name: median_seconds(marks, name, first_step_end_s) for name in spans}
    known = {name: seconds for name, seconds in medians.items() if seconds is not None}
    for name, seconds in known.items():
        yield f"{name}, by itself", seconds, "s"
    sleep_and_wake_s = sum(known.values()) - known.get("refit", 0.0)
    yield "sleep and wake_up, by themselves", sleep_and_wake_s, "s"
    if counted:
        yield "switch to training", statistics.median(one.to_training_s for one in counted), "s"
        yield "switch to generation", statistics.median(one.to_generation_s for one in counted), "s"
        both_s = statistics.median(one.both_s for one in counted)
        yield "switch both ways", both_s, "s"
        yield "switch both ways, less sleep and wake_up", both_s - sleep_and_wake_s, "s"
    for name in ("ray", "vllm_import", "vllm_build", *names_of_spans(marks, "policy_build")):
        if (seconds := median_seconds(marks, name)) is not None:
            yield f"start-up: {name} takes", seconds, "s"
    for name in ("ray", "engine_built", "policy_build", "first_token"):
        ends = [mark.at_s for mark in marks if mark.name == name]
        if ends:
            yield f"start-up: from the command to the end of {name}", min(ends) - start_s, "s"
