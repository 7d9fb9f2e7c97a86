"""Holds the rates of a machine from which seconds are predicted: assumed ones, or those that the doctor measured."""

import bisect
import dataclasses
import json
import logging
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_offload_rl.storage.disk import UnreadableFileError, cache_folder, read_regular_file, write_whole

logger = logging.getLogger(__name__)

_VERSION = 1  # of the file's fields
_MAX_FILE_BYTES = 1 << 20
_REMEDY = "measure again with nemo-offload-rl doctor --calibrate, or delete the file"


@dataclass(frozen=True)
class Curve:
    """Holds a rate that depends on a size.

    Attributes:
        points: pairs of size and rate, by ascending size.
    """

    points: tuple[tuple[float, float], ...]

    def at(self, size: float) -> float:
        """Returns the rate at a size: between two points by the logarithm of the size, outside that of the nearest."""
        number = bisect.bisect(self.points, size, key=lambda point: point[0])
        if number in (0, len(self.points)):
            return self.points[max(0, number - 1)][1]
        (low, slow), (high, fast) = self.points[number - 1 : number + 1]
        return slow + (fast - slow) * math.log(size / low) / math.log(high / low)


@dataclass(frozen=True)
class AttentionRates:
    """Holds the FLOP/s of causal attention in bf16, by the tokens of a sequence.

    Attributes:
        head_dim: size of a head.
        forward: FLOPs of a forward pass, two products a pair of tokens, a second.
        backward: FLOPs of a backward pass, five products a pair of tokens, a second.
    """

    head_dim: int
    forward: Curve
    backward: Curve


@dataclass(frozen=True)
class Rates:
    """Holds how fast one GPU and its host are.

    Attributes:
        source: where the numbers are from, for messages.
        matmul: FLOP/s of matrix products in bf16, by the FLOPs of one product.
        attention: rates of attention, by size of a head.
        memory_bytes_per_s: bytes that a copy within GPU memory reads and writes in a second.
        link_bytes_per_s: speed of page-locked copies in one direction, the slower one's.
        launch_s: host seconds of a small operation in a forward or backward pass: Python, autograd and the launch.
        cpu_params_per_s: parameters that Adam's kernels step in a second on the CPU, with all threads of the process.
    """

    source: str
    matmul: Curve
    attention: tuple[AttentionRates, ...]
    memory_bytes_per_s: float
    link_bytes_per_s: float
    launch_s: float
    cpu_params_per_s: float

    def attention_of(self, head_dim: int) -> AttentionRates:
        """Returns the rates of the size of a head that is nearest."""
        return min(self.attention, key=lambda rates: abs(rates.head_dim - head_dim))

    def of_a_rank(self, ranks_of_a_host: int) -> "Rates":
        """Returns these rates with a rank's share of the CPU's; assumed ones are those of a rank already."""
        if self.source == H200_RATES.source:
            return self
        return dataclasses.replace(self, cpu_params_per_s=self.cpu_params_per_s / ranks_of_a_host)

    def as_fields(self) -> dict[str, Any]:
        """Returns what `from_fields` reads, for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> "Rates":
        """Returns the rates of the fields of a file.

        Raises:
            ValueError: a field is missing, or not what it should be.
        """
        try:
            numbers = {name: _positive(fields[name]) for name in _NUMBERS}
            attention = tuple(
                AttentionRates(int(_positive(one["head_dim"])), _curve(one["forward"]), _curve(one["backward"]))
                for one in fields["attention"]
            )
            if not attention:
                raise ValueError("it has no rates of attention")
            return cls(source=str(fields["source"]), matmul=_curve(fields["matmul"]), attention=attention, **numbers)
        except (KeyError, TypeError, OverflowError) as error:  # JSON's integers may be too large for a float
            raise ValueError(f"it lacks a field, or has one of another type: {error}") from error


_NUMBERS = ("memory_bytes_per_s", "link_bytes_per_s", "launch_s", "cpu_params_per_s")


def _positive(value: Any) -> float:
    if not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"it has {value!r} where a number above 0 belongs")
    return float(value)


def _curve(fields: Mapping[str, Any]) -> Curve:
    points = tuple((_positive(size), _positive(rate)) for size, rate in fields["points"])
    if not points or list(points) != sorted({size: (size, rate) for size, rate in points}.values()):
        raise ValueError("a curve has no points, or not by ascending size")
    return Curve(points)


def _teraflops(*points: tuple[float, float]) -> Curve:
    return Curve(tuple((size, rate * 1e12) for size, rate in points))


H200_RATES = Rates(
    source="assumed, those of an H200",
    matmul=_teraflops((1.07e9, 62), (6.4e9, 375), (1.7e10, 655), (6.9e10, 675), (1.1e12, 680), (4.4e12, 685)),
    attention=(
        AttentionRates(
            64,
            forward=_teraflops((512, 252), (1024, 323), (2048, 374), (4096, 410), (16384, 442), (65536, 460)),
            backward=_teraflops((512, 169), (1024, 251), (2048, 321), (4096, 371), (16384, 430), (65536, 427)),
        ),
        AttentionRates(
            128,
            forward=_teraflops((512, 317), (1024, 403), (2048, 473), (4096, 518), (16384, 569), (65536, 601)),
            backward=_teraflops((512, 212), (1024, 305), (2048, 386), (4096, 441), (16384, 524), (65536, 542)),
        ),
    ),
    memory_bytes_per_s=4.25e12,
    link_bytes_per_s=55e9,  # PCI Express 5.0 x16
    launch_s=1.58e-5,
    cpu_params_per_s=3.9e9,
)
"""Rates of an H200 and its host, which `doctor --calibrate` measured (docs/results/plan_accuracy.json).

