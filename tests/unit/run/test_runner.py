"""Tests runs from their start: mistakes, folders in use, restarts, and failures."""

import os
import socket
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from ray.exceptions import ActorDiedError, OutOfMemoryError

from nemo_offload_rl.generation.interface import GenerationError
from nemo_offload_rl.placement.nodes import NodeLostError
from nemo_offload_rl.plan.decisions import Resolved
from nemo_offload_rl.refit.loads import EngineLostError
from nemo_offload_rl.run import runner
from nemo_offload_rl.run.failures import Restarts, add_failure_summary
from nemo_offload_rl.run.job import Job
from nemo_offload_rl.run.runner import EXIT_WRONG_RECIPE, run
from nemo_offload_rl.run.train_loop import TimeLimit
from nemo_offload_rl.storage.lock import FolderLock
from nemo_offload_rl.storage.manifest import DamagedCheckpointError
from nemo_offload_rl.worker.errors import WorkerError

CONFIGS = Path(__file__).parents[3] / "examples" / "configs"
WITHOUT_FOLDERS = ["checkpointing.enabled=false", "logger.log_dir=/tmp/logs"]


@pytest.fixture(autouse=True)
def as_in_a_process_and_folder_of_its_own(monkeypatch, tmp_path):
    """Gives each test its own folder and process state: others may run a cluster, or hold the recipe's lock."""
    monkeypatch.setattr("nemo_offload_rl.placement.cluster.starts_ray_here", lambda: True)
    monkeypatch.chdir(tmp_path)


LARGER, WHY = "policy.hf_config.vocab_size=99 ~warm_start", "which is no token of policy.tokenizer.name"


MISTAKES = [
    ("grpo_tiny_cpu", "grpo.max_num_step=3", "grpo", "grpo.max_num_steps"),
    ("sft_tiny_cpu", "sft.seed=1", "grpo", "is a recipe of sft, not of grpo: run it with examples/run_sft.py"),
    ("grpo_tiny_cpu", "data.validation.num_problems=999", "grpo", "only 661 additions of 2-digit numbers"),
    ("grpo_tiny_cpu", "policy.tokenizer.name=/no/such/folder", "grpo", "tokenizer"),
    ("absent", "a.b=1", "grpo", "absent.yaml"),
    ("sft_tiny_cpu", "policy.model_name=./nope policy.hf_config=null", "sft", "there is no such folder"),
    ("grpo_tiny_cpu", f"{LARGER} policy.generation.stop_token_ids=[50]", "grpo", f"stop_token_ids has 50, {WHY}"),
    ("sft_tiny_cpu", "logger.log_dir=/dev/null/logs", "sft", "the folder /dev/null/logs cannot be used"),
    ("grpo_tiny_cpu", "policy.generation.stop_strings=['=','1x']", "grpo", "stop_strings has '1x', in which 'x'"),
]


@pytest.mark.parametrize(("recipe", "overrides", "algorithm", "message"), MISTAKES)
def test_mistakes_are_one_message_and_status_2(recipe, overrides, algorithm, message, capsys):
    assert run(CONFIGS / f"{recipe}.yaml", overrides.split(), algorithm) == EXIT_WRONG_RECIPE
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""


