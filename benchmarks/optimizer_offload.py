"""How close to the link's limit does optimizer state move off the GPU and back, and what do other ways reach?

python benchmarks/optimizer_offload.py --out docs/results/optimizer_offload.json [--cases soak] [--scale 0.01]

One run takes about three minutes on an H200 and reports medians of round trips in which memory is really given back and
taken again: the way out ends when the driver has the memory, the way back when the GPU may read the data.
torch_memory_saver is skipped where it is not installed. Without a GPU, at a scale such as 0.01, tensors move between
two places in host memory. The benchmark rewrites the table of the page beside the JSON file; the page's prose is
written by hand.
"""

import argparse
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from offload_ways import cases, steady
from offload_ways.cases import Setting
from offload_ways.report import Report, markdown, verdicts
from offload_ways.trips import release_unused

CASES: Mapping[str, Callable[[Setting], None]] = {
    "tensors_198": cases.tensors_198,
    "tensors_10000": cases.tensors_10000,
    "setup": steady.setup,  # right before the state: torch's block of 18 GB, slow to pin, is still cached there
    "optimizer_state": cases.optimizer_state,
    "beside_compute": steady.beside_compute,
    "soak": steady.soak,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", default=",".join(CASES), help="cases to run, separated by commas")
    parser.add_argument("--scale", type=float, default=1.0, help="scale of the sizes; the bars apply at 1")
    parser.add_argument("--out", type=Path, default=Path("build/optimizer_offload.json"), help="the result file")
    arguments = parser.parse_args()
    chosen = arguments.cases.split(",")
    if unknown := set(chosen) - set(CASES):
        parser.error(f"--cases: there is no {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    report = Report(arguments.out)
    setting = Setting(device, arguments.scale, report)
    run("link", cases.link, setting)
    for name in (name for name in CASES if name in chosen):
        run(name, CASES[name], setting)
    if setting.saver_jobs:
        run("torch_memory_saver", cases.torch_memory_saver, setting)
    if setting.has_gpu:
        run("link, again", cases.link, setting)
    rows = report.finished()
    print("\n".join(["", *markdown(rows), "", *verdicts(rows)]))
    print(f"written to {arguments.out} and {arguments.out.with_suffix('.md')}")


def run(name: str, case: Callable[[Setting], None], setting: Setting) -> None:
    start = time.perf_counter()
    case(setting)
    if name != "setup":  # see CASES
        release_unused(setting.device)
    setting.report.write()
    print(f"{name}: {time.perf_counter() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
