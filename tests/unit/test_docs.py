"""Tests that what pages refer to exists (files, `make` targets, recipes, commands), and that they name the actor."""

import ast
import re
import runpy
import subprocess
from functools import cache
from pathlib import Path

import pytest
import yaml

from nemo_offload_rl.config import load

REPOSITORY = Path(__file__).parents[2]
KEYS_PAGE = REPOSITORY / "docs" / "recipe-keys.md"  # written by `make docs`, not committed
PAGES = sorted({*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md"), KEYS_PAGE})
RESULTS, PACKAGE = REPOSITORY / "docs" / "results", REPOSITORY / "nemo_offload_rl"


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z]+):", (REPOSITORY / "Makefile").read_text(), flags=re.MULTILINE))


def cli_source() -> str:
    return (REPOSITORY / "nemo_offload_rl" / "cli.py").read_text()


@cache
def text_of(page: Path) -> str:
    if page == KEYS_PAGE:
        return runpy.run_path(str(REPOSITORY / "tools" / "keys_page.py"))["page"]()
    return page.read_text()


@cache
def anchors_of(page: Path) -> set[str]:
    """Returns the anchors that mkdocs gives a page's headings."""
    prose = re.sub(r"^```.*?^```", "", text_of(page), flags=re.MULTILINE | re.DOTALL)
    headings = [re.sub(r"\]\(.*?\)", "", heading) for heading in re.findall(r"^#+ (.*)", prose, flags=re.MULTILINE)]
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


def missing_links(page: Path) -> list[str]:
    """Returns links, and pictures, that lead to no file or heading."""
    links = [link for link in re.findall(r"\]\(([^)\s]+)[^)]*\)", text_of(page)) if "://" not in link]
    missing = []
    for link in links:
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        found = target == KEYS_PAGE or target.exists()
        if not found or (anchor and target.suffix == ".md" and anchor not in anchors_of(target)):
            missing.append(link)
    return missing


def missing_files(page: Path) -> list[str]:
    folders = "examples|tools|benchmarks|tests|docs|nemo_offload_rl"
    named = re.findall(rf"(?<![\w/.])((?:{folders})/[\w/.-]+\w)", text_of(page))
    in_package = re.findall(r"`([a-z_]+/[\w/]+\.py)`", text_of(page))
    named += [f"nemo_offload_rl/{path}" for path in in_package if (PACKAGE / path.partition("/")[0]).is_dir()]
    templates = ("NAME", "my_", "YOUR")
    return [
        name
        for name in named
        if not any(t in name for t in templates) and not (path := REPOSITORY / name).exists() and path != KEYS_PAGE
    ]


def missing_make_targets(page: Path) -> set[str]:
    code = re.findall(r"^ {4}.*$|^make .*$|(?<!`)`[^`\n]+`", text_of(page), flags=re.MULTILINE)
    named = {target for line in code for run in re.findall(r"\bmake ((?:[a-z]+\b ?)+)", line) for target in run.split()}
    return named - make_targets()


def missing_commands(page: Path) -> list[str]:
    named = set(re.findall(r"^[` ]*(?:.*bin/)?nemo-offload-rl ([a-z]+)", text_of(page), flags=re.MULTILINE))
    named |= set(re.findall(r"`nemo-offload-rl ([a-z]+)", text_of(page)))
    return [command for command in named if f'"{command}"' not in cli_source()]


NO_ACTOR = re.compile(r"\b(somebody|whoever|nobody|what leaves|what comes back|who reads)\b", flags=re.IGNORECASE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_what_a_page_names_exists_and_its_sentences_name_the_actor(page):
    checks = (missing_links, missing_files, missing_make_targets, missing_commands)
    problems = {check.__name__: found for check in checks if (found := check(page))}
    lines = enumerate(text_of(page).splitlines(), start=1)
    unnamed = [f"line {number}: {line}" for number, line in lines if NO_ACTOR.search(line)]
    assert (problems, unnamed) == ({}, [])


def test_a_page_of_results_is_one_screen():
    long = {page.name: lines for page in PAGES if page.parent == RESULTS if (lines := num_lines(page)) > 150}
    assert long == {}, "tables of single cases belong in the JSON file beside the page"


def num_lines(page: Path) -> int:
    return len(text_of(page).splitlines())


def test_docstrings_name_the_actor():
    folders = ("nemo_offload_rl", "tests", "benchmarks", "tools", "examples")
    unnamed = [
        f"{path.relative_to(REPOSITORY)}:{line}: {found}"
        for folder in folders
        for path in sorted((REPOSITORY / folder).rglob("*.py"))
        if NO_ACTOR.search(text := path.read_text())
        for line, found in unnamed_in(text)
    ]
    assert unnamed == []


def unnamed_in(text: str) -> list[tuple[int, str]]:
    """Returns line and words of each such phrase in the docstrings of modules, classes, functions and attributes."""
    values = [node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Expr)]
    strings = [value for value in values if isinstance(value, ast.Constant) and isinstance(value.value, str)]
    return [(string.lineno, found[0]) for string in strings for found in NO_ACTOR.finditer(str(string.value))]


def test_phrases_without_an_actor_are_found_in_docstrings_alone():
    text = '"""Nobody waits."""\nx = "nobody"  # nobody\ny = 1\n"""What leaves."""\n'
    assert unnamed_in(text) == [(1, "Nobody"), (4, "What leaves")]


def test_the_names_of_the_readme_are_checked_at_all():
    assert REPOSITORY / "README.md" in PAGES
    targets = "setup grpo sft dpo test messages testgpu lint docs lock clean help"
    assert make_targets() == set(targets.split())


def test_scripts_of_clusters_are_whole_and_ask_for_locked_versions():
    folder = REPOSITORY / "examples" / "cluster"
    subprocess.run(["bash", "-n", str(folder / "slurm.sh")], check=True)
    job = yaml.safe_load((folder / "kuberay.yaml").read_text())["spec"]
    locked = re.search(r'^name = "ray"\nversion = "(.*)"$', (REPOSITORY / "uv.lock").read_text(), flags=re.MULTILINE)
    assert locked is not None
    assert job["rayClusterSpec"]["rayVersion"] == locked[1]
    workers = job["rayClusterSpec"]["workerGroupSpecs"][0]
    words = job["entrypoint"].rstrip("'").split()
    script, config = words[words.index("--frozen") + 1], words[words.index("--config") + 1]
    overrides = [word for word in words if "=" in word]
    gpus = workers["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    assert f"cluster.num_nodes={workers['replicas']}" in overrides
    assert f"cluster.gpus_per_node={gpus}" in overrides
    assert (REPOSITORY / script).is_file()
    load(REPOSITORY / config, overrides)
