"""What a run remembers from step to step, and a checkpoint keeps: everything random follows from the seed and this."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from nemo_offload_rl.data.loader import START, DataPosition

STATE_FILE = "training_state.json"


@dataclass(frozen=True)
class Validation:
    """What a validation measured after ``step`` steps; metric names start with ``validation/``."""

    step: int
    metrics: dict[str, float]


@dataclass
class TrainingState:
    """Progress of a run.

    Attributes:
        step: whole steps done.
        position: where the training data goes on.
        validations: all of them, oldest first.
        run_dir: folder of the run's metrics and log.
    """

    run_dir: str
    step: int = 0
    position: DataPosition = START
    validations: list[Validation] = field(default_factory=list)

    def write(self, folder: Path, metrics: Mapping[str, float]) -> None:
        """Writes the state, and the metrics that the checkpoint is ranked by, into a checkpoint folder."""
        content = asdict(self) | {"metrics": dict(metrics)}
        (folder / STATE_FILE).write_text(json.dumps(content, indent=2) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Reads the state of a checkpoint folder."""
        content = _read(folder)
        return cls(
            run_dir=content["run_dir"],
            step=content["step"],
            position=DataPosition(**content["position"]),
            validations=[Validation(**validation) for validation in content["validations"]],
        )


def read_metrics_of(folder: Path) -> dict[str, float]:
    """The metrics that a checkpoint folder was written with."""
    return _read(folder)["metrics"]


def _read(folder: Path) -> dict[str, Any]:
    return json.loads((folder / STATE_FILE).read_text())
