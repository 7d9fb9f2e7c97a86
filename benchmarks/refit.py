"""How long does a refit take in each way, from the driver's call until the engine has loaded every weight?

Policy and engine share the GPU, as in a run; the policy has no optimizer, and vLLM generates without CUDA graphs. Each
refit is repeated. The first is not counted, because in it the export finds out what to convert and graphs are recorded.
`export_ms` and `load_ms` are parts of `send_ms` on the rank alone, and overlap. `equal` says whether the checksums of
the weights sent and of the engine's weights agreed after the last refit of that way.

    python benchmarks/refit.py --cases 1.5B --out docs/results/refit.json
    python benchmarks/refit.py --scale tiny

| way | what it is |
|---|---|
| `object_store` | through host memory |
| `streamed` | through GPU memory, driven from Python |
| `replayed_loads` | the export driven from Python, the engine's loads replayed from CUDA graphs |
| `graphs` | both replayed; where `replayed` is false, the log says why the export could not be |
| `broadcast` | with `--apart`, to an engine on a GPU of its own: two GPUs, over NCCL |

`--tensor-parallel 2` splits policy and engine over two GPUs; times are then those of the slower rank. `--scale tiny`
sends tiny models, also without a GPU.
"""

import argparse
import contextlib
import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from nemo_offload_rl.refit.broadcast import BroadcastTransport
from nemo_offload_rl.refit.checksum import require_equal_checksums
from nemo_offload_rl.refit.cuda_ipc import CudaIpcTransport
from nemo_offload_rl.refit.interface import Receiver, RefitSender, RefitTransport
from nemo_offload_rl.refit.object_store import ObjectStoreTransport
from nemo_offload_rl.refit.plan import ExportPlan
from nemo_offload_rl.worker.group import PolicyWorkerGroup

RECIPE = Path(__file__).parent / "recipes" / "grpo_1_5B_random.yaml"
CASES: Mapping[str, Mapping[str, Any]] = {"1.5B": QWEN2_1_5B, "experts": QWEN3_EXPERTS}
Receivers = Sequence[Receiver]
WAYS: Mapping[str, Callable[[Receivers, bool], RefitTransport]] = {
    "object_store": lambda receivers, verify: ObjectStoreTransport(receivers, verify),
    "streamed": lambda receivers, verify: CudaIpcTransport(receivers, verify, graphs=False),
    "replayed_loads": lambda receivers, verify: CudaIpcTransport(receivers, verify, record_export=False),
    "graphs": lambda receivers, verify: CudaIpcTransport(receivers, verify, graphs=True, min_gain_s=-math.inf),
}
"""How weights go to an engine on the policy's GPU; by its receivers and whether it verifies."""
APART: Mapping[str, Callable[[Receivers, bool], RefitTransport]] = {
    "broadcast": lambda receivers, verify: BroadcastTransport(receivers, verify)
}
"""The same, to an engine on a GPU of its own."""
_APART_KEYS = (
    "cluster.gpus_per_node=2",
    "policy.generation.colocated.enabled=false",
    "policy.generation.colocated.resources.gpus_per_node=1",
)
_TENSOR_PARALLEL_KEYS = (
    "cluster.gpus_per_node={}",
    "policy.megatron_cfg.tensor_model_parallel_size={}",
    "policy.generation.vllm_cfg.tensor_parallel_size={}",
)
_TINY_EXPERTS = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}


@dataclass(frozen=True)
class Sized:
    """Wraps a transport so that its buckets have another size than the recipe's (see `RefitTransport`)."""

    transport: RefitTransport
    buffers_gib: float

    def connect(self, plan: ExportPlan, *, rank: int, bucket_bytes: int) -> RefitSender:
        """Creates a rank's sender."""
        return self.transport.connect(plan, rank=rank, bucket_bytes=int(self.buffers_gib * GIB))


def main() -> None:
    """Measures every case and writes the result after each."""
    arguments = parse_arguments()
    rows: list[dict[str, TableValue]] = []
    for case in arguments.cases:
        for row in measure(case, arguments):
            rows.append(row)
            write_result(arguments.out, rows)
    print_rows(rows)


