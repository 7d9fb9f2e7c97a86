"""How long a row does one GPU train, in which way, and is a step as fast as its kernels?

    python benchmarks/long_rows.py --model 1.5b --tokens 131072 --steps 2 --output build/long_rows.json
    python benchmarks/long_rows.py --model 8b --tokens 131072 --ways segments2 --grpo --append
    python benchmarks/long_rows.py --model tiny --tokens 64

A step is `worker.train` on one padded row of random tokens: all parameters, random weights in bf16, logits in chunks,
optimizer state streamed from the host. Each way runs in a process of its own; one that runs
out of memory on the GPU or the host is a row with `fits` false and the reason in `why`, and the others go on. The file
is written after each, so that a run that is stopped leaves what it has measured; `--append` keeps other cases' rows.

With `--steps 1` the only step counts, with its page faults and compilations; with more, the first is a warm-up, and
seconds are medians. Columns:

- `peak_gib`: torch's peak of allocated memory, and the ranges beside it; `reserved_gib`: the peak of what torch's
  allocator held in the last step, without the ranges; `driver_peak_gib`: all that the driver has given out, CUDA
  context and fragments included, asked every 10 ms; `planned_gib`: state, activations and logits by the functions
  behind `nemo-offload-rl plan`, without context and margin.
- `kernels_s`: a step's attention and matrix products, timed alone in the same process: as many forward passes as the
  way has, and one backward pass. The rest of `step_s` are norms, activations, the loss, the optimizer and waits.
- `exposed_s`: how long the compute stream waited for copies of activations, `optimizer_exposed_s` for those of
  optimizer state. `host_gib`: page-locked for both. `mfu`: of the model's FLOPs, without recomputation.
- With `--grpo` log-prob passes come before the step: `logprob_s` (with `logprob_peak_gib`), and `reference_s` except
  for 8b, whose host has no room for reference weights.
"""

import argparse
import dataclasses
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from model_shapes import QWEN2_1_5B, QWEN3_8B, TINY_SIZES
from result_file import TableValue, print_rows, write_result
from turns import in_turn, my_turn, run_children

from nemo_offload_rl.config import load
from nemo_offload_rl.config.validate import for_machine

Row = dict[str, TableValue]
_RECIPES = Path(__file__).parents[1] / "examples" / "configs"
MODELS: Mapping[str, Mapping[str, Any]] = {
    "1.5b": QWEN2_1_5B,
    "8b": QWEN3_8B | {"dtype": "bfloat16"},  # in float32 its weights would be made on the CPU, which takes minutes
    "tiny": QWEN2_1_5B | TINY_SIZES,
}
_MEGATRON = "policy.megatron_cfg"


@dataclass(frozen=True)
class Way:
    """Describes what a step keeps of the forward pass, where, and what it computes again.

    Attributes:
        modules: `offload_modules`; empty where activations stay on the GPU.
        segment: layers that are recomputed from one input; 0 where none is recomputed.
        tiles: whether MLPs are computed in tiles.
    """

    modules: tuple[str, ...] = ()
    segment: int = 1
    tiles: bool = True

    @property
    def overrides(self) -> list[str]:
        """Returns what makes a recipe train in this way."""
        again = [
            f"{_MEGATRON}.activation_checkpointing=true",
            f"++{_MEGATRON}.recompute_method=uniform",
            f"++{_MEGATRON}.recompute_num_layers={self.segment}",
        ]
        moved = [
            f"{_MEGATRON}.fine_grained_activation_offloading=true",
            f"{_MEGATRON}.offload_modules=[{','.join(self.modules)}]",
        ]
        tiles = f"{_MEGATRON}.mlp_tile_tokens={'auto' if self.tiles else 'null'}"
        return [*(again if self.segment else ()), *(moved if self.modules else ()), tiles]

    @property
    def layer_passes(self) -> float:
        """Returns the forward passes of a layer in a step: a segment's last layer runs twice, the others thrice."""
        if not self.segment:
            return 1.0
        return 2 + (self.segment - 1) / self.segment if "layer_input" in self.modules else 2.0

    @property
    def attention_passes(self) -> float:
        """Returns the forward passes of a layer's attention in a step."""
        return 1.0 if "core_attn" in self.modules else self.layer_passes


WAYS: Mapping[str, Way] = {
    "ours_attention_kept": Way(("layer_input", "core_attn")),
    "ours": Way(("layer_input",)),
    "segments2": Way(("layer_input",), segment=2),
    "segments4": Way(("layer_input",), segment=4),
    "recompute": Way(tiles=False),
    "modules": Way(("qkv_linear", "core_attn", "attn_proj"), segment=0, tiles=False),
}


