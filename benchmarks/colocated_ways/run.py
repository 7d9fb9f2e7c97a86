"""Runs one setting in its own process: GRPO steps, greedy tokens, then the switch alone, or many cycles."""

import argparse
import dataclasses
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu_watch import GpuWatch

from colocated_ways.cycles import WARM_UP, Cycles, Lengths
from colocated_ways.driver import watch_driver
from colocated_ways.figures import Driver, figures_of_marks, figures_of_policy
from colocated_ways.holdings import Holdings, flatness
from colocated_ways.marks import FOLDER_VARIABLE, Marks, read_marks
from colocated_ways.measured import Figure, Measured
from colocated_ways.planned import planned_gib
from colocated_ways.settings import OURS, UPSTREAM, built_as
from colocated_ways.steps import run_steps
from colocated_ways.switches import switches
from colocated_ways.timeline import median_switch, timelines
from nemo_offload_rl import config
from nemo_offload_rl.algorithms import grpo
from nemo_offload_rl.placement.cluster import Cluster
from nemo_offload_rl.run.preflight import machine_of, resolve_for
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
_SLEEP_KEY = "policy.residency.generation_weights"
_GREEDY = Lengths(num_prompts=32, prompt_tokens=8, new_tokens=64, row_tokens=0)


def run_setting(setting: str, arguments: argparse.Namespace) -> Measured:
    """Builds a run in a setting and measures it.

    Raises:
        ValueError: the recipe is refused, or it keeps an engine awake that is to sleep here.
        WorkerError, GenerationError: a rank or an engine has failed.
    """
    start_s, imported_s = float(os.environ[START_VARIABLE]), time.monotonic()
    marks = Marks("driver")
    marks.note(Driver.IMPORTS, imported_s, imported_s - start_s)
    with marks.span(Driver.READ_RECIPE):
        file = arguments.config or RECIPES[arguments.scale]
        recipe: Any = config.load(file, overrides(setting, arguments)).config
    measured = Measured()
    with marks.span(Driver.PREPARATION):
        preparation = grpo.prepare(recipe)
    with GpuWatch() as watch:
        with marks.span(Driver.RAY):
            cluster = Cluster(num_nodes=1, gpus_per_node=recipe["cluster"]["gpus_per_node"])
        with cluster:
            measured.num_gpus = cluster.world_size
            with marks.span(Driver.SIZES):
                machine = machine_of(cluster)
                resolved = resolve_for(machine, recipe, "grpo")
                recipe = resolved.config
            print(*resolved.lines, sep="\n")
            check_engine_sleeps(recipe["policy"], setting, arguments)
            measured.figures += figures_of_policy(recipe["policy"])
            marks.note(Driver.BUILD)
            with built_as(setting, arguments.backend):
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
                    if setting != UPSTREAM and machine.gpu_bytes is not None:
                        for phase, gib in planned_gib(resolved, machine.gpu_bytes).items():
                            measured.add(f"{phase}: planned GPU memory", gib, "GiB")
                    for verb, gib in resolved.peaks_gib.items():
                        measured.add(f"{verb}: planned for the policy", gib, "GiB")
            finally:
                algorithm.shutdown()
    if not arguments.cycles:
        found = read_marks(Path(os.environ[FOLDER_VARIABLE]))
        # The first compiles and allocates.
        counted = switches(found, switch_start_s)[1:]
        measured.figures += figures_of_marks(found, start_s, counted)
        if counted:
            for direction, spans in timelines(found, median_switch(counted)).items():
                measured.timelines[direction] = [dataclasses.asdict(span) for span in spans]
    return measured


