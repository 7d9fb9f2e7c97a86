"""Reads which metrics docs/metrics.md documents."""

import re
from collections.abc import Iterable
from pathlib import Path

from nemo_offload_rl.residency.table import Target

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def undocumented(names: Iterable[str]) -> list[str]:
    """Returns metrics of which neither the name nor its last part is on the page."""
    on_page = set(re.findall(r"`([^`\n]+)`", PAGE.read_text()))
    return [name for name in names if not {_as_on_page(name), _as_on_page(name).rpartition("/")[2]} & on_page]


def _as_on_page(name: str) -> str:
    name = re.sub(r"^timing/train/(?!total)\w+$", "timing/train/PHASE", name)
    name = re.sub(r"^performance/(tflops_per_gpu|model_flop_utilization)/\w+$", r"performance/\1/PHASE", name)
    name = re.sub(r"^residency/\w+/\w+/", "residency/PHASE/TARGET/", name)
    name = re.sub(r"^residency/(?!PHASE)\w+/", "residency/PHASE/", name)
    name = re.sub(rf"left_({'|'.join(Target)})_gib$", "left_TARGET_gib", name)
    return re.sub(r"_after_gib$", "_before_gib", name)  # the page has "..._after_gib" beside it
