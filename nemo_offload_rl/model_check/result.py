"""The result of a model's check, as JSON and as messages; imports no other library."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

LOGPROB_LIMIT = 1e-4
"""Rounding in float32 causes 5e-6; the smallest known error, in rope with scaled wavelengths, causes 4e-3."""
GRADIENT_LIMIT = 1e-3
"""Relative. Rounding causes 3e-6; a term that is missing or counted twice causes 1e-2 and more."""


@dataclass(frozen=True)
class Difference:
    """Measures the differences between the results of the two models.

    Attributes:
        batches: padded or packed.
        logprob: the largest difference of a token's log-prob.
        gradient: the largest relative difference of a parameter's gradient.
        parameter: the name of this parameter in checkpoint files.
    """

    batches: str
    logprob: float
    gradient: float
    parameter: str

    @property
    def is_rounding(self) -> bool:
        """Whether rounding explains the difference."""
        return self.logprob <= LOGPROB_LIMIT and self.gradient <= GRADIENT_LIMIT  # False for NaN


@dataclass(frozen=True)
class CheckResult:
    """Holds the result of one check.

    Attributes:
        differences: one entry for each kind of batches.
        device: the name of the GPU, or cpu.
        layers: the layer specification: Transformer Engine or local.
        seconds: the seconds that each stage of the check took, by name.
    """

    differences: tuple[Difference, ...]
    device: str
    layers: str
    seconds: Mapping[str, float]

    @property
    def is_right(self) -> bool:
        """Whether rounding explains every difference."""
        return all(difference.is_rounding for difference in self.differences)

    @property
    def worst(self) -> Difference:
        """The difference that exceeds its rounding limit most."""
        return max(self.differences, key=_excess)

    def to_json(self) -> dict[str, Any]:
        """Returns the fields that `from_json` reads; a number that is not finite becomes null."""
        fields = asdict(self)
        for entry in fields["differences"]:
            entry |= {key: None for key in ("logprob", "gradient") if not math.isfinite(entry[key])}
        return fields

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """Returns the result for the fields that `to_json` returned.

        Raises:
            KeyError: a field is missing.
            TypeError: a field is of another type.
        """
        differences = tuple(
            Difference(str(entry["batches"]), _number(entry["logprob"]), _number(entry["gradient"]), entry["parameter"])
            for entry in fields["differences"]
        )
        seconds = {name: float(value) for name, value in dict(fields["seconds"]).items()}
        return cls(differences, str(fields["device"]), str(fields["layers"]), seconds)


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


def _excess(difference: Difference) -> float:
    values = (difference.logprob / LOGPROB_LIMIT, difference.gradient / GRADIENT_LIMIT)
    return math.inf if any(math.isnan(value) for value in values) else max(values)


def describe(result: CheckResult) -> str:
    """Returns the result as half a sentence: what differs by how much, and on which device."""
    worst = result.worst
    batches = " and ".join(difference.batches for difference in result.differences)
    gradient = f"gradients by {worst.gradient:.2g}" + (f" ({worst.parameter})" if not worst.is_rounding else "")
    where = (
        "with Transformer Engine's layers"
        if result.layers == "Transformer Engine"
        else "with the local layer specification, so that Transformer Engine's was not checked"
    )
    return f"log-probs of a small twin differ by {worst.logprob:.2g}, its {gradient}, {batches}, {where}"


def refusal(result: CheckResult, model_type: str, flags: Sequence[str]) -> str:
    """Returns the message that refuses a model.

    Args:
        result: the result of its check.
        model_type: the model's family.
        flags: the config's keys that differ from the family's defaults, each with its value.
    """
    named = ", ".join(flags) if flags else "none that is not the family's default"
    return (
        f"Megatron's results for this {model_type} model differ from transformers': {describe(result)}; rounding "
        f"explains at most {LOGPROB_LIMIT:g} for log-probs and {GRADIENT_LIMIT:g} for gradients. Its flags: {named}. "
        "Take another model or other flags, or set policy.skip_model_check to true to train it as it is."
    )
