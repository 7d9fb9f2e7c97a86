import contextlib
import json
import os
import re
import shutil
import signal
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from rich.console import Console
from safetensors.torch import load_file
from support.html_page import Page
from support.limits import files_of_at_most

from nemo_offload_rl import config
from nemo_offload_rl.data.arithmetic import make_arithmetic
from nemo_offload_rl.data.tokenizer import load_tokenizer
from nemo_offload_rl.metrics.logger import METRICS_FILE
from nemo_offload_rl.metrics.names import MEASUREMENTS
from nemo_offload_rl.metrics.samples import JudgedAnswer
from nemo_offload_rl.plan.decisions import Machine
from nemo_offload_rl.run import folder as results
from nemo_offload_rl.run.checkpoints import RunState
from nemo_offload_rl.run.interrupt import Interrupt, Stopped
from nemo_offload_rl.run.job import Ending, Job, Session
from nemo_offload_rl.run.train_loop import StopReason, TimeLimit
from nemo_offload_rl.run.warm_start import run_warm_start
from nemo_offload_rl.storage.disk import DiskFullError
from nemo_offload_rl.storage.lock import FolderLock, LockedError
from nemo_offload_rl.storage.manifest import CheckpointError, DamagedCheckpointError, write_manifest
from tests.unit.algorithms.test_sft_and_dpo import make_sft

RECIPE = Path(__file__).parents[3] / "examples" / "configs" / "sft_tiny_cpu.yaml"


def with_build(job: Job, build) -> Job:
    return replace(job, preparation=replace(job.preparation, build=build))


def make_job(folder: Path, *overrides: str) -> Job:
    """Makes a job of the tiny SFT recipe in a folder, with a toy policy in place of the worker group."""
    own = [
        f"logger.log_dir={folder / 'logs'}",
        f"checkpointing.checkpoint_dir={folder / 'checkpoints'}",
        *("checkpointing.enabled=true", "checkpointing.save_period=2", "sft.max_num_steps=4", "sft.val_period=2"),
        "data.train.num_problems=200",  # only checked: `build` makes its own
    ]
    recipe = config.load(RECIPE, [*own, *overrides])

    def build(policy, cluster):
        train, validation = make_arithmetic("train", 2, 100, seed=1), make_arithmetic("validation", 2, 10, seed=1)
        return make_sft(train, validation, max_tokens=16, batch=8, micro=8, validation=10)

    return with_build(Job.prepare(recipe).for_machine(Machine(has_gpus=False)), build)


def with_algorithm(job: Job, change) -> Job:
    """Returns the job with `change` applied to its algorithm once that is built."""

    def build(policy, cluster):
        algorithm = job.preparation.build(policy, cluster)
        change(algorithm)
        return algorithm

    return with_build(job, build)


def at_each_step(algorithm, act):
    """Calls `act` with the number of each step before it."""
    step = algorithm.step

    def acted(number, timer):
        act(number)
        return step(number, timer)

    algorithm.step = acted


@pytest.fixture(autouse=True)
def undrawn(request, monkeypatch) -> None:
    """Draws no pictures, which take most of the time, except in tests that use `drawn`."""
    if "drawn" not in request.fixturenames:
        for draw in ("plot_training", "plot_step"):
            monkeypatch.setattr(results, draw, lambda run_dir, *_: run_dir / METRICS_FILE)


@pytest.fixture
def drawn() -> None:
    """Makes a run draw its pictures."""


def make_session() -> Session:
    return Session(SimpleNamespace(has_gpus=False), Interrupt(), Console(file=StringIO(), width=120))


@pytest.fixture
def session() -> Session:
    return make_session()


def shown(session: Session) -> str:
    return session.console.file.getvalue()


def rows(folder: Path) -> list[dict]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    read = [json.loads(line) for line in lines]
    return [{name: value for name, value in row.items() if not name.startswith(MEASUREMENTS)} for row in read]