The CPU's are those of 16 threads, without the copies of the CPU optimizer: these stepped 772 M parameters in 0.31 s
without overlap, 0.11 s of which are copies (docs/results/cpu_optimizer.md)."""


def rates_path(gpu: str) -> Path:
    """Returns the file with the rates of a kind of GPU on this machine."""
    host = f"{_cpu_name()} {os.cpu_count()} CPUs"
    return cache_folder("rates") / f"{_slug(gpu)}_{_slug(host)}_{_VERSION}.json"


def keep_rates(rates: Rates, gpu: str) -> Path:
    """Writes the rates of a kind of GPU on this machine, atomically; returns the file.

    Raises:
        ValueError: the file cannot be written.
    """
    where = "a file"
    try:
        path = rates_path(gpu)
        where = str(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(rates.as_fields(), indent=2) + "\n")
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(
            f"the measured rates cannot be written to {where}: {reason}; set XDG_CACHE_HOME to the absolute path of a "
            "folder in which you may write"
        ) from error
    return path


def read_rates(path: Path) -> Rates:
    """Returns the rates in a file.

    Raises:
        ValueError: the file cannot be read, or does not hold rates.
    """
    try:
        return Rates.from_fields(json.loads(read_regular_file(path, _MAX_FILE_BYTES)))
    except RecursionError as error:
        raise ValueError(f"{path} does not hold rates of a machine: it is nested too deep; {_REMEDY}") from error
    except UnreadableFileError as error:
        raise ValueError(f"the rates in {path} cannot be read: {error.reason}; {_REMEDY}") from error
    except ValueError as error:
        raise ValueError(f"{path} does not hold rates of a machine: {error}; {_REMEDY}") from error


def rates_of(gpus: Iterable[str]) -> Rates:
    """Returns the rates that were measured on this machine with the first of these GPUs, by name; else assumed ones."""
    path = next((path for path in map(rates_path, gpus) if os.path.exists(path)), None)  # Path's may raise
    try:
        return H200_RATES if path is None else read_rates(path)
    except ValueError as error:  # no run needs them
        logger.warning("%s", error)
        return H200_RATES


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "cpu"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "cpu")


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