@dataclass(frozen=True)
class Case:
    """Describes what a process measures.

    Attributes:
        model: of `MODELS`.
        tokens: of the only row of a step.
        way: of `WAYS`.
        algorithm: sft for training alone, grpo with log-prob passes before it.
    """

    model: str
    tokens: int
    way: str
    algorithm: str = "sft"

    def config(self, *, has_gpus: bool) -> Any:
        """Returns the recipe for a machine with GPUs or without; all state but the optimizer's stays on the GPU."""
        overrides = [
            f"policy.max_total_sequence_length={self.tokens}",
            "policy.train_global_batch_size=1",
            "policy.train_micro_batch_size=1",
            "policy.sequence_packing.enabled=false",
            "++policy.residency.table={train: {optimizer_state: streamed}, generate: {params: keep}}",
            "policy.offload_optimizer_for_refit=false",
            f"{_MEGATRON}.scheduler.lr_decay_iters=1000",
            f"{_MEGATRON}.use_fused_linear_logprobs=true",
            *WAYS[self.way].overrides,
        ]
        if self.algorithm == "grpo" and self.model == "8b":  # reference weights would take another 15 GiB of the host
            overrides.append("loss_fn.reference_policy_kl_penalty=0")
        recipe = {"sft": "sft.yaml", "grpo": "grpo_math_1B_megatron.yaml"}[self.algorithm]
        config, _ = for_machine(dict(load(_RECIPES / recipe, overrides).config), has_gpus=has_gpus)
        return config | {"policy": config["policy"] | {"hf_config": dict(MODELS[self.model])}}


CASE = tuple(field.name for field in dataclasses.fields(Case))
COLUMNS = (
    "fits", "peak_gib", "reserved_gib", "driver_peak_gib", "planned_gib", "step_s", "kernels_s", "mfu", "exposed_s",
    "optimizer_exposed_s", "host_gib", "logprob_s", "reference_s", "logprob_peak_gib", "steps", "why",
)  # fmt: skip
_OUT_OF_MEMORY = ("out of memory", "alloc_failed")
"""What libraries beside torch say: cuBLAS and cuDNN."""


def row_of(case: Case, run: Callable[[], Row]) -> Row:
    """Returns what `run` measured, with every column; a failure is a row that does not fit, and says why."""
    try:
        found: Row = {"fits": True, **run()}
    except (RuntimeError, ValueError, MemoryError) as error:
        if not _is_memory(error):
            traceback.print_exc()
        found = {"fits": False, "why": f"{type(error).__name__}: {str(error).splitlines()[0]}"[:300]}
    return dataclasses.asdict(case) | dict.fromkeys(COLUMNS) | found


def _is_memory(error: Exception) -> bool:
    from nemo_offload_rl.plan.host_budget import HostBudgetError

    says = str(error).lower()
    return isinstance(error, MemoryError | HostBudgetError) or any(word in says for word in _OUT_OF_MEMORY)


def child(case: Case, num_steps: int, output: Path) -> None:
    """Measures in this process when it is its turn, and ends it."""
    with my_turn():
        import torch
        from long_row_steps import measure

        from nemo_offload_rl.worker.environment import library_environment

        def run() -> Row:
            config = case.config(has_gpus=torch.cuda.is_available())
            os.environ |= library_environment(config["policy"]["megatron_cfg"], refit_follows=False)
            return measure(case, config, num_steps)

        output.write_text(json.dumps(row_of(case, run)))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # before the next one's turn, with all memory of the GPU and the host, whatever still refers to it


def in_own_process(case: Case, num_steps: int, *, expandable: bool) -> Row:
    """Returns the row that a process measured; one that was killed has run out of the host's memory."""
    # As a rank's environment has it, since Transformer Engine reads it on import.
    environment = {"NVTE_CPU_OFFLOAD_V1": "1", "PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:{expandable}"}
    options = ["--child", json.dumps(dataclasses.asdict(case)), "--steps", str(num_steps)]
    [(found, status)] = run_children(__file__, [options], environment)
    if found is not None:
        row: Row = found
        return row
    why = f"its process ended with status {status}"
    return dataclasses.asdict(case) | dict.fromkeys(COLUMNS) | {"fits": False, "why": why}


def parsed_arguments() -> argparse.Namespace:
    """Returns the arguments of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="1.5b", choices=list(MODELS), help="whose sizes; weights are random")
    parser.add_argument("--tokens", type=int, nargs="+", default=[131072], help="lengths of the row")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS), help="some of the ways")
    parser.add_argument("--steps", type=int, default=2, help="of several steps the first is not counted")
    parser.add_argument("--grpo", action="store_true", help="log-prob passes and a step of GRPO, instead of SFT's")
    parser.add_argument(
        "--expandable-segments",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="let torch's allocator grow its segments: fewer fragments",
    )
    parser.add_argument("--output", type=Path, default=Path("build/long_rows.json"), help="the result file")
    parser.add_argument("--append", action="store_true", help="keep the file's rows of cases that are not measured now")
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error(f"--steps is a number of steps, 1 or more; found {arguments.steps}")
    return arguments


def main() -> int:
    """Measures every case, writes the result after each, and prints ratios; returns the exit status."""
    arguments = parsed_arguments()
    if arguments.child:
        child(Case(**arguments.child), arguments.steps, arguments.output)
    algorithm = "grpo" if arguments.grpo else "sft"
    cases = [Case(arguments.model, tokens, way, algorithm) for tokens in arguments.tokens for way in arguments.ways]
    run = partial(in_own_process, num_steps=arguments.steps, expandable=arguments.expandable_segments)
    rows: list[Row] = []
    for rows in in_turn(run, cases):
        write_result(arguments.output, rows, append_by=CASE if arguments.append else ())
    print_rows([{name: value for name, value in row.items() if name != "why"} for row in rows])
    for row in rows:
        if not row["fits"]:
            print(f"{row['tokens']} {row['way']} does not fit: {row['why']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
