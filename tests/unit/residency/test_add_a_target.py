"""Tests that the code of docs/add-a-target.md works, and that no other change is needed."""

import shutil
from pathlib import Path

import pytest
from support.pages import REPOSITORY, blocks, copy_with_changes, run_in

PAGE = REPOSITORY / "docs" / "add-a-target.md"


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    copy_with_changes(PAGE, folder)
    return folder


def test_the_page_has_a_mechanism_a_test_and_changes_to_the_files_that_it_lists():
    paths = {path for path, _, _ in blocks(PAGE)}
    of_package = {f"nemo_offload_rl/residency/{name}.py" for name in ("table", "my_average", "targets")}
    schema, test = "nemo_offload_rl/config/schema/residency.py", "tests/unit/residency/test_my_average.py"
    assert paths == {*of_package, schema, test}


def test_the_test_of_the_page_passes_in_a_changed_copy_of_the_package(copy):
    assert "3 passed" in run_in(copy, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests")


def test_without_the_line_in_the_table_the_test_of_the_page_fails(copy, tmp_path):
    shutil.copytree(copy, tmp_path / "copy")
    shutil.copy(REPOSITORY / "nemo_offload_rl/residency/targets.py", tmp_path / "copy/nemo_offload_rl/residency")
    with pytest.raises(AssertionError, match="2 failed, 1 passed"):
        run_in(tmp_path / "copy", "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests")


def test_the_code_of_the_page_is_in_the_projects_style(copy):
    paths = ["nemo_offload_rl/residency", "nemo_offload_rl/config/schema/residency.py", "tests"]
    run_in(copy, "-m", "ruff", "check", "--no-cache", *paths)
    run_in(copy, "-m", "ruff", "format", "--no-cache", "--check", *paths)
