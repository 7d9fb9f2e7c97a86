import logging
from concurrent.futures import ThreadPoolExecutor
from io import StringIO

from rich.console import Console
from support.limits import files_of_at_most

from nemo_offload_rl.run.folder import changed_keys, logged_to, new_run_folder, read_recipe, write_recipe


def test_run_folders_are_numbered(tmp_path):
    assert new_run_folder(tmp_path / "logs").name == "exp_001"
    (tmp_path / "logs" / "exp_007").mkdir()
    (tmp_path / "logs" / "exp_best").mkdir()
    assert new_run_folder(tmp_path / "logs").name == "exp_008"


def test_runs_that_start_at_once_get_folders_of_their_own(tmp_path):
    with ThreadPoolExecutor(8) as threads:
        folders = list(threads.map(lambda _: new_run_folder(tmp_path), range(40)))
    assert len(set(folders)) == 40


def test_recipes_come_back_as_they_were(tmp_path):
    config = {"optimizer": {"lr": 1e-8, "metric": None, "on": True}, "names": ["a", "b"]}
    assert read_recipe(tmp_path) is None
    write_recipe(tmp_path, config)
    assert read_recipe(tmp_path) == config


def test_changed_keys_are_named_in_full():
    old = {"a": {"b": 1, "c": 2}, "d": [1], "gone": None}
    new = {"a": {"b": 1, "c": 3}, "d": [1], "e": {"f": 1}}
    assert changed_keys(old, new) == ["a.c", "e", "gone"]
    assert changed_keys(old, old) == []


def test_the_log_is_in_the_folder_and_warnings_are_shown(tmp_path):
    shown = StringIO()
    package, module = logging.getLogger("nemo_offload_rl"), logging.getLogger("nemo_offload_rl.some.module")
    before = package.handlers.copy(), package.level, package.propagate
    with logged_to(tmp_path, Console(file=shown, width=200)):
        module.info("a detail")
        module.warning("a warning")
    assert (package.handlers, package.level, package.propagate) == before
    log = (tmp_path / "run.log").read_text()
    assert "INFO nemo_offload_rl.some.module: a detail" in log
    assert "a warning" in log
    assert "a warning" in shown.getvalue()
    assert "a detail" not in shown.getvalue()


def test_a_log_that_finds_no_space_is_told_once_and_ends_no_run(tmp_path, capsys):
    shown = StringIO()
    log = logging.getLogger("nemo_offload_rl")
    with files_of_at_most(300), logged_to(tmp_path, Console(file=shown, width=500)):
        for _ in range(10):
            log.info("a line of sixty characters or so, which soon finds no space")
    assert shown.getvalue().count("run.log cannot be written: File too large") == 1
    assert capsys.readouterr().err == ""
    assert (tmp_path / "run.log").stat().st_size == 300
