"""Is what `nemo-offload-rl plan --fit` chooses as fast as the best setting by hand?

    python benchmarks/fit_choice.py --output docs/results/fit_choice.json
    python benchmarks/fit_choice.py --cases 8b-8192 --settings 'kept, chunks, streamed' --rounds 2
    python benchmarks/fit_choice.py --cases tiny

A case is SFT of a model with random weights on packed rows, on a GPU of which the plan may use a part. The overrides
that `--fit` chooses are measured, and the settings by hand that fit by the plan and have a chance of being the fastest:
predictions are within 15%, so one that is predicted 1.35 times as long as the shortest has none. `--most` measures the
first of these, `--settings` those of that name. Seconds are those of `worker.train` on the samples of two of the
recipe's rows, the median of steps after two. With `--rounds`, settings take turns, each in a new worker.

Rows: `case`, `gpu_gib`, `setting` (`fit` is the choice), its `overrides`, `planned_s`, `measured_s`, the median of
`rounds`, their `spread` (largest over smallest), and `of_best`: measured seconds over those of the fastest setting by
hand of the case.
"""

import argparse
import gc
import itertools
import math
import statistics
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from measuring import random_rows
from model_shapes import QWEN2_1_5B, QWEN3_8B, TINY_SIZES
from one_rank import one_rank_worker
from plan_accuracy import ATTENTION, RECOMPUTED, STREAMED, offloaded, timed
from result_file import TableValue, print_rows, write_result

from nemo_offload_rl.algorithms.losses import NLLLoss
from nemo_offload_rl.config import load
from nemo_offload_rl.config.algorithms import ALGORITHMS
from nemo_offload_rl.config.validate import for_machine
from nemo_offload_rl.hf_config import hf_config
from nemo_offload_rl.memory.units import GIB
from nemo_offload_rl.placement.host import host_facts
from nemo_offload_rl.placement.machine import rates_here
from nemo_offload_rl.plan.activations import activation_facts
from nemo_offload_rl.plan.fit import cheapest_fit, missing_gpu_bytes
from nemo_offload_rl.plan.optimizer_ways import optimizer_wait_s
from nemo_offload_rl.plan.planner import Planner
from nemo_offload_rl.plan.step_time import optimizer_seconds, read_flop_model, training_seconds

RECIPE = Path(__file__).parents[1] / "examples" / "configs" / "sft.yaml"
SAMPLES_OF_ROW, ROWS = 4, 2
_MEGATRON = "policy.megatron_cfg"
_ACTIVATIONS: Mapping[str, Sequence[str]] = {
    "kept": (),
    "recomputed": RECOMPUTED,
    "core_attn recomputed": (*RECOMPUTED, f"++{_MEGATRON}.recompute_granularity=selective"),
    "mlp recomputed": (
        *RECOMPUTED,
        f"++{_MEGATRON}.recompute_granularity=selective",
        f"++{_MEGATRON}.recompute_modules=[mlp]",
    ),
    "attention offloaded": offloaded(*ATTENTION),
    "half of it": offloaded(*ATTENTION, fraction=0.5),
    "layer_input": (*RECOMPUTED, *offloaded("layer_input")),
    "mlp in tiles": (f"{_MEGATRON}.mlp_tile_tokens=auto",),
}
_STATE: Mapping[str, Sequence[str]] = {"": (), ", streamed": STREAMED}
_LOGITS: Mapping[str, Sequence[str]] = {"": (), ", chunks": (f"{_MEGATRON}.use_fused_linear_logprobs=true",)}
_ROWS: Mapping[str, int] = {"": 1, ", half rows": 2, ", quarter rows": 4}
_CHANCE = 1.35
"""Of the shortest prediction: 1.15 / 0.85."""


def by_hand(tokens: int) -> dict[str, Sequence[str]]:
    """Returns overrides by name, for rows of that many tokens."""
    rows = {
        name: () if parts == 1 else (f"++policy.sequence_packing.train_mb_tokens={tokens // parts}",)
        for name, parts in _ROWS.items()
    }
    choices = itertools.product(_ACTIVATIONS.items(), _LOGITS.items(), _STATE.items(), rows.items())
    return {"".join(name for name, _ in choice): [o for _, own in choice for o in own] for choice in choices}


@dataclass(frozen=True)
class Case:
    """Describes what is trained, and on how much of the GPU.

    Attributes:
        model: its sizes.
        tokens: of the recipe's packed rows.
        gpu_gib: memory that the plan may use.
    """

    model: Mapping[str, Any]
    tokens: int
    gpu_gib: float

    def config(self, overrides: Sequence[str]) -> Any:
        """Returns the recipe with overrides.

        Raises:
            ValueError: they do not go together.
        """
        fixed = [
            f"policy.max_total_sequence_length={self.tokens // SAMPLES_OF_ROW}",
            f"policy.train_global_batch_size={SAMPLES_OF_ROW * ROWS}",
            "policy.train_micro_batch_size=1",
            "policy.sequence_packing.enabled=true",
            f"policy.sequence_packing.train_mb_tokens={self.tokens}",
            f"{_MEGATRON}.scheduler.lr_decay_iters=1000",
        ]
        config, _ = for_machine(dict(load(RECIPE, [*fixed, *overrides]).config), has_gpus=torch.cuda.is_available())
        return config | {"policy": config["policy"] | {"hf_config": dict(self.model) | {"dtype": "bfloat16"}}}


