import json
import shutil
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from safetensors.torch import load_file
from support.toy_policy import ToyPolicy

from nemo_offload_rl import config
from nemo_offload_rl.algorithms.interrupt import Interrupt
from nemo_offload_rl.algorithms.job import Job, Session
from nemo_offload_rl.algorithms.metric_names import MEASUREMENTS
from nemo_offload_rl.algorithms.sft import SFT, Validation
from nemo_offload_rl.algorithms.step_end import StopReason
from nemo_offload_rl.algorithms.warm_start import run_warm_start
from nemo_offload_rl.data.arithmetic import make_arithmetic
from nemo_offload_rl.data.loader import ProblemLoader
from nemo_offload_rl.data.prompts import PromptFormat
from nemo_offload_rl.data.tokenizer import load_tokenizer
from nemo_offload_rl.storage.lock import FolderLock, LockedError

RECIPE = Path(__file__).parents[3] / "examples" / "configs" / "sft_tiny_cpu.yaml"


def make_job(folder: Path, *overrides: str) -> Job:
    """The tiny SFT recipe in a folder, with a toy policy in place of the worker group."""
    recipe = config.load(
        RECIPE,
        [
            f"logger.log_dir={folder / 'logs'}",
            f"checkpointing.checkpoint_dir={folder / 'checkpoints'}",
            "checkpointing.enabled=true",
            "checkpointing.save_period=2",
            "sft.max_num_steps=4",
            "sft.val_period=2",
            *overrides,
        ],
    )

    def build(policy, cluster):
        return SFT(
            policy=ToyPolicy(),
            example_format=PromptFormat(load_tokenizer("arithmetic"), 16),
            examples=ProblemLoader(make_arithmetic("train", 2, 100, seed=1), shuffle=True, seed=1),
            validation=Validation(make_arithmetic("validation", 2, 10, seed=1), micro_batch_size=4),
            train_global_batch_size=8,
            train_micro_batch_size=8,
            save_optimizer=True,
        )

    job = Job.prepare(recipe)
    return replace(job, preparation=replace(job.preparation, build=build))


@pytest.fixture
def session() -> Session:
    return Session(SimpleNamespace(has_gpus=False), Interrupt(), Console(file=StringIO(), width=120))


def shown(session: Session) -> str:
    return session.console.file.getvalue()


def rows(folder: Path) -> list[dict]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [
        {name: value for name, value in json.loads(line).items() if not name.startswith(MEASUREMENTS)} for line in lines
    ]


def test_a_run_leaves_its_metrics_log_picture_model_and_checkpoints(tmp_path, session):
    assert make_job(tmp_path).run(session) is StopReason.STEPS
    run_dir = tmp_path / "logs" / "exp_001"
    assert [row["step"] for row in rows(run_dir)] == [0, 1, 2, 3, 4]
    assert (run_dir / "sft.png").stat().st_size > 1000
    assert "sft ends: all steps are done" in (run_dir / "run.log").read_text()
    assert load_file(run_dir / "hf" / "model.safetensors")["table"].shape == (196, 14)
    assert load_tokenizer(str(run_dir / "hf")).decode([0, 9, 2]) == "092"
    newest = tmp_path / "checkpoints" / "step_4"
    assert {path.name for path in newest.iterdir()} == {"policy", "tokenizer", "recipe.yaml", "training_state.json"}
    for place in ("metrics.jsonl", "run.log", "sft.png", "checkpoints", "hf"):
        assert place in shown(session)
    assert "SFT 3/4" in shown(session)
    assert "Where the time went" in shown(session)
    assert "│ train     │ optimizer state │ 4.000 │" in shown(session)


def test_a_second_run_goes_on_where_the_first_ended(tmp_path, session):
    make_job(tmp_path / "whole").run(session)
    make_job(tmp_path / "parts", "sft.max_num_steps=2", "sft.val_at_end=false").run(session)
    leftover = tmp_path / "parts" / "checkpoints" / "tmp_step_3"
    leftover.mkdir()
    make_job(tmp_path / "parts").run(session)
    assert rows(tmp_path / "parts/logs/exp_001") == rows(tmp_path / "whole/logs/exp_001")
    assert not (tmp_path / "parts/logs/exp_002").exists()
    assert not leftover.exists()
    assert "with other values than before: sft.max_num_steps, sft.val_at_end." in shown(session)