def test_a_run_leaves_its_metrics_log_picture_model_and_checkpoints(tmp_path, session, drawn):
    assert make_job(tmp_path).run(session) == Ending(StopReason.STEPS, is_saved=True)
    run_dir = tmp_path / "logs" / "exp_001"
    assert [row["step"] for row in rows(run_dir)] == [0, 1, 2, 3, 4]
    assert (run_dir / "sft.png").stat().st_size > 1000
    assert (run_dir / "step_timeline.png").stat().st_size > 1000
    assert "sft ends: all steps are done" in (run_dir / "run.log").read_text()
    assert load_file(run_dir / "hf" / "model.safetensors")["table"].shape == (196, 14)
    assert load_tokenizer(str(run_dir / "hf")).decode([0, 9, 2]) == "092"
    newest = tmp_path / "checkpoints" / "step_4"
    names = {"policy", "tokenizer", "recipe.yaml", "training_state.json", "manifest.json"}
    assert {path.name for path in newest.iterdir()} == names
    for place in ("metrics.jsonl", "run.log", "sft.png", "checkpoints", "hf"):
        assert place in shown(session)
    assert "SFT 3/4" in shown(session)
    assert "Where the time went" in shown(session)
    assert "│ train     │ optimizer state │ 4.000 │" in shown(session)


def test_checkpoints_for_failures_are_saved_and_kept_as_the_recipe_says(tmp_path, session):
    keys = ["save_period=4", "keep_top_k=1", "higher_is_better=true", "ft_save_period=3", "ft_keep_latest_k=2"]
    make_job(tmp_path, *(f"checkpointing.{key}" for key in keys), "sft.max_num_steps=10").run(session)
    # Saved: 3, 4, 6, 8, 9 and 10, the last. The validation loss falls, so that of 4 and 8 the first is the highest.
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"step_4", "step_9", "step_10"}


def test_a_run_that_starts_again_has_what_is_left_of_the_time_of_the_command(tmp_path, session):
    now = [0.0]
    session = replace(session, limit=TimeLimit(lambda: now[0]))
    limit = "checkpointing.checkpoint_must_save_by=00:00:01:00"
    make_job(tmp_path, limit, "sft.max_num_steps=2").run(session)
    now[0] = 60.0
    assert make_job(tmp_path, limit).run(session) == Ending(StopReason.TIME, is_saved=True)
    assert max(row["step"] for row in rows(tmp_path / "logs" / "exp_001")) == 2


def test_a_picture_that_cannot_be_drawn_ends_no_run(tmp_path, session, monkeypatch, drawn):
    def fail(run_dir):
        raise TypeError("an axis has no length")

    monkeypatch.setattr(results, "plot_step", fail)
    overrides = ("sft.max_num_steps=1", "checkpointing.enabled=false")
    assert make_job(tmp_path, *overrides).run(session) == Ending(StopReason.STEPS, is_saved=True)
    assert "The timeline could not be drawn: an axis has no length." in shown(session)
    assert (tmp_path / "logs" / "exp_001" / "sft.png").is_file()


def test_the_page_of_a_run_has_its_recipe_its_answers_and_its_peaks(tmp_path, session):
    def on_a_gpu(algorithm):
        algorithm.validation_answers = [JudgedAnswer("2+2=", "<b>4</b>", "4", 1.0)]
        algorithm._policy.memory_stats = lambda: {"gpu_peak_train_gib": 12.5}

    job = with_algorithm(make_job(tmp_path, "checkpointing.enabled=false"), on_a_gpu)
    replace(job, resolved=replace(job.resolved, peaks_gib={"train": 11.0})).run(session)
    run_dir = tmp_path / "logs" / "exp_001"
    text = Page(run_dir / "report.html").text
    for part in ("SFT run exp_001", "Ended after step 4: all steps are done.", "sft_tiny_cpu.yaml", "<b>4</b>"):
        assert part in text
    assert "training12.5011.00" in text
    assert "command line: checkpointing.enabled=false" in text
    assert f"report: {run_dir / 'report.html'}" in shown(session)
    log = (run_dir / "run.log").read_text()
    assert "GPU: training" in log
    assert log.count("training 12.50 GiB, 1.50 more than planned") == 1
    assert "1.50 more than planned" in " ".join(shown(session).split())


