"""Tests that the symbols that `mcore/patches` replaces, clears or calls exist, with the expected signatures.

Reads the installed sources, because importing the packages would show symbols that are already replaced.
"""

import ast
import functools
import importlib.metadata
import pkgutil
import sys
from pathlib import Path

import pytest
import torch
import yaml

from nemo_offload_rl.mcore import patches
from nemo_offload_rl.mcore.patches.cpu_device import MODULES_WITH_LITERAL_CUDA

UPSTREAM = yaml.safe_load((Path(__file__).parent / "data" / "upstream.yaml").read_text())
IMPORTS = (ast.Import, ast.ImportFrom)


@functools.cache
def source_of(module: str) -> ast.Module:
    path = module.replace(".", "/")
    files = [Path(folder, path).with_suffix(".py") for folder in sys.path]
    files += [Path(folder, path, "__init__.py") for folder in sys.path]
    return ast.parse(next(file for file in files if file.is_file()).read_text())


def found(module: str, name: str) -> ast.AST:
    """Finds a function or class of a module, at its top or inside its `if`s and `try`s, or a method of a class."""
    scope: ast.AST = source_of(module)
    for part in name.split("."):
        kinds = (ast.FunctionDef, ast.ClassDef)
        scope = next(node for node in ast.walk(scope) if isinstance(node, kinds) and node.name == part)
    return scope


def signature(function: ast.AST) -> str:
    assert isinstance(function, ast.FunctionDef)
    for argument in ast.walk(function.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    return f"({ast.unparse(function.args)})"


def attributes_of(scope: ast.AST) -> set[str]:
    body = list(ast.walk(scope))
    names = {node.attr for node in body if isinstance(node, ast.Attribute)}
    return names | {node.id for node in body if isinstance(node, ast.Name)}


def globals_of(module: str) -> set[str]:
    top = [node for node in source_of(module).body if isinstance(node, (ast.Assign, *IMPORTS))]
    names = {node.id for statement in top for node in ast.walk(statement) if isinstance(node, ast.Name)}
    return names | {alias.name for statement in top if isinstance(statement, IMPORTS) for alias in statement.names}


@pytest.mark.parametrize("patch", UPSTREAM)
def test_upstream_has_what_a_patch_relies_on(patch):
    for owner, entries in UPSTREAM[patch].items():
        module, _, scope = owner.partition(":")
        functions = {entry.partition("(")[0]: entry for entry in entries if "(" in entry}
        for name, entry in functions.items():
            assert name + signature(found(module, f"{scope}.{name}".lstrip("."))) == entry, owner
        others = {entry for entry in entries if "(" not in entry}
        assert others <= (attributes_of(found(module, scope)) if scope else globals_of(module)), owner


def test_modules_whose_torch_is_replaced_have_one():
    assert all("torch" in globals_of(module) for module in MODULES_WITH_LITERAL_CUDA)


def test_methods_of_tensors_that_are_replaced_exist():
    assert {"cuda", "type"} <= set(dir(torch._C.TensorBase))


def test_every_patch_says_what_it_was_written_for():
    modules = {module.name for module in pkgutil.iter_modules(patches.__path__)}
    assert set(patches.WRITTEN_FOR) == modules
    for versions in patches.WRITTEN_FOR.values():
        for distribution, releases in versions.items():
            assert importlib.metadata.version(distribution).startswith(releases), distribution