CASES: Mapping[str, Case] = {
    "1.5b-8192": Case(QWEN2_1_5B, 8_192, 40),
    "1.5b-32768": Case(QWEN2_1_5B, 32_768, 60),
    "8b-8192": Case(QWEN3_8B, 8_192, 100),
    "8b-32768": Case(QWEN3_8B, 32_768, 79.6),
    "tiny": Case(QWEN2_1_5B | TINY_SIZES | {"vocab_size": 512}, 256, 8),
}
"""By name; the last one is for a trial without a GPU, and runs only if it is named."""


def settings_of(case: Case) -> dict[str, tuple[Sequence[str], float]]:
    """Returns overrides and predicted seconds of the choice, `fit`, then of settings by hand, the shortest first."""
    fields, rates = hf_config(case.config(())["policy"]).to_dict(), rates_here()
    planner = Planner(fields, "sft", int(case.gpu_gib * GIB), [host_facts()], rates=rates)
    fit = cheapest_fit(case.config, planner)
    assert fit.fits, fit
    found: dict[str, tuple[Sequence[str], float]] = {}
    for name, overrides in by_hand(case.tokens).items():
        config = case.config(overrides)
        run = planner.plan(config)
        assert run is not None
        if missing_gpu_bytes(config, run, planner) > 0:
            continue
        [rank] = run.plan.ranks
        stages = activation_facts(fields, config["policy"], world_size=1, group_size=1)
        seconds = training_seconds(
            read_flop_model(fields, config["policy"]), config, ALGORITHMS["sft"], stages, run.plan.activations, rates
        )
        wait_s = optimizer_wait_s(rank, rates.link_bytes_per_s, rates.cpu_params_per_s)
        found[name] = overrides, seconds + optimizer_seconds(rank, wait_s, rates)
    shortest = min((seconds for _, seconds in found.values()), default=math.inf)
    near = {name: of for name, of in found.items() if of[1] <= _CHANCE * shortest}
    print(f"{len(found)} settings by hand fit, {len(near)} have a chance", flush=True)
    return {"fit": (fit.overrides, fit.seconds)} | dict(sorted(near.items(), key=lambda of: of[1][1]))


def measured_s(case: Case, overrides: Sequence[str]) -> float:
    """Returns the seconds of a training step."""
    policy = case.config(overrides)["policy"]
    samples, length = SAMPLES_OF_ROW * ROWS, case.tokens // SAMPLES_OF_ROW
    data = random_rows(samples, length, policy["hf_config"]["vocab_size"])
    worker = one_rank_worker(policy)
    try:
        worker.prepare_for_training()
        seconds, _ = timed(lambda: worker.train(data, NLLLoss(), gbs=samples, mbs=1), worker, 0)
    finally:
        worker.shutdown()
    return seconds


def main() -> int:
    """Measures every case, and writes the result after each setting; returns 1 if one failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[name for name in CASES if name != "tiny"])
    parser.add_argument(
        "--most", type=int, default=12, help="settings by hand of a case, the shortest predictions first"
    )
    parser.add_argument("--settings", nargs="+", default=[], help="names of settings by hand, instead of --most")
    parser.add_argument("--rounds", type=int, default=1, help="times that each setting is measured, in turn")
    parser.add_argument("--output", type=Path, default=Path("build/fit_choice.json"), help="the result file")
    arguments = parser.parse_args()
    rows: list[dict[str, TableValue]] = []
    failed = 0
    for name in arguments.cases:
        case, measured = CASES[name], dict[str, list[float]]()
        settings = settings_of(case)
        wanted = ["fit", *arguments.settings] if arguments.settings else [*settings][: 1 + arguments.most]
        of_case: dict[str, dict[str, TableValue]] = {}
        for setting in wanted * arguments.rounds:
            overrides, planned_s = settings[setting]
            try:
                times = [*measured.get(setting, ()), measured_s(case, overrides)]
            except Exception:  # noqa: BLE001 - the other settings are worth the GPU's time
                traceback.print_exc()
                failed += 1
            else:
                measured[setting] = times
                of_case[setting] = {
                    "case": name,
                    "gpu_gib": case.gpu_gib,
                    "setting": setting,
                    "overrides": " ".join(overrides),
                    "planned_s": round(planned_s, 3),
                    "measured_s": round(statistics.median(times), 3),
                    "rounds": len(times),
                    "spread": round(max(times) / min(times), 3),
                }
                write_result(arguments.output, with_ratios([*rows, *of_case.values()]), append_by=("case", "setting"))
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        rows += of_case.values()
    print_rows([{name: value for name, value in row.items() if name != "overrides"} for row in with_ratios(rows)])
    return int(failed > 0)


def with_ratios(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, TableValue]]:
    """Adds `of_best` to rows of cases of which a setting by hand has been measured."""
    best: dict[str, float] = {}
    for row in rows:
        if row["setting"] != "fit":
            best[row["case"]] = min(row["measured_s"], best.get(row["case"], math.inf))
    return [
        {**row, "of_best": round(row["measured_s"] / best[row["case"]], 3) if row["case"] in best else None}
        for row in rows
    ]


if __name__ == "__main__":
    sys.exit(main())