def test_an_interrupted_run_has_a_page(tmp_path, session):
    def interrupted(number):
        session.interrupt.requested = number == 2

    with_algorithm(make_job(tmp_path), lambda algorithm: at_each_step(algorithm, interrupted)).run(session)
    assert "Ended after step 2: interrupted." in Page(tmp_path / "logs/exp_001/report.html").text


@pytest.mark.parametrize("num_done", [0, 2])
def test_a_run_that_fails_after_a_step_has_a_page(tmp_path, session, num_done):
    def failing(number):
        assert number <= num_done, "failed"

    with pytest.raises(AssertionError):
        with_algorithm(make_job(tmp_path), lambda algorithm: at_each_step(algorithm, failing)).run(session)
    page = tmp_path / "logs/exp_001/report.html"
    assert page.exists() is (num_done > 0)
    if num_done:
        assert "Ended after step 2: failed: AssertionError: failed" in Page(page).text
        assert f"report: {page}" in shown(session)


def test_a_checkpoint_of_another_algorithm_is_not_resumed(two_checkpoints, session):
    other = replace(make_job(two_checkpoints, "++checkpointing.on_damaged=previous"), algorithm="dpo")
    for call in (lambda: other.check_checkpoint(session.console), lambda: other.run(session)):
        with pytest.raises(CheckpointError, match="step_4 is not of a run of dpo"):
            call()
    cut(two_checkpoints / "checkpoints" / "step_4" / "recipe.yaml")
    with pytest.raises(CheckpointError, match="step_2 is not of a run of dpo"):
        other.run(session)
    assert {path.name for path in (two_checkpoints / "checkpoints").iterdir()} == {"step_2", "step_4"}


@pytest.mark.parametrize("is_killed_while_saving", [False, True])
def test_a_second_run_goes_on_where_the_first_has_saved(tmp_path, session, is_killed_while_saving):
    make_job(tmp_path / "whole").run(session)
    num_steps = 3 if is_killed_while_saving else 2
    make_job(tmp_path / "parts", f"sft.max_num_steps={num_steps}", "sft.val_at_end=false").run(session)
    leftover = tmp_path / "parts" / "checkpoints" / "tmp_step_3"
    if is_killed_while_saving:  # step_2 is the newest complete one, and step 3 is done and logged again
        leftover.with_name("step_3").rename(leftover)
    else:
        leftover.mkdir()
    make_job(tmp_path / "parts").run(session)
    assert rows(tmp_path / "parts/logs/exp_001") == rows(tmp_path / "whole/logs/exp_001")
    assert not (tmp_path / "parts/logs/exp_002").exists()
    assert not leftover.exists()
    if not is_killed_while_saving:
        assert "with other values than before: sft.max_num_steps, sft.val_at_end." in shown(session)


def test_row_tokens_are_chosen_once_told_and_kept_in_checkpoints(tmp_path):
    packing, built = "policy.sequence_packing", []
    rows_of = [f"{packing}.enabled=true", f"{packing}.train_mb_tokens=auto"]

    def run_on_gpus(num_steps):
        session = replace(make_session(), cluster=SimpleNamespace(has_gpus=True))
        job = make_job(tmp_path, *rows_of, f"sft.max_num_steps={num_steps}", "sft.export_hf=false")
        job = job.for_machine(Machine(has_gpus=True, gpu_bytes=80 << 30))
        build = job.preparation.build

        def recorded(policy, cluster):
            built.append(policy["sequence_packing"]["train_mb_tokens"])
            return build(policy, cluster)

        with_build(job, recorded).run(session)
        return shown(session)

    text = run_on_gpus(2)
    tokens = built[0]
    assert f"packed rows of training have up to {tokens:,} tokens: they take" in text
    written = yaml.safe_load((tmp_path / "checkpoints" / "step_2" / "recipe.yaml").read_text())
    assert written["policy"]["sequence_packing"]["train_mb_tokens"] == tokens > 16
    assert "with other values than before: sft.max_num_steps." in run_on_gpus(4)
    assert built == [tokens, tokens]