def measure(case: str, arguments: argparse.Namespace) -> Iterator[dict[str, TableValue]]:
    """Yields a row for each way and buffer size."""
    import torch

    largest = max(arguments.buffers_gib)
    overrides = [
        f"policy.generation.backend={arguments.backend}",
        f"policy.refit_buffer_size_gb={largest}",
        "policy.generation.vllm_cfg.enforce_eager=true",  # starts without compiling, and loads weights in the same way
        "policy.max_total_sequence_length=512",
        "policy.sequence_packing.enabled=false",
        "++policy.generation.vllm_cfg.build_beside_policy=false",  # which a run decides for its machine
        *(_APART_KEYS if arguments.apart else (key.format(arguments.tensor_parallel) for key in _TENSOR_PARALLEL_KEYS)),
    ]
    ways = APART if arguments.apart else {name: WAYS[name] for name in arguments.ways}
    num_engine_devices = 1 if arguments.apart else 0
    num_devices = arguments.tensor_parallel + num_engine_devices
    start = time.perf_counter()
    loaded, _ = config.for_machine(config.load(RECIPE, overrides).config, has_gpus=torch.cuda.is_available())
    policy: Any = dict(loaded["policy"]) | {"hf_config": hf_config(case, arguments.scale)}
    backend = policy["generation"]["backend"]  # without a GPU it is another
    with (
        Cluster(num_nodes=1, gpus_per_node=num_devices, num_engine_devices=num_engine_devices) as cluster,
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
        print(f"{case}: the engine is there after {time.perf_counter() - start:.0f} s", flush=True)
        group.memory_stats()  # of ranks that are built
        print(f"{case}: the policy is built after {time.perf_counter() - start:.0f} s", flush=True)
        generation.prepare_for_generation(["weights"])
        for way, buffers_gib in itertools.product(ways, arguments.buffers_gib):
            make, receivers = ways[way], generation.receivers
            plan = group.prepare_refit_info(Sized(make(receivers, False), buffers_gib))
            generation.prepare_refit_info(plan)
            refits = [_refit(group) for _ in range(1 + arguments.repeats)][1:]
            kept = generation.memory_stats().get("refit_graph_pool_gib", 0.0)
            verified = arguments.tensor_parallel == 1  # an engine with tensor parallelism has parts of the weights
            if verified:
                group.prepare_refit_info(Sized(make(receivers, True), buffers_gib))
                require_equal_checksums(group.send_weights(), generation.weights_checksum())
            seconds = statistics.median(refit["seconds"] for refit in refits)
            yield {
                "case": case,
                "backend": backend,
                "way": way,
                "buffers_gib": buffers_gib,
                "tensors": len(plan.tensors),
                "gib": round(plan.num_bytes / GIB, 3),
                "refit_ms": round(seconds * 1e3, 1),
                "fastest_ms": round(min(refit["seconds"] for refit in refits) * 1e3, 1),
                **{f"{name}_ms": _median_ms(refits, f"refit/{name}_s") for name in ("send", "export", "load")},
                "gb_per_s": round(plan.num_bytes / seconds / 1e9, 2),
                "replayed": all(refit.get("refit/graphs") == 1 for refit in refits),
                "policy_pool_gib": round(refits[-1].get("refit/graph_pool_gib", 0.0), 3),
                "engine_pool_gib": round(kept, 3),
                "equal": True if verified else None,
            }


def hf_config(case: str, scale: str) -> dict[str, Any]:
    """Returns the model's sizes."""
    full = dict(CASES[case])
    if scale == "full":
        return full
    return full | TINY_SIZES | (_TINY_EXPERTS if "num_experts" in full else {})


@contextlib.contextmanager
def stopped_at_the_end(generation: GenerationInterface) -> Iterator[Any]:
    """Ends an engine's processes, as the contexts of the group and the cluster end theirs."""
    try:
        yield generation
    finally:
        generation.shutdown()


def _refit(group: PolicyWorkerGroup) -> dict[str, float]:
    """Refits once and returns `seconds` as the driver sees them, and the metrics of the rank."""
    start = time.perf_counter()
    group.send_weights()
    seconds = time.perf_counter() - start
    return {"seconds": seconds, **group.residency_metrics()}


def _median_ms(refits: list[dict[str, float]], name: str) -> float | None:
    """Returns the median of a metric, which not every transport has."""
    if name not in refits[0]:
        return None
    return round(statistics.median(refit[name] for refit in refits) * 1e3, 2)


def parse_arguments() -> argparse.Namespace:
    """Returns the arguments of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--backend", default="vllm", choices=["vllm", "transformers"])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--apart", action="store_true", help="put the engine on its own GPU; refit by broadcast")
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="N", help="of the policy and of the engine")
    parser.add_argument("--buffers-gib", nargs="+", type=float, default=[1.0], help="GiB of buckets in flight")
    parser.add_argument("--scale", choices=["full", "tiny"], default="full", help="tiny for a trial without a GPU")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path("build/refit.json"), help="the result file")
    arguments = parser.parse_args()
    if arguments.apart and arguments.tensor_parallel > 1:
        parser.error("--apart has one GPU for the policy, so leave --tensor-parallel out")
    return arguments


if __name__ == "__main__":
    main()
