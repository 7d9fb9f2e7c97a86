"""Tests the import table: which part of the package may import which other part.

Imports go one way, so that each part can be read, tested and used without those above it: the offload engine in any
Megatron trainer, the configuration without torch, an algorithm without Megatron.
"""

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import nemo_offload_rl

PACKAGE = "nemo_offload_rl"
ROOT = Path(nemo_offload_rl.__file__).parent
LEAVES = frozenset({"metrics", "memory.numa", "memory.units", "placement.signals", "residency.table", "storage"})

NO_LIBRARY = "torch ray megatron transformer_engine transformers"


@dataclass(frozen=True)
class Layer:
    """Lists which of our other parts a part may import, and which third-party packages it may not."""

    may_import: frozenset[str] = field(default_factory=frozenset)
    never: frozenset[str] = field(default_factory=frozenset)


def layer(*may_import: str, never: str = "") -> Layer:
    return Layer(frozenset(may_import), frozenset(never.split()))


# A module belongs to the longest matching prefix here. An entry also allows everything below it.
LAYERS = {
    "": layer(never="torch ray megatron transformers"),  # the package's own __init__
    "named_datasets": layer(never=NO_LIBRARY),
    "hub": layer(never=NO_LIBRARY),
    "hf_config": layer("hub", "config.installed", "config.schema", never="torch ray megatron transformer_engine"),
    "storage": layer(never=NO_LIBRARY),
    "metrics": layer("storage", "memory.units", never="ray megatron transformer_engine transformers"),
    "memory": layer(never="ray megatron transformer_engine transformers"),
    "memory.numa": layer(never="torch ray megatron"),
    "memory.units": layer(never="torch ray megatron"),
    "residency.table": layer(never="torch ray megatron"),
    "residency": layer("memory", *LEAVES, never="ray transformers"),
    "activation_offload": layer("memory", *LEAVES, never="ray transformers"),
    "activation_offload.schedule": layer(never="torch ray megatron"),
    "config.problems": layer(never=NO_LIBRARY),
    "config.source": layer("config.problems", "storage", never=NO_LIBRARY),
    "config.installed": layer("config.problems", never=NO_LIBRARY),
    "config.megatron": layer("config.problems", never=NO_LIBRARY),
    "config.model": layer("config.problems", "config.installed", never=NO_LIBRARY),
    "config.key_table": layer("config.problems", never=NO_LIBRARY),
    "config.upstream": layer("config.problems", "config.key_table", never=NO_LIBRARY),
    "config.schema": layer(never=NO_LIBRARY),
    "config.algorithms": layer("config.schema", "residency.table", never=NO_LIBRARY),
    "config.keys": layer("config.problems", "config.source", "config.installed", "config.key_table", "config.schema",
        "config.algorithms", "named_datasets", never=NO_LIBRARY),
    "config.recipe": layer("config.problems", "config.source", "config.keys", "storage", never=NO_LIBRARY),
    "config.rules": layer("config.problems", "config.installed", "config.megatron", "config.model", "config.schema",
        "config.upstream", "config.key_table", "config.algorithms", "config.keys", "config.recipe", "named_datasets",
        "metrics.names", never=NO_LIBRARY),
    "config": layer("named_datasets", "storage", "residency.table", "metrics.names", never=NO_LIBRARY),
    "placement.signals": layer(never="torch ray megatron"),
    "placement": layer(*LEAVES, never="megatron transformers"),
    "placement.network": layer(never="ray megatron transformers"),
    "placement.link": layer("memory", *LEAVES, never="ray megatron transformers"),
    "placement.host": layer("memory.numa", never=NO_LIBRARY),
    "placement.rates": layer("storage", never=NO_LIBRARY),
    "plan": layer("config", "residency.targets", "activation_offload.schedule", "placement.host", "placement.rates",
        *LEAVES, never=NO_LIBRARY),
    "adapters": layer("memory", "residency", "placement.gpus", *LEAVES),
    "data": layer("hub", "named_datasets", *LEAVES, never="ray megatron transformer_engine"),
    "environments": layer("data", *LEAVES, never="megatron transformer_engine"),
    "mcore.context_parallel": layer(never="ray"),
    "mcore.log_filters": layer(never="ray"),
    "mcore.optimizer": layer("memory", "residency", never="ray"),
    "mcore.patches": layer("activation_offload", "residency.streamed", "config.installed", "config.megatron",
        "mcore.optimizer", "mcore.context_parallel", never="ray"),
    "mcore.architectures": layer("mcore.patches", "config.megatron", "config.model", "config.schema", never="ray"),
    "mcore.distributed": layer("mcore.patches", "memory.errors", "config.megatron", "placement.network", "storage",
        never="ray"),
    "mcore.weights": layer("mcore.patches", "mcore.distributed", "hf_config", "storage", never="ray"),
    "mcore.batches": layer("mcore.context_parallel", "memory.units", "data.batch", never="ray"),
    "mcore.model": layer("mcore.context_parallel", "mcore.log_filters", "mcore.patches", "mcore.architectures",
        "mcore.distributed", "mcore.weights", "config.megatron", "config.model", "config.schema", "hf_config",
        never="ray"),
    "mcore.logprob": layer("mcore.context_parallel", "mcore.patches", "mcore.batches", "mcore.model", "memory.units",
        never="ray"),
    "mcore.graphs": layer("mcore.patches", "mcore.batches", "memory", "config.megatron", never="ray"),
    "mcore.random_weights": layer(never="ray"),
    "mcore.build": layer("mcore.patches", "mcore.optimizer", "mcore.weights", "mcore.random_weights", "mcore.model",
        "config.megatron", "config.schema", "hf_config", never="ray"),
    "mcore.checkpoint": layer("mcore.patches", "mcore.optimizer", "mcore.distributed", "mcore.weights", "mcore.build",
        "memory", "storage", never="ray"),
    "mcore": layer("memory", "data.batch", never="ray"),
    "model_check": layer("config", "mcore", "hf_config", "data.batch", *LEAVES, never="ray"),
    "model_check.twin": layer(never=NO_LIBRARY),
    "refit": layer("data.batch", "metrics", "memory", never="megatron transformer_engine"),
    "generation": layer("data.batch", "data.tokenizer", "metrics", "memory.units", "placement.cluster",
        "placement.gather", "placement.network", "placement.relay", "placement.signals", "refit", "config.megatron",
        "config.schema", "hf_config", "hub", never="megatron transformer_engine"),
    "worker": layer("plan", "model_check", "mcore", "memory", "residency", "activation_offload", "placement", "refit",
        "config", "data.batch", "hf_config", *LEAVES),
    "run": layer("worker.group", "worker.environment", "worker.errors", "generation", "refit", "data", "environments",
        "placement.cluster", "placement.nodes", "placement.gpu_monitor", "placement.host", "placement.machine",
        "placement.gpus", "placement.rates", "plan", "config", "hf_config", *LEAVES,
        never="megatron transformer_engine"),
    "algorithms": layer("run", "worker.group", "generation", "refit", "data", "environments", "placement.cluster",
        "config", *LEAVES, never="megatron transformer_engine"),
    "cli": layer("config", "plan", "memory", "residency", "activation_offload", "placement", "data", "environments",
        "mcore", "refit", "generation", "worker", "model_check", "run", "hf_config", *LEAVES),
}  # fmt: skip