def started(overrides):
    """Starts a run in a new process; returns what it says, once it has ended without importing torch or Ray."""
    code = (
        "import sys; from nemo_offload_rl.run.runner import run; "
        f"status = run({str(CONFIGS / 'grpo_tiny_cpu.yaml')!r}, {overrides!r}, 'grpo'); "
        "print(status, 'torch' in sys.modules, 'ray' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["2", "False", "False"]
    return result.stderr


def test_missing_files_are_all_named_before_torch_is_imported(tmp_path):
    """Tests a run; `validate` checks only keys and values, and `validate --deep` checks what a run does."""
    (tmp_path / "rows.jsonl").write_text("{}\n")
    dataset = "{{_override_: true, dataset_name: {}, data_path: {}, input_key: q, output_key: a}}"
    overrides = [
        f"data.train={dataset.format('ResponseDataset', 'row.jsonl')}",
        f"data.validation={dataset.format('HFDataset', 'rows.jsonl')}",
        "+data.default.prompt_file=/absent/prompt.txt",
        "policy.tokenizer.name=./absent",
        "++warm_start.overrides=['+data.default.system_prompt_file=nope.txt','policy.tokenizer.name=./absent']",
    ]
    code = (
        "import sys; from nemo_offload_rl.run.runner import run; from nemo_offload_rl.cli import main\n"
        "recipe, overrides = sys.argv[1], sys.argv[2:]\n"
        "print(main(['validate', recipe, *overrides]), file=sys.stderr)\n"
        "print(main(['validate', '--deep', recipe, *overrides]), file=sys.stderr)\n"
        "print(run(recipe, overrides, 'grpo'), 'torch' in sys.modules, file=sys.stderr)"
    )
    arguments = [sys.executable, "-c", code, str(CONFIGS / "grpo_tiny_cpu.yaml"), *overrides]
    result = subprocess.run(arguments, capture_output=True, text=True, check=True, cwd=tmp_path)
    _, plain, rest = result.stderr.partition("0\n")
    assert plain, result.stderr
    deep, _, of_run = rest.partition("\n2\n")
    assert of_run.splitlines()[-1] == "2 False"
    for text in (deep, of_run):
        for message in (
            f"data.train.data_path: there is no file row.jsonl in {tmp_path}, where this was started; did you mean ",
            "data.validation.data_path: rows.jsonl is a file, but dataset_name is HFDataset: ResponseDataset reads one",
            "data.default.prompt_file: there is no file /absent/prompt.txt\n",
            "policy.tokenizer.name: there is no folder absent in",
            "data.default.system_prompt_file: there is no file nope.txt in",
        ):
            assert message in text


def test_a_wrong_recipe_is_answered_before_torch_is_imported():
    assert "grpo.nonsense" in started(["~warm_start", "grpo.nonsense=1"])
    assert "policy.model_name" in started(["~warm_start", "policy.model_name=./nope", "policy.hf_config=null"])


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["logger.log_dir=/tmp/logs"], "checkpointing.checkpoint_dir is results/"),
        (["checkpointing.enabled=false"], "logger.log_dir is logs,"),
        ([*WITHOUT_FOLDERS, "grpo.debug.save_rollouts=rollouts"], "grpo.debug.save_rollouts is rollouts,"),
    ],
)
def test_folders_of_a_run_on_a_cluster_are_absolute(overrides, key, monkeypatch, capsys):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert run(CONFIGS / "grpo_tiny_cpu.yaml", ["~warm_start", *overrides], "grpo") == EXIT_WRONG_RECIPE
    assert key in capsys.readouterr().err


@pytest.mark.parametrize("folder", ["checkpoints", "logs/warm_start"])
def test_a_second_start_is_told_by_whom_the_folder_is_in_use_before_torch_is_imported(tmp_path, folder):
    overrides = [f"checkpointing.checkpoint_dir={tmp_path / 'checkpoints'}", f"logger.log_dir={tmp_path / 'logs'}"]
    with FolderLock(tmp_path / folder, "a run", is_beside=folder == "logs/warm_start"):
        error = started(overrides)
    assert f"{tmp_path / folder} is in use by process {os.getpid()} of host {socket.gethostname()}" in error
    assert not list(tmp_path.rglob("*"))


def test_a_restart_has_the_time_limit_of_the_command(monkeypatch, capsys):
    limits = []

    def attempt(*arguments):
        limits.extend(argument for argument in arguments if isinstance(argument, TimeLimit))
        if len(limits) == 1:
            error = WorkerError(0, "train", ActorDiedError(), "")
            error.add_note("rank 0 is gone")
            raise error
        return 0

    monkeypatch.setattr(runner, "_attempt", attempt)
    assert run(CONFIGS / "sft_tiny_cpu.yaml", ["+cluster.max_restarts=1", "checkpointing.enabled=true"], "sft") == 0
    assert "Restart 1 of at most 1 (cluster.max_restarts)." in capsys.readouterr().out
    assert len(limits) == 2 and limits[0] is limits[1]


def test_a_restart_needs_gpus_if_the_first_attempt_had_them(monkeypatch):
    needs, had = [], iter([True, True])

    class FakeCluster:
        def __init__(self, *, needs_gpus, **options):
            needs.append(needs_gpus)
            self.has_gpus, self.logs_folder = next(had), None

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def gcs_watch(self, message):
            return nullcontext()

    def lose_a_worker(*arguments):
        raise WorkerError(0, "train", ActorDiedError(), "")

    monkeypatch.setattr("nemo_offload_rl.placement.cluster.Cluster", FakeCluster)
    monkeypatch.setattr(Job, "for_machine", lambda job, machine: replace(job, resolved=Resolved(job.config, None)))
    monkeypatch.setattr(runner, "_run_jobs", lose_a_worker)
    with pytest.raises(WorkerError):
        run(CONFIGS / "sft_tiny_cpu.yaml", ["+cluster.max_restarts=1", "checkpointing.enabled=true"], "sft")
    assert needs == [False, True]


