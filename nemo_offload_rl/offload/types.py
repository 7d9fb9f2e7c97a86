"""The words of the residency table: phases, targets, cells."""

from collections.abc import Mapping
from enum import StrEnum


class Phase(StrEnum):
    """What a colocated worker is about to do."""

    TRAIN = "train"
    LOGPROB = "logprob"
    REFIT = "refit"
    GENERATE = "generate"


class Target(StrEnum):
    """A kind of state that moves between phases."""

    PARAMS = "params"
    GRADS = "grads"


class Cell(StrEnum):
    """Where a target lives in a phase."""

    GPU = "gpu"
    HOST = "host"
    DROPPED = "dropped"
    """Its memory is given back and its contents are lost; it comes back as zeros."""
    KEEP = "keep"
    """Wherever it is now."""


Table = Mapping[Phase, Mapping[Target, Cell]]

DEFAULT_TABLE: Table = {
    Phase.TRAIN: {Target.PARAMS: Cell.GPU, Target.GRADS: Cell.GPU},
    Phase.LOGPROB: {Target.PARAMS: Cell.GPU, Target.GRADS: Cell.DROPPED},
    Phase.REFIT: {Target.PARAMS: Cell.GPU, Target.GRADS: Cell.DROPPED},
    Phase.GENERATE: {Target.PARAMS: Cell.HOST, Target.GRADS: Cell.DROPPED},
}