def starts_with(module: str, prefix: str) -> bool:
    return prefix == "" or module == prefix or module.startswith(f"{prefix}.")


def layer_of(module: str) -> str:
    """Returns the name in the table that a module (without the package's name) belongs to."""
    if module == "":
        return ""
    names = [name for name in LAYERS if name and starts_with(module, name)]
    if not names:
        raise LookupError(f"{PACKAGE}.{module} is in no layer: give it a row in LAYERS, with what it may import")
    return max(names, key=len)


@functools.cache
def imports_of(source: str, module: str, is_package: bool) -> tuple[tuple[int, str], ...]:
    """Returns line and full module name of every import in a source, at any depth; relative ones are resolved."""
    return tuple(_imports_of(source, module, is_package))


def _imports_of(source: str, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    parts = [PACKAGE, *module.split(".")] if module else [PACKAGE]
    package = parts if is_package else parts[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                name = f"{origin}.{alias.name}"
                yield node.lineno, name if is_module(name) else origin


def is_module(name: str) -> bool:
    path = ROOT.parent.joinpath(*name.split("."))
    return name.startswith(f"{PACKAGE}.") and (path.is_dir() or path.with_suffix(".py").is_file())


def violations(source: str, module: str, is_package: bool = False) -> list[str]:
    """Returns a message for each import that the table forbids: where it is, what it is and what is allowed."""
    name = layer_of(module)
    rule = LAYERS[name]
    where = f"{PACKAGE}/{module.replace('.', '/')}" + ("/__init__.py" if is_package else ".py")
    found = []
    for line, imported in imports_of(source, module, is_package):
        if imported == PACKAGE or starts_with(imported, PACKAGE):
            ours = imported.removeprefix(PACKAGE).removeprefix(".")
            if ours and not starts_with(ours, name) and not any(starts_with(ours, other) for other in rule.may_import):
                allowed = ", ".join(sorted(rule.may_import)) or "nothing"
                found.append(f"{where}:{line} imports {imported}; beside itself `{name}` may import: {allowed}")
        elif imported.split(".")[0] in rule.never:
            never = ", ".join(sorted(rule.never))
            found.append(f"{where}:{line} imports {imported}; `{name}` imports none of: {never}")
    return found


def modules() -> Iterator[tuple[str, str, bool]]:
    """Returns each module's name, its source, and whether it is a package."""
    for path in sorted(ROOT.rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        yield name.removesuffix("__init__").removesuffix("."), path.read_text(), path.name == "__init__.py"


def test_every_module_keeps_to_its_layer():
    found = [one for module, source, is_package in modules() for one in violations(source, module, is_package)]
    assert not found, "imports against the table in this file:\n  " + "\n  ".join(found)


def test_the_table_has_no_cycle():
    done: set[str] = set()
    while todo := [name for name in LAYERS if name not in done]:
        ready = [name for name in todo if {layer_of(other) for other in LAYERS[name].may_import} <= done | {name}]
        assert ready, f"layers that import each other: {todo}"
        done.update(ready)


IMPORTS = [
    (1, "algorithms.grpo", "from nemo_offload_rl.mcore.build import build_model"),
    (1, "algorithms.grpo", "def train():\n    from ..mcore import build"),
    (1, "generation.interface", "from nemo_offload_rl import algorithms"),
    (1, "run.train_loop", "from nemo_offload_rl.algorithms import grpo"),
    (1, "residency.table", "if TYPE_CHECKING:\n    import torch.nn"),
    (1, "config.validate", "from torch import nn"),
    (0, "algorithms.grpo", "from nemo_offload_rl.worker.group import PolicyWorkerGroup\nimport torch"),
    (0, "config.validate", "from . import recipe\nimport yaml"),
    (0, "residency.residency", "import torch\nfrom .table import Phase\nfrom ..memory.numa import bind"),
    (0, "worker.worker", "from nemo_offload_rl import __version__\nfrom ..mcore import build"),
]


@pytest.mark.parametrize(("num_violations", "module", "source"), IMPORTS)
def test_a_forbidden_import_is_found_and_an_allowed_one_let_through(num_violations, module, source):
    assert len(violations(source, module)) == num_violations
    with pytest.raises(LookupError, match="give it a row"):
        layer_of("brand_new.module")


@pytest.mark.parametrize("module", ["nemo_offload_rl.config", "nemo_offload_rl.cli"])
def test_importing_the_configuration_loads_neither_torch_nor_ray(module):
    check = f"import sys, {module}; print(sorted({{'torch', 'ray', 'megatron', 'transformers'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_the_picture_of_the_packages_is_right():
    """Each package of docs/architecture.md may import only from the rows below its own."""
    page = (ROOT.parent / "docs" / "architecture.md").read_text()
    rows = [set(re.findall(r"\w+", line)) for line in page.splitlines() if line.startswith("    │")]
    row_of = {package: row for row, packages in enumerate(rows) for package in packages if (ROOT / package).is_dir()}
    assert row_of.keys() == {path.parent.name for path in ROOT.glob("*/__init__.py")}
    upward = [
        f"{module}:{line} imports {imported}"
        for module, source, is_package in modules()
        for line, imported in imports_of(source, module, is_package)
        if (own := module.split(".")[0]) in row_of
        and (other := imported.removeprefix(f"{PACKAGE}.").split(".")[0]) in row_of
        and other != own
        and row_of[other] <= row_of[own]
    ]
    assert upward == []


def import_circle(imported_by: dict[str, set[str]]) -> list[str]:
    """Returns modules that import each other in a circle; empty if there is none."""
    left = {module: set(imported) & imported_by.keys() - {module} for module, imported in imported_by.items()}
    while ready := [module for module, imported in left.items() if not imported & left.keys()]:
        for module in ready:
            del left[module]
    return sorted(left)


def test_no_modules_import_each_other():
    """Imports inside functions and under TYPE_CHECKING count, too."""
    imported_by = {
        f"{PACKAGE}.{module}": {name for _, name in imports_of(source, module, is_package)} - {PACKAGE}
        for module, source, is_package in modules()
    }
    assert import_circle(imported_by) == []
    circle = {"a": {"b"}, "b": {"c"}, "c": {"b", "torch"}, "d": {"torch"}}
    assert import_circle(circle) == ["a", "b", "c"]
