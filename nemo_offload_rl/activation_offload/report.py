"""What activation offloading did in a step, for each module."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field


@dataclass
class ModuleReport:
    """Bytes of one module in one step on one rank."""

    distinct_bytes: int = 0
    """Storages that were large enough, each counted once for a micro-batch."""
    moved_bytes: int = 0
    """Of these, copied to the host."""
    returned_bytes: int = 0
    """Copied back ahead of need."""
    late_bytes: int = 0
    """Copied back when they were needed: the backward pass of their own group had begun."""
    freed_bytes: int = 0
    """Freed on the GPU between their copy out and their copy back; other references keep the memory of the rest."""
    duplicate_bytes: int = 0
    """Saved here, too, after another module had saved the same storage; not copied again."""
    kept_bytes: int = 0
    """Left on the GPU by choice: the last group of its name, the fraction, the pipeline's share."""
    refused_bytes: int = 0
    """Left on the GPU since the host memory was full."""
    small_bytes: int = 0
    """In storages below the minimum."""

    def count_back(self, nbytes: int, *, is_late: bool) -> None:
        """A storage of `nbytes` has been asked back."""
        if is_late:
            self.late_bytes += nbytes
        else:
            self.returned_bytes += nbytes

    def scaled(self, times: int, by: int) -> "ModuleReport":
        """All of it `times` / `by`."""
        return ModuleReport(**{name: value * times // by for name, value in asdict(self).items()})

    def __add__(self, other: "ModuleReport") -> "ModuleReport":
        return ModuleReport(**{name: value + getattr(other, name) for name, value in asdict(self).items()})


@dataclass(frozen=True)
class StepReport:
    """One training step on one rank."""

    modules: Mapping[str, ModuleReport]
    num_micro_batches: int
    """Forward passes through model chunks that took part."""
    host_bytes: int
    """Host memory for activations, page-locked once."""
    host_peak_bytes: int
    """Of it in use at the worst time."""
    captured_host_bytes: int = 0
    """Of it kept by CUDA graphs until they are deleted."""

    def total(self) -> ModuleReport:
        """All modules together."""
        return sum(self.modules.values(), ModuleReport())


@dataclass
class Tally:
    """A step's report in the making."""

    num_chunks: int = 0
    modules: dict[str, ModuleReport] = field(default_factory=dict)

    def of(self, module: str) -> ModuleReport:
        """A module's."""
        if module not in self.modules:  # called for each group: setdefault would make a report each time
            self.modules[module] = ModuleReport()
        return self.modules[module]

    def add(self, modules: Mapping[str, ModuleReport]) -> None:
        """Count what was counted elsewhere."""
        for name, report in modules.items():
            self.modules[name] = self.of(name) + report