def overrides(setting: str, arguments: argparse.Namespace) -> list[str]:
    """Returns the overrides of the scale and the setting, then those of the command line."""
    of_scale = [] if arguments.config is not None else OVERRIDES[arguments.scale]
    eager = str(arguments.enforce_eager).lower()
    if arguments.deterministic and arguments.scale == "full":
        of_scale = [*of_scale, f"policy.sequence_packing.train_mb_tokens={_DETERMINISTIC_TOKENS}"]
    fixed = [f"policy.generation.backend={arguments.backend}", f"policy.generation.vllm_cfg.enforce_eager={eager}"]
    if setting == UPSTREAM:  # NeMo-RL moves it whether there is room or not
        fixed += ["policy.offload_optimizer_for_refit=true", "policy.megatron_cfg.empty_unused_memory_level=1"]
    if arguments.backend == "vllm" and engine_has_to_sleep(setting, arguments):  # transformers has no choice
        fixed.append(f"++{_SLEEP_KEY}=discard")
    return [*of_scale, *fixed, *arguments.overrides]


def engine_has_to_sleep(setting: str, arguments: argparse.Namespace) -> bool:
    """Returns whether the setting or the cycles need a sleeping engine; cycles read what it holds asleep."""
    return setting != OURS or bool(arguments.cycles)


def check_engine_sleeps(policy: Mapping[str, Any], setting: str, arguments: argparse.Namespace) -> None:
    """Refuses an override that keeps vLLM awake where it has to sleep.

    Args:
        policy: the section of the resolved recipe.
        setting: one of `SETTINGS`.
        arguments: of the command line.

    Raises:
        ValueError: it stays awake.
    """
    if engine_has_to_sleep(setting, arguments) and policy["residency"]["generation_weights"] == "gpu":
        asks = "--cycles asks for" if arguments.cycles else f"the setting {setting} is"
        raise ValueError(f"{_SLEEP_KEY} is gpu, but {asks} a run whose engine sleeps; leave that override out.")


def make_cycles(algorithm: Any, policy: Mapping[str, Any]) -> Cycles:
    """Creates cycles from the parts that are built."""
    return Cycles(
        algorithm, vocab_size=policy["hf_config"]["vocab_size"], max_tokens=policy["max_total_sequence_length"]
    )


def fitting(lengths: Lengths, policy: Mapping[str, Any]) -> Lengths:
    """Returns the same lengths if sequences may be that long, otherwise shorter ones."""
    most = policy["max_total_sequence_length"]
    prompt = min(lengths.prompt_tokens, most // 2)
    new, row = min(lengths.new_tokens, most - prompt), min(lengths.row_tokens, most)
    return dataclasses.replace(lengths, prompt_tokens=prompt, new_tokens=new, row_tokens=row)


def switch_alone(cycles: Cycles, policy: Mapping[str, Any], num: int, measured: Measured) -> None:
    """Runs cycles of one short length, because only the time between generation and training counts."""
    lengths = fitting(Lengths(num_prompts=64, prompt_tokens=8, new_tokens=16, row_tokens=64), policy)
    request, batch = cycles.prepare(lengths)
    for _ in range(num + 1):
        result = cycles.run(request, batch)
        measured.losses.append(result["loss"])
        measured.grad_norms.append(result["grad_norm"])
    of_last_refit = cycles.policy.residency_metrics()
    for name in ("refit/graphs", "refit/send_s", "refit/export_s", "refit/load_s"):
        measured.add(f"{name} of the last switch", of_last_refit.get(name), "s" if name.endswith("_s") else "")


def many_cycles(cycles: Cycles, num: int) -> list[Figure]:
    """Runs cycles of varying lengths and checks whether the processes' holdings grow.

    Holdings are read while the engine sleeps, in every other cycle. No state comes back in these cycles, since it would
    show in the reading; in the others the policy's state comes back during the release, as in a GRPO step.
    """
    holdings = Holdings(cycles)
    readings: list[dict[str, float]] = []

    def read() -> None:
        readings.append(holdings.read())

    for number in range(num + WARM_UP):
        lengths = cycles.varying(number)
        cycles.run(*cycles.prepare_short(lengths), while_asleep=read if number % 2 == 0 else None)
        cycles.policy.residency_metrics()
        if number % 20 == 0:
            print(f"cycle {number}: {lengths}", flush=True)
    return flatness(readings[-(-WARM_UP // 2) :])