def test_skipped_steps_of_a_resumed_run_count_on(tmp_path, session):
    def run(max_num_steps):
        policies = []

        def skipping(algorithm):
            policies.append(algorithm._policy)
            train = algorithm._policy.train
            algorithm._policy.train = lambda *batch, **sizes: train(*batch, **sizes) | {"num_skipped": 1}

        with_algorithm(make_job(tmp_path, f"sft.max_num_steps={max_num_steps}"), skipping).run(session)
        return policies[0], RunState.read(tmp_path / "checkpoints" / f"step_{max_num_steps}")

    assert run(3)[1].num_skipped == 3
    policy, state = run(5)
    assert (policy.num_skipped, state.num_skipped) == (3, 5)


def test_without_checkpoints_every_run_is_a_new_one(tmp_path, session):
    for _ in range(2):
        make_job(tmp_path, "checkpointing.enabled=false").run(session)
    assert rows(tmp_path / "logs/exp_001") == rows(tmp_path / "logs/exp_002")
    assert not (tmp_path / "checkpoints").exists()


def test_an_interrupted_run_exports_nothing(tmp_path, session):
    session.interrupt.requested = True
    assert make_job(tmp_path).run(session).reason is StopReason.INTERRUPTED
    assert not (tmp_path / "logs" / "exp_001" / "hf").exists()
    assert "ended after step 0: interrupted" in shown(session)


@pytest.mark.parametrize("moved", [False, True])
def test_two_runs_cannot_write_into_one_run_folder(tmp_path, session, moved):
    make_job(tmp_path, "sft.max_num_steps=2").run(session)
    folder, checkpoints = tmp_path / "logs/exp_001", tmp_path / "checkpoints"
    before = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    if moved:  # their state names the same run folder
        checkpoints = checkpoints.rename(tmp_path / "moved")
    with FolderLock(folder, "a run"), pytest.raises(LockedError, match="exp_001 is in use by process"):
        make_job(tmp_path, f"checkpointing.checkpoint_dir={checkpoints}").run(session)
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize("copied", ["checkpoints", "all", "nothing"])
def test_a_branch_of_a_run_has_a_run_folder_of_its_own(tmp_path, session, copied):
    make_job(tmp_path, "sft.val_at_end=false").run(session)
    before = {path: path.read_bytes() for path in (tmp_path / "logs/exp_001").rglob("*") if path.is_file()}
    checkpoints, logs = tmp_path / "checkpoints", tmp_path / "logs"
    if copied != "nothing":
        checkpoints = Path(shutil.copytree(checkpoints, tmp_path / "copy"))
    if copied != "checkpoints":
        logs = tmp_path / "other_logs"
    shutil.rmtree(checkpoints / "step_4")
    folders = [f"logger.log_dir={logs}", f"checkpointing.checkpoint_dir={checkpoints}"]
    branch = logs / ("exp_002" if copied == "checkpoints" else "exp_001")
    with FolderLock(tmp_path / "logs/exp_001", "the first run"):
        make_job(tmp_path, *folders, "sft.max_num_steps=3").check_checkpoint(session.console)
        make_job(tmp_path, *folders, "sft.max_num_steps=3").run(session)
    told = f"The run folder is {branch}, and {tmp_path / 'logs/exp_001'} stays as it is: this is a branch of that run."
    assert told in shown(session)
    assert {path: path.read_bytes() for path in before} == before
    assert [row["step"] for row in rows(branch)] == [0, 1, 2, 3]
    assert rows(branch)[:3] == rows(tmp_path / "logs/exp_001")[:3]
    make_job(tmp_path, *folders).run(session)  # it goes on in its own folder
    assert [row["step"] for row in rows(branch)] == [0, 1, 2, 3, 4]
    assert len(list(logs.glob("exp_*"))) == int(branch.name[-1])


