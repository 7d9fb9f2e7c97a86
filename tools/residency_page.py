"""Writes the table of sizes in docs/plan.md, from the planner and the configs of public models.

python tools/residency_page.py          writes the table
python tools/residency_page.py check    exits 1 where it is out of date
"""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from model_shapes import LLAMA_70B, QWEN2_1_5B, QWEN2_7B, QWEN3_30B_A3B

from nemo_offload_rl.config import load
from nemo_offload_rl.memory.units import GIB
from nemo_offload_rl.plan.planner import plan_run
from nemo_offload_rl.residency.table import Target

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "plan.md"
RECIPE = ROOT / "examples" / "configs" / "grpo_math_1B_megatron.yaml"
BEGIN, END = "<!-- sizes: written by tools/residency_page.py -->\n", "<!-- end of sizes -->"
GPUS_PER_NODE = 8


class Layout(NamedTuple):
    """A model on so many GPUs, and how it is split over them."""

    model: str
    hf_config: Mapping[str, Any]
    num_gpus: int
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1


LAYOUTS = (
    Layout("Qwen2.5-1.5B", QWEN2_1_5B, 1),
    Layout("Qwen2.5-1.5B", QWEN2_1_5B, 8),
    Layout("Qwen2.5-7B", QWEN2_7B, 8),
    Layout("Qwen2.5-7B", QWEN2_7B, 8, tensor=4),
    Layout("Qwen3-30B-A3B", QWEN3_30B_A3B, 8, expert=8),
    Layout("Qwen3-30B-A3B", QWEN3_30B_A3B, 32, pipeline=2, expert=8),
    Layout("Llama-3-70B", LLAMA_70B, 16, tensor=8),
    Layout("Llama-3-70B", LLAMA_70B, 64, tensor=8),
    Layout("Llama-3-70B", LLAMA_70B, 64, tensor=4, pipeline=4),
)
HEADER = (
    "| model | GPUs | TP | PP | EP | DP | params | grads | optimizer state | reference | host memory, a rank "
    "| host memory, a node | link, s a step |\n" + "|---" * 13 + "|\n"
)


def table() -> str:
    """The table, a row a layout."""
    return HEADER + "".join(f"| {' | '.join(_cells(layout))} |\n" for layout in LAYOUTS)


def _cells(layout: Layout) -> Iterator[str]:
    per_node = min(layout.num_gpus, GPUS_PER_NODE)
    cfg = "policy.megatron_cfg"
    overrides = [
        f"cluster.gpus_per_node={per_node}",
        f"cluster.num_nodes={layout.num_gpus // per_node}",
        f"{cfg}.tensor_model_parallel_size={layout.tensor}",
        f"{cfg}.pipeline_model_parallel_size={layout.pipeline}",
        f"{cfg}.expert_model_parallel_size={layout.expert}",
    ]
    run = plan_run(load(RECIPE, overrides).config, layout.hf_config, algorithm="grpo")
    rank = run.plan.largest_rank
    node = max(sum(need.total_bytes for need in run.needs if need.host == host) for host in {n.host for n in run.needs})
    data = layout.num_gpus // (layout.tensor * layout.pipeline)
    yield from (layout.model, *map(str, (layout.num_gpus, layout.tensor, layout.pipeline, layout.expert, data)))
    yield from (f"{rank.target_bytes[target] / GIB:.1f}" for target in Target)
    yield from (f"{sum(rank.host_bytes.values()) / GIB:.1f}", f"{node / GIB:.0f}")
    yield f"{sum(change.seconds for change in rank.transitions):.2f}"


def page() -> str:
    """The page with the table as it should be."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def main() -> int:
    if sys.argv[1:] == ["check"]:
        if PAGE.read_text(encoding="utf-8") == page():
            return 0
        print(f"{PAGE.name} is out of date: run python tools/residency_page.py")
        return 1
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