def test_steps_after_the_checkpoint_are_done_and_logged_again(tmp_path, session):
    make_job(tmp_path / "whole").run(session)
    make_job(tmp_path / "parts", "sft.max_num_steps=3", "sft.val_at_end=false").run(session)
    last = tmp_path / "parts" / "checkpoints" / "step_3"
    last.rename(last.with_name("tmp_step_3"))  # as if killed while saving: the newest whole one is step_2
    make_job(tmp_path / "parts").run(session)
    assert rows(tmp_path / "parts/logs/exp_001") == rows(tmp_path / "whole/logs/exp_001")


def test_without_checkpoints_every_run_is_a_new_one(tmp_path, session):
    for _ in range(2):
        make_job(tmp_path, "checkpointing.enabled=false").run(session)
    assert rows(tmp_path / "logs/exp_001") == rows(tmp_path / "logs/exp_002")
    assert not (tmp_path / "checkpoints").exists()


def test_an_interrupted_run_exports_nothing(tmp_path, session):
    session.interrupt.requested = True
    assert make_job(tmp_path).run(session) is StopReason.INTERRUPTED
    assert not (tmp_path / "logs" / "exp_001" / "hf").exists()
    assert "ended after step 0: interrupted" in shown(session)


def test_two_runs_cannot_write_into_one_run_folder(tmp_path, session):
    make_job(tmp_path, "sft.max_num_steps=2").run(session)
    before = (tmp_path / "logs/exp_001/metrics.jsonl").read_bytes()
    shutil.copytree(tmp_path / "checkpoints", tmp_path / "copy")  # whose state names the same run folder
    with (
        FolderLock(tmp_path / "logs/exp_001", "a run"),
        pytest.raises(LockedError, match="exp_001 is in use by process"),
    ):
        make_job(tmp_path, f"checkpointing.checkpoint_dir={tmp_path / 'copy'}").run(session)
    assert (tmp_path / "logs/exp_001/metrics.jsonl").read_bytes() == before


def test_the_warm_start_is_given_free_once_its_model_has_been_read(tmp_path, session):
    calls = []
    job = make_job(tmp_path)
    build = job.preparation.build
    job = replace(
        job,
        preparation=replace(job.preparation, build=lambda *given: [calls.append("built"), build(*given)][1]),
    ).starting_from(tmp_path, lambda: calls.append("free"))
    job.run(session)
    assert calls == ["built", "free"]


def test_a_warm_start_is_run_once_for_a_recipe(tmp_path, session):
    folder = tmp_path / "warm_start"
    assert run_warm_start(make_job(tmp_path), folder, session) == folder / "hf"
    assert (folder / "hf" / "model.safetensors").exists()
    assert not (tmp_path / "checkpoints").exists()
    first = (folder / "metrics.jsonl").stat().st_mtime_ns
    assert run_warm_start(make_job(tmp_path), folder, session) == folder / "hf"
    assert (folder / "metrics.jsonl").stat().st_mtime_ns == first
    assert "is used again" in shown(session)
    run_warm_start(make_job(tmp_path, "sft.max_num_steps=5"), folder, session)
    assert [row["step"] for row in rows(folder)] == [0, 1, 2, 3, 4, 5]


def test_an_interrupted_warm_start_is_not_used(tmp_path, session):
    folder = tmp_path / "warm_start"
    session.interrupt.requested = True
    assert run_warm_start(make_job(tmp_path), folder, session) is None
    session.interrupt.requested = False
    assert run_warm_start(make_job(tmp_path), folder, session) == folder / "hf"
    assert [row["step"] for row in rows(folder)] == [0, 1, 2, 3, 4]


def test_a_job_can_start_from_a_folder(tmp_path):
    job = make_job(tmp_path)
    started = job.starting_from(tmp_path / "hf", lambda: None)
    assert started.config["policy"]["model_name"] == str(tmp_path / "hf")
    assert started.config["policy"]["hf_config"] is None
    assert job.config["policy"]["hf_config"] is not None