def test_a_checkpoint_that_cannot_be_used_is_not_said_to_be_resumed(monkeypatch, capsys):
    def find_damage(*arguments):
        raise DamagedCheckpointError("Checkpoint step_4 is damaged.")

    cluster = SimpleNamespace(gcs_watch=lambda message: nullcontext())
    monkeypatch.setattr(runner, "_start_cluster", lambda jobs, restarts: nullcontext((cluster, jobs)))
    monkeypatch.setattr(runner, "_run_jobs", find_damage)
    assert run(CONFIGS / "sft_tiny_cpu.yaml", ["checkpointing.enabled=true"], "sft") == 1
    assert capsys.readouterr().err == "Checkpoint step_4 is damaged.\n"


@pytest.mark.parametrize(
    ("address", "message"),
    [
        (None, "no head of a Ray cluster answers there within 10 s"),
        ("ray://127.0.0.1:10001", "not through Ray Client (ray://)"),
        ("head", "RAY_ADDRESS is head, which names no head of a Ray cluster: it has to be the HOST:PORT"),
    ],
)
def test_an_unusable_ray_address_is_one_message_and_status_2(address, message, monkeypatch, tmp_path, capsys):
    with socket.socket() as closed:
        closed.bind(("127.0.0.2", 0))  # nothing listens here
        address = address or f"127.0.0.2:{closed.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        for name in ("placement.cluster.starts_ray_here", "placement.cluster.ray.is_initialized"):
            monkeypatch.setattr(f"nemo_offload_rl.{name}", lambda: False)
        monkeypatch.setattr("ray.init", lambda **options: pytest.fail("Ray tries for minutes"))
        folders = [f"logger.log_dir={tmp_path}", "checkpointing.enabled=false"]
        assert run(CONFIGS / "sft_tiny_cpu.yaml", folders, "sft") == EXIT_WRONG_RECIPE
    assert f"RAY_ADDRESS is {address}" in (captured := capsys.readouterr()).err
    assert message in captured.err and captured.err.count("\n") == 1


def test_what_a_warm_start_cannot_do_is_said_of_it():
    class Asked:
        def __init__(self, error=None):
            self.error = error

        def for_machine(self, machine):
            if self.error is not None:
                raise self.error
            return machine

    assert runner._for_machine([Asked(), Asked()], "here") == ["here", "here"]
    with pytest.raises(ValueError, match=r"no room.*warm_start.overrides"):
        runner._for_machine([Asked(ValueError("no room.")), Asked()], "here")
    with pytest.raises(ValueError, match=r"no room\.$"):
        runner._for_machine([Asked(), Asked(ValueError("no room."))], "here")


NODE = "10.0.0.2 (0123abcd)"


def test_the_loss_of_a_process_or_a_node_is_followed_by_so_many_restarts():
    restarts = Restarts(2)
    assert restarts.take(WorkerError(1, "train", ActorDiedError(), "", NODE))
    assert restarts.take(GenerationError("generate", NodeLostError("gone"), ""))
    assert str(restarts) == "Restart 2 of at most 2 (cluster.max_restarts)"
    assert not restarts.take(WorkerError(1, "train", ActorDiedError(), ""))
    assert not Restarts(0).take(WorkerError(1, "train", ActorDiedError(), ""))


@pytest.mark.parametrize(
    "cause", [RuntimeError("shapes differ"), torch.OutOfMemoryError("CUDA"), OutOfMemoryError("of the host")]
)
def test_what_would_be_raised_again_is_not(cause):
    assert not Restarts(2).take(WorkerError(0, "train", cause, ""))


def test_the_summary_names_the_node_that_is_gone():
    lost = NodeLostError(f"node {NODE} has not answered for 30 s")
    error = WorkerError(1, "train", lost, "", NODE)
    assert str(error).startswith(f"Rank 1 on node {NODE} failed in train: NodeLostError: node")
    add_failure_summary(error, None)
    output, reason = error.__notes__
    assert output.startswith("The output of the workers is in Ray's session folder on their node (/tmp/ray/session_lat")
    assert reason.startswith(f"The run failed: rank 1 of the policy, on node {NODE}, failed in train: node {NODE} has")


def test_the_summary_of_a_lost_engine_names_the_rank_beside_it():
    error = GenerationError("generate", NodeLostError(f"node {NODE} does not answer"), "", (1, NODE))
    assert str(error).startswith(f"Generation beside rank 1 on node {NODE} failed in generate: NodeLostError: ")
    add_failure_summary(error, None)
    reason = f"The run failed: generation beside rank 1, on node {NODE}, failed in generate: "
    assert error.__notes__[1].startswith(reason)


def test_the_summary_of_a_refit_names_the_engine_that_it_has_lost():
    lost = EngineLostError(
        f"The refit has lost generation engine 1 on node {NODE}.\nThe actor died: its node has died."
    )
    error = WorkerError(0, "send_weights", lost, "", "10.0.0.1")
    add_failure_summary(error, None)
    assert error.__notes__[1].endswith(
        f"failed in send_weights: The refit has lost generation engine 1 on node {NODE}."
    )
