"""How long does a refit take, by each transport: from the driver's call until the engine has loaded every weight?

Policy and engine share the GPU, as in a run; the policy has no optimizer. Each refit is repeated, and the first, in
which the export finds out what to convert, is not counted. `equal` says that checksums of what was sent and of what the
engine has were compared after the last one, by that transport.

    python benchmarks/refit.py --backend vllm --out docs/results/refit.json
    python benchmarks/refit.py --scale tiny

At `--scale tiny` tiny models are sent, also without a GPU.
"""

import argparse
import contextlib
import os
import statistics
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")  # before Ray is imported; else it builds a second venv

from model_shapes import QWEN2_1_5B, QWEN3_EXPERTS, TINY_SIZES
from result_file import TableValue, print_rows, write_result

from nemo_offload_rl import config
from nemo_offload_rl.generation import make_generation
from nemo_offload_rl.generation.interface import GenerationInterface
from nemo_offload_rl.memory.units import GIB
from nemo_offload_rl.placement.cluster import Cluster
from nemo_offload_rl.refit import make_transport
from nemo_offload_rl.refit.checksum import require_equal_checksums
from nemo_offload_rl.worker.group import PolicyWorkerGroup

RECIPE = Path(__file__).parent / "recipes" / "grpo_1_5B_random.yaml"
CASES: Mapping[str, Mapping[str, Any]] = {"1.5B": QWEN2_1_5B, "experts": QWEN3_EXPERTS}
SHARED_GPU = ["object_store", "cuda_ipc"]
"""The transports to an engine on the policy's GPU."""
_TINY_EXPERTS = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}


def main() -> None:
    """Measures every case and writes the result after each."""
    arguments = parse_arguments()
    rows: list[dict[str, TableValue]] = []
    for case in arguments.cases:
        for row in measure(case, arguments.backend, arguments.scale, arguments.transports, arguments.repeats):
            rows.append(row)
            write_result(arguments.out, rows)
    print_rows(rows)


def measure(
    case: str, backend: str, scale: str, transports: list[str], repeats: int
) -> Iterator[dict[str, TableValue]]:
    """Yields a row a transport."""
    import torch

    overrides = [
        f"policy.generation.backend={backend}",
        "policy.max_total_sequence_length=512",
        "policy.sequence_packing.enabled=false",
    ]
    loaded, _ = config.for_machine(config.load(RECIPE, overrides).config, has_gpus=torch.cuda.is_available())
    policy = dict(loaded["policy"]) | {"hf_config": hf_config(case, scale)}
    backend = policy["generation"]["backend"]  # without a GPU it is another
    with (
        Cluster(num_nodes=1, gpus_per_node=1) as cluster,
        stopped_at_the_end(make_generation(policy, cluster)) as generation,
        PolicyWorkerGroup(
            policy,
            cluster,
            seed=0,
            init_reference_model=False,
            init_optimizer=False,
            before_build=generation.wait_until_ready,
        ) as group,
    ):
        generation.prepare_for_generation(["weights"])
        for name in transports:
            plan = group.prepare_refit_info(make_transport(name, generation.receivers, verify=False))
            generation.prepare_refit_info(plan)
            seconds = [_seconds(group) for _ in range(1 + repeats)][1:]
            group.prepare_refit_info(make_transport(name, generation.receivers, verify=True))
            require_equal_checksums(group.send_weights(), generation.weights_checksum())
            median = statistics.median(seconds)
            yield {
                "case": case,
                "backend": backend,
                "transport": name,
                "buffers_gib": policy["refit_buffer_size_gb"],
                "tensors": len(plan.tensors),
                "gib": round(plan.num_bytes / GIB, 3),
                "refit_ms": round(median * 1e3, 1),
                "fastest_ms": round(min(seconds) * 1e3, 1),
                "gb_per_s": round(plan.num_bytes / median / 1e9, 2),
                "equal": True,
            }


def hf_config(case: str, scale: str) -> dict[str, Any]:
    """The model's sizes."""
    full = dict(CASES[case])
    if scale == "full":
        return full
    return full | TINY_SIZES | (_TINY_EXPERTS if "num_experts" in full else {})


@contextlib.contextmanager
def stopped_at_the_end(generation: GenerationInterface) -> Iterator[Any]:
    """Ends an engine's processes, as the group's and the cluster's own contexts do theirs."""
    try:
        yield generation
    finally:
        generation.shutdown()


def _seconds(group: PolicyWorkerGroup) -> float:
    start = time.perf_counter()
    group.send_weights()
    return time.perf_counter() - start


def parse_arguments() -> argparse.Namespace:
    """Returns the command line's."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--backend", default="vllm", choices=["vllm", "transformers"])
    parser.add_argument("--transports", nargs="+", default=SHARED_GPU, choices=SHARED_GPU)
    parser.add_argument("--scale", choices=["full", "tiny"], default="full", help="tiny for a try without a GPU")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path("build/refit.json"), help="the result file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