def test_a_run_that_goes_on_elsewhere_says_that_its_metrics_are_not_there(tmp_path, session, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_job(Path(), "sft.max_num_steps=2").run(session)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    make_job(Path(".."), "sft.max_num_steps=3").run(session)
    assert f"no {tmp_path}/elsewhere/logs/exp_001/{METRICS_FILE}. A run goes on" in shown(session)


def test_the_warm_start_is_given_free_once_its_model_has_been_read(tmp_path, session):
    calls = []
    job = with_algorithm(make_job(tmp_path), lambda algorithm: calls.append("built"))
    started = job.starting_from(tmp_path / "hf", lambda: calls.append("free"))
    assert started.config["policy"]["model_name"] == str(tmp_path / "hf")
    assert started.config["policy"]["hf_config"] is None
    assert job.config["policy"]["hf_config"] is not None
    started.run(session)
    assert calls == ["built", "free"]


def test_a_signal_behind_the_last_step_exports_nothing(tmp_path, session):
    stopped = []

    def signalled(algorithm):
        algorithm.shutdown = lambda: pytest.fail("what was stopped at once is left to the cluster's end")
        algorithm.stop = lambda: stopped.append("what runs beside the loop")
        algorithm.export_hf = lambda folder: os.kill(os.getpid(), signal.SIGTERM)

    with session.interrupt, pytest.raises(Stopped):
        with_algorithm(make_job(tmp_path), signalled).run(session)
    assert stopped == ["what runs beside the loop"]
    newest = tmp_path / "checkpoints" / "step_4"
    assert str(session.interrupt.progress) == f"No step is lost. The same command resumes from {newest}."


def test_an_interrupted_warm_start_has_lost_its_steps(tmp_path, session):
    def signalled(algorithm):
        at_each_step(algorithm, lambda number: os.kill(os.getpid(), signal.SIGINT))

    with session.interrupt:
        job = with_algorithm(make_job(tmp_path), signalled)
        assert run_warm_start(job, tmp_path / "warm_start", session) is None
    assert session.interrupt.exit_status == 1
    lost = "Step 1 is lost. The same command starts the warm start from the beginning"
    assert str(session.interrupt.progress).startswith(lost)


def test_a_warm_start_is_run_once_for_a_recipe(tmp_path, session):
    folder = tmp_path / "warm_start"
    assert run_warm_start(make_job(tmp_path), folder, session) == folder / "hf"
    assert (folder / "hf" / "model.safetensors").exists()
    assert not (tmp_path / "checkpoints").exists()
    first = (folder / "metrics.jsonl").stat().st_mtime_ns
    assert run_warm_start(make_job(tmp_path), folder, session) == folder / "hf"
    assert (folder / "metrics.jsonl").stat().st_mtime_ns == first
    assert "is used again" in shown(session)
    job = make_job(tmp_path)
    policy = job.config["policy"]
    shared = policy | {"megatron_cfg": policy["megatron_cfg"] | {"tensor_model_parallel_size": 2}}
    shared["train_micro_batch_size"] = policy["train_micro_batch_size"] // 2
    shared["sequence_packing"] = policy["sequence_packing"] | {"train_mb_tokens": 8}  # follows from it in recipes
    more_ranks = job.config | {"cluster": {"gpus_per_node": 2, "num_nodes": 1}, "policy": shared}
    run_warm_start(replace(job, config=more_ranks), folder, session)
    assert (folder / "metrics.jsonl").stat().st_mtime_ns == first
    longer = make_job(tmp_path, "sft.max_num_steps=5")
    run_warm_start(replace(longer, config=longer.config | {"cluster": more_ranks["cluster"]}), folder, session)
    assert [row["step"] for row in rows(folder)] == [0, 1, 2, 3, 4, 5]
    assert "other values of sft.max_num_steps: " in shown(session)


def test_a_finished_warm_start_stays_until_that_of_another_recipe_is_done(tmp_path, session):
    folder, job = tmp_path / "warm_start", make_job(tmp_path)
    run_warm_start(job, folder, session)
    model = (folder / "hf" / "model.safetensors").read_bytes()
    other = make_job(tmp_path, "sft.max_num_steps=5")
    session.interrupt.requested = True
    assert run_warm_start(other, folder, session) is None  # an interrupted one is not used
    assert (folder / "hf" / "model.safetensors").read_bytes() == model
    assert "sft.max_num_steps" in shown(session)
    session.interrupt.requested = False
    assert run_warm_start(job, folder, session) == folder / "hf"
    assert shown(session).count("is used again") == 1
    assert run_warm_start(other, folder, session) == folder / "hf"
    assert (folder / "hf" / "model.safetensors").read_bytes() != model
    assert [path.name for path in tmp_path.iterdir()] == ["warm_start"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs four steps with checkpoints of steps 2 and 4, and another run of six; paths are relative."""
    folder = tmp_path_factory.mktemp("runs")
    with contextlib.chdir(folder):
        make_job(Path("four")).run(make_session())
        make_job(Path("six"), "sft.max_num_steps=6").run(make_session())
    return folder


@pytest.fixture
def two_checkpoints(runs, tmp_path, monkeypatch):
    """Copies the run of four steps, as if it had been run here."""
    shutil.copytree(runs / "four", tmp_path / "four")
    monkeypatch.chdir(tmp_path)
    return Path("four")


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def cut(path):
    path.write_bytes(path.read_bytes()[:-7])


DAMAGES = (
    ("policy/state.pt", flip_a_bit, "policy/state.pt has changed since it was written"),
    ("training_state.json", flip_a_bit, "training_state.json has changed"),
    ("policy/state.pt", cut, r"policy/state.pt has \d+ bytes, expected \d+"),
    ("policy/state.pt", Path.unlink, "policy/state.pt is missing"),
    ("recipe.yaml", Path.unlink, "recipe.yaml is missing"),
    ("manifest.json", flip_a_bit, "manifest.json is not what was written"),
    ("manifest.json", cut, "manifest.json is not what was written"),
    ("manifest.json", Path.unlink, "manifest.json is missing"),
    ("tokenizer/tokenizer.json", Path.unlink, "tokenizer/tokenizer.json is missing"),
)


def test_a_damaged_checkpoint_is_named_with_its_file_and_the_way_to_the_older_one(two_checkpoints, session):
    job, newest = make_job(two_checkpoints, "sft.max_num_steps=6"), two_checkpoints / "checkpoints" / "step_4"
    for name, spoil, what in DAMAGES:
        content = (newest / name).read_bytes()
        spoil(newest / name)
        # Only ranks read what ranks wrote, so the driver asks them before they load.
        notice = partial(job.run, session) if "has changed" in what else partial(job.check_checkpoint, session.console)
        with pytest.raises(DamagedCheckpointError, match=what) as caught:
            notice()
        (newest / name).write_bytes(content)
        error = str(caught.value)
        assert error.startswith(f"Checkpoint {newest} is damaged: ")
        assert "the one before it, step_2, run the same command with ++checkpointing.on_damaged=prev" in error
    job.check_checkpoint(session.console)


@pytest.mark.parametrize(("name", "spoil", "what"), DAMAGES[:2])
def test_a_run_can_go_on_from_the_newest_checkpoint_that_is_whole(runs, two_checkpoints, session, name, spoil, what):
    checkpoints = two_checkpoints / "checkpoints"
    spoil(checkpoints / "step_4" / name)
    overrides = ["sft.max_num_steps=6", "++checkpointing.on_damaged=previous"]
    assert make_job(two_checkpoints, *overrides).run(session).is_saved
    assert rows(two_checkpoints / "logs/exp_001") == rows(runs / "six/logs/exp_001")
    names = {path.name for path in checkpoints.iterdir()}
    assert names == {"step_2", "step_4", "step_6", "damaged_step_4"}
    told = " ".join(shown(session).split())
    assert re.search(what, told)
    assert f"It is kept as {checkpoints / 'damaged_step_4'}, and the run resumes from step_2." in told


def test_no_run_starts_anew_because_all_checkpoints_are_damaged(two_checkpoints, session):
    for step in (2, 4):
        flip_a_bit(two_checkpoints / "checkpoints" / f"step_{step}" / "policy" / "state.pt")
    message = r"Every checkpoint is damaged: .*step_4 is .*step_2 is .*start from the beginning"
    with pytest.raises(DamagedCheckpointError, match=message):
        make_job(two_checkpoints, "++checkpointing.on_damaged=previous").run(session)
    assert len(list((two_checkpoints / "checkpoints").iterdir())) == 2


def test_files_that_are_as_they_were_written_but_of_no_use_are_not_called_damaged(two_checkpoints, session):
    newest = two_checkpoints / "checkpoints" / "step_4"
    state = newest / "training_state.json"
    state.write_text(json.dumps({"step": 4}))  # as another version might
    write_manifest(newest, {})
    with pytest.raises(CheckpointError, match=r"step_4 cannot be resumed: training_state.json .*KeyError") as caught:
        make_job(two_checkpoints, "++checkpointing.on_damaged=previous").run(session)
    assert not isinstance(caught.value, DamagedCheckpointError)
    assert {path.name for path in newest.parent.iterdir()} == {"step_2", "step_4"}


def test_an_error_of_loading_sets_no_checkpoint_aside(two_checkpoints, session):
    def fail(folder, *_):
        raise CheckpointError(f"Checkpoint {folder} cannot be loaded")

    job = make_job(two_checkpoints, "++checkpointing.on_damaged=previous", "sft.max_num_steps=6")
    with pytest.raises(CheckpointError, match="step_4 cannot be loaded"):
        with_algorithm(job, lambda algorithm: setattr(algorithm, "load", fail)).run(session)
    assert {path.name for path in (two_checkpoints / "checkpoints").iterdir()} == {"step_2", "step_4"}


SPOILT = [
    (lambda path: path.write_text("a file"), "step_6 is no folder, but a checkpoint of step 6 has that name"),
    (lambda path: path.symlink_to("nothing"), "step_6 is no folder, but a checkpoint of step 6 has that name"),
    (lambda path: path.with_name("step_4").rename(path), r"its training_state.json is of step 4; move it"),
    (lambda path: path.mkdir(), r"step_6 cannot be resumed: training_state.json is missing; move it"),
]


@pytest.mark.parametrize(("spoil", "what"), SPOILT)
def test_a_name_that_a_later_checkpoint_needs_is_refused_at_the_start(two_checkpoints, session, spoil, what):
    spoil(two_checkpoints / "checkpoints" / "step_6")
    before = sorted((two_checkpoints / "checkpoints").iterdir())
    for on_damaged in ("error", "previous"):
        job = make_job(two_checkpoints, "sft.max_num_steps=8", f"++checkpointing.on_damaged={on_damaged}")
        with pytest.raises(CheckpointError, match=what) as caught:
            job.check_checkpoint(session.console)
        assert "\n" not in str(caught.value)
    assert sorted((two_checkpoints / "checkpoints").iterdir()) == before


def test_metrics_and_the_last_state_that_found_no_space_are_told_at_the_end(tmp_path, session, drawn):
    with files_of_at_most(3000):  # a checkpoint's table is larger
        ending = make_job(tmp_path, "sft.export_hf=false", "logger.tensorboard_enabled=false").run(session)
    assert ending == Ending(StopReason.STEPS, is_saved=False)
    assert not list((tmp_path / "checkpoints").iterdir())
    told = " ".join(shown(session).split())
    assert "Step 2 is not saved" in told
    assert "without a checkpoint of its last step, 4: there is no checkpoint" in told


def test_an_export_for_which_there_is_no_space_is_said_in_a_sentence(tmp_path, session, drawn):
    with files_of_at_most(3000), pytest.raises(DiskFullError, match="hf cannot be written: File too large"):
        make_job(tmp_path, "checkpointing.enabled=false", "logger.tensorboard_enabled=false").run(session)


def test_all_files_have_the_mode_of_the_users_umask(tmp_path, session, drawn):
    before = os.umask(0o027)
    try:
        make_job(tmp_path).run(session)
    finally:
        os.umask(before)
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in tmp_path.rglob("*") if path.is_file()}
    assert {"metrics.jsonl", "run.log", "manifest.json", "tokenizer.json", "recipe.yaml", "sft.png"} <= modes.keys()
    assert set(modes.values()) == {"0o640"}, modes


class WatchedGpus:
    """Returns GPU readings that arrive between the steps."""

    is_closed = False

    def of_step(self, step):
        return {"performance/gpus/node0/gpu0/power_w": 100.0 + step}

    def close(self):
        self.is_closed = True


def test_metrics_of_gpus_are_in_the_row_of_their_step(tmp_path, session, monkeypatch):
    asked, watched = [], WatchedGpus()
    watch = "nemo_offload_rl.run.job.watch_gpus"
    monkeypatch.setattr(watch, lambda nodes, **intervals: asked.append((nodes, intervals)) or watched)
    cluster = SimpleNamespace(has_gpus=True, num_nodes=2, node_ids=["a", "b"])
    overrides = ["logger.monitor_gpus=true", "logger.gpu_monitoring.flush_interval=3"]
    make_job(tmp_path, *overrides).for_machine(Machine(has_gpus=True)).run(replace(session, cluster=cluster))
    assert asked == [(["a", "b"], {"collection_interval_s": 10, "flush_interval_s": 3})]
    lines = (tmp_path / "logs/exp_001/metrics.jsonl").read_text().splitlines()
    powers = [json.loads(line)["performance/gpus/node0/gpu0/power_w"] for line in lines]
    assert powers == [100.0, 101.0, 102.0, 103.0, 104.0]
    assert watched.is_closed


def test_checkpoints_that_are_written_beside_the_run_are_those_that_are_written_at_once(tmp_path, session):
    aside = ["+policy.megatron_cfg.checkpoint.async_save=true"]
    make_job(tmp_path / "at_once", "sft.max_num_steps=5").run(session)
    make_job(tmp_path / "beside", "sft.max_num_steps=5", *aside).run(session)
    for step in (2, 4, 5):
        ours, theirs = (tmp_path / run / f"checkpoints/step_{step}" for run in ("beside", "at_once"))
        names = {str(path.relative_to(ours)) for path in ours.rglob("*") if path.is_file()}
        assert names == {str(path.relative_to(theirs)) for path in theirs.rglob("*") if path.is_file()}
        assert (ours / "policy/state.pt").read_bytes() == (theirs / "policy/state.pt").read_bytes()
    assert rows(tmp_path / "beside/logs/exp_001") == rows(tmp_path / "at_once/logs/exp_001")
    make_job(tmp_path / "beside", "sft.max_num_steps=6", *aside).run(session)
    make_job(tmp_path / "whole", "sft.max_num_steps=6").run(session)
    assert rows(tmp_path / "beside/logs/exp_001")[-1] == rows(tmp_path / "whole/logs/exp_001")[-1]
