"""What a run remembers from step to step, and a checkpoint keeps: everything random follows from the seed and this."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from nemo_offload_rl.data.loader import START, DataPosition
from nemo_offload_rl.storage.disk import write_whole
from nemo_offload_rl.storage.manifest import MANIFEST_FILE, DamagedError

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
        content = asdict(self) | {"metrics": dict(metrics), "manifest": MANIFEST_FILE}
        write_whole(folder / STATE_FILE, json.dumps(content, indent=2) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Reads the state of a checkpoint folder.

        Raises:
            DamagedError: it is not what was written.
        """
        return _read(
            folder,
            lambda content: cls(
                run_dir=str(Path(content["run_dir"])),
                step=int(content["step"]),
                position=DataPosition(**content["position"]),
                validations=[Validation(**validation) for validation in content["validations"]],
            ),
        )


def read_metrics_of(folder: Path) -> dict[str, float]:
    """The metrics that a checkpoint folder was written with.

    Raises:
        DamagedError: its state is not what was written.
    """
    return _read(folder, lambda content: {name: float(value) for name, value in content["metrics"].items()})


def was_written_with_manifest(folder: Path) -> bool:
    """Whether a checkpoint folder must have a manifest; those of earlier versions have none.

    Raises:
        DamagedError: its state is not what was written.
    """
    return _read(folder, lambda content: "manifest" in content)


def _read[T](folder: Path, take: Callable[[dict[str, Any]], T]) -> T:
    """What is taken from the content of a folder's state.

    Raises:
        DamagedError: it is not what was written.
    """
    try:
        return take(json.loads((folder / STATE_FILE).read_text(encoding="utf-8")))
    except FileNotFoundError as error:
        raise DamagedError(f"{STATE_FILE} is missing") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"{STATE_FILE} is not what was written ({type(error).__name__}: {error})") from error
