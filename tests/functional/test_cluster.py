"""Tests runs on a Ray cluster of two nodes on this host, one rank each: submitted as a job, and losing a node."""

import contextlib
import importlib.util
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from support.examples import ROOT, Finished
from support.ray_nodes import ray_nodes
from support.reliability import ROWS_PER_STEP, TINIEST, LiveRun, rewards_file, running, to_the_end

pytestmark = [pytest.mark.slow, pytest.mark.reliability]

TWO_NODES = ["cluster.num_nodes=2", "cluster.gpus_per_node=1"]
has_job_server = importlib.util.find_spec("aiohttp_cors") is not None


@pytest.fixture(scope="module")
def nodes():
    """Starts a cluster whose head has one rank; tests add a second node."""
    with ray_nodes(with_dashboard=has_job_server) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> dict[int, dict[str, float]]:
    return to_the_end(tmp_path_factory.mktemp("undisturbed"), ["cluster.gpus_per_node=2"]).metrics()


def in_a_step(run: LiveRun) -> None:
    """Waits until step 4 trains, or is about to: its answers are judged."""
    run.wait_until(lambda: run.num_rows() >= 3)
    judged = run.num_rewards()
    run.wait_until(lambda: run.num_rewards() >= judged + ROWS_PER_STEP)


def newest(run: LiveRun) -> Path:
    return max(run.checkpoints.glob("step_*"), key=lambda path: int(path.name.removeprefix("step_")))


def has_rank(family: list[psutil.Process]) -> bool:
    """Returns whether one of the processes is a policy worker's."""
    found = False
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            found |= process.name().startswith("ray::WorkerActo")
    return found


@pytest.mark.skipif(not has_job_server, reason="needs the extra `cluster`, Ray's job server")
def test_a_submitted_job_has_a_rank_on_each_node_and_the_metrics_of_one_node(nodes, undisturbed, tmp_path):
    nodes.start(3)
    with (tmp_path / "output.txt").open("w") as output:
        places = [f"logger.log_dir={tmp_path / 'logs'}", f"checkpointing.checkpoint_dir={tmp_path / 'checkpoints'}"]
        entrypoint = ["uv", "run", "--frozen", "examples/run_grpo.py", *places, *TINIEST, *TWO_NODES]
        job = subprocess.Popen(
            [str(Path(sys.executable).parent / "ray"), "job", "submit", f"--address={nodes.dashboard}",
             "--working-dir=.", f'--runtime-env-json={{"env_vars": {{"REWARDS_FILE": "{rewards_file(tmp_path)}"}}}}',
             "--", *entrypoint],
            cwd=ROOT, env=nodes.environment(), stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
        ranks: set[int] = set()
        while job.poll() is None:
            ranks |= {number for number in (2, 3) if has_rank(nodes.family(number))}
            time.sleep(0.1)
    nodes.remove(3)
    assert job.returncode == 0, (tmp_path / "output.txt").read_text()
    assert ranks == {2, 3}
    assert Finished(tmp_path, 0, "").metrics() == undisturbed


@pytest.mark.parametrize("loss", [signal.SIGKILL, signal.SIGSTOP])
def test_a_node_that_goes_away_ends_the_run_with_rank_node_and_checkpoint(nodes, tmp_path, loss, record_property):
    nodes.start(4)
    with running(tmp_path, TWO_NODES, **nodes.environment(), RAY_ADDRESS=nodes.address) as run:
        in_a_step(run)
        nodes.signal(4, loss)
        start = time.monotonic()
        assert run.end() == 1, run.output
        record_property("seconds_until_end", round(time.monotonic() - start, 1))
        assert time.monotonic() - start <= 60, run.output
    nodes.remove(4)
    *_, failed, goes_on = run.output.splitlines()
    who = r"(rank 1 of the policy|generation beside rank 1), on node (127\.0\.0\.4 \(\w{8}\)), failed in \w+: node \2 "
    assert re.match(rf"The run failed: {who}(does not answer|has not answered for 30 s): ", failed), run.output
    assert f"The same command resumes from {newest(run)}." in goes_on


@pytest.mark.parametrize("loss", [signal.SIGKILL, signal.SIGSTOP])
def test_with_max_restarts_a_run_goes_on_on_another_node_bit_for_bit(nodes, undisturbed, tmp_path, loss):
    nodes.start(5)
    overrides = [*TWO_NODES, "++cluster.max_restarts=1"]
    with running(tmp_path, overrides, **nodes.environment(), RAY_ADDRESS=nodes.address) as run:
        in_a_step(run)
        nodes.signal(5, loss)
        run.wait_until(lambda: "Restart 1 of at most 1 (cluster.max_restarts)." in run.output)
        nodes.start(6)
        assert run.end() == 0, run.output
    nodes.remove(5)
    nodes.remove(6)
    assert re.search(rf"Resuming from {run.checkpoints}/step_[24]\.", run.output)
    assert run.metrics() == undisturbed
